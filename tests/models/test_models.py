"""Models by name: every kind can be trained and can have pretrained weights, and unknown names are rejected."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from shardio.libraries import import_library
from shardio.train import TrainConfig, train
from shardio.train.models import make_model, small_resnet
from tests.train.runs import make_batches, weights_of


def load(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return import_library(name)


WIDTH = 8
"""The small model's width. With a width of 4, torch 2.13's strided 1x1 convolution corrupts memory if there is no
AVX-512."""

needs_torchscript = pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch has no TorchScript on Python 3.14")

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))

def plain(num_classes):
    return Net(num_classes)

def any_options(**options):
    assert set(options) == {"num_classes"}
    return Net(**options)

def by_size(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))

def of_its_own_size():
    return Net(3)

def with_weights(num_classes, pretrained):
    net = Net(num_classes)
    if pretrained:
        nn.init.constant_(net.body.weight, 7)
    return net

def scripted(num_classes):
    return torch.jit.script(Net(num_classes))

def compiled(num_classes):
    return torch.compile(Net(num_classes), backend="eager")

def no_model(num_classes):
    return num_classes
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_models.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop(path.stem, None)


def assert_trains(model: nn.Module, num_classes: int, image_size: int) -> None:
    """Compute one step with torch, and check that every weight gets a gradient."""
    images, labels = torch.rand(4, 3, image_size, image_size), torch.arange(4) % num_classes
    outputs = model.train()(images)
    assert outputs.shape == (4, num_classes)
    assert outputs.isfinite().all()
    nn.functional.cross_entropy(outputs, labels).backward()
    gradients = [weight.grad for weight in model.parameters()]
    assert None not in gradients
    assert any(gradient.any() for gradient in gradients if gradient is not None)


TORCHVISION = ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "squeezenet1_1", "vit_b_16")
SLOW_MODELS = (*(f"torchvision:{name}" for name in TORCHVISION), "timm:resnet18.a1_in1k")


@pytest.mark.parametrize(
    "name", ["small", "timm:test_vit", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MODELS)]
)
def test_every_kind_of_model_has_one_output_per_class_and_trains(name: str) -> None:
    if ":" in name:
        load(name.partition(":")[0])
    image_size = 64 if "squeezenet" in name else 32
    assert_trains(make_model(name, num_classes=3, image_size=image_size), 3, image_size)


@pytest.mark.parametrize("function", ["Net", "plain", "any_options", "by_size", "of_its_own_size", "with_weights"])
@pytest.mark.parametrize("module", ["own_models.py", "./own_models.py", "own_models"])
def test_functions_of_files_and_modules_get_the_arguments_they_accept(own: Path, module: str, function: str) -> None:
    assert_trains(make_model(f"{module}:{function}", num_classes=3, image_size=8), 3, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # torch.jit still works.
@pytest.mark.parametrize("function", [pytest.param("scripted", marks=needs_torchscript), "compiled"])
def test_scripted_and_compiled_models_can_be_trained_and_saved(own: Path, function: str) -> None:
    model = make_model(f"own_models:{function}", num_classes=3, image_size=8)
    before = weights_of(model)
    train(model, make_batches([4, 4], side=8), TrainConfig(epochs=1, precision="fp32", device="cpu", lr=0.01))
    assert any(not torch.equal(one, other) for one, other in zip(before, weights_of(model), strict=True))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = make_model(f"own_models:{function}", num_classes=3, image_size=8)
    other.load_state_dict(torch.load(file))
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(other(images), model(images))  # The models' weights differ in memory layout.


REFUSED = [
    ("torchvision:resnet_18", False, "did you mean resnet18"),
    ("torchvision:", False, "no classifier ''"),
    ("torchvision:fasterrcnn_resnet50_fpn", False, "no classifier"),  # This is a torchvision detection model.
    ("torchvision:inception_v3", False, "several outputs"),
    ("torchvision:vit_h_14", False, r"cannot be made with image_size=32.*patch size"),
    ("torchvision:vit_b_16", True, r"image_size=32 and pretrained=True: .*expected value 224 but got 32"),
    ("timm:resnt18", False, "did you mean resnet18"),
    ("timm:resnet18.nonsense", False, "Invalid pretrained tag"),
    ("timm:test_resnet.nonsense", True, "Invalid pretrained tag"),
    ("timm:hub:timm/resnet18", False, "hub"),
    ("resnet18", False, "pass small, torchvision:NAME"),
    ("torchvsion:resnet18", False, "no module 'torchvsion'.*pass small, torchvision:NAME"),
    ("a.b/c:make", False, "does not name a function"),
    ("small:resnet18", False, "only one small model"),
    ("nowhere.py:make", False, "the script nowhere.py does not exist"),
    ("own_models.py:nothing", False, "has no function 'nothing'"),
    ("own_models:nothing", False, "has no function 'nothing'"),
    *((name, True, "no pretrained weights") for name in ("small", "own_models.py:plain", "own_models:any_options")),
]


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize(("name", "pretrained", "message"), REFUSED)
def test_models_that_do_not_exist_or_cannot_train_are_refused(
    own: Path, name: str, pretrained: bool, message: str
) -> None:
    if (library := name.partition(":")[0]) in ("torchvision", "timm"):
        load(library)
    with pytest.raises(ValueError, match=message):
        make_model(name, num_classes=3, image_size=32, pretrained=pretrained)


def test_functions_may_load_weights_must_return_a_model_and_import_what_exists(own: Path) -> None:
    model = make_model("own_models.py:with_weights", num_classes=3, image_size=8, pretrained=True)
    assert (model.state_dict()["body.weight"] == 7).all()
    with pytest.raises(TypeError, match=r"own_models.py:no_model must return a torch.nn.Module, got int"):
        make_model("own_models.py:no_model", num_classes=3, image_size=32)
    own.with_name("broken_models.py").write_text("import shardio_needs_this")
    with pytest.raises(ModuleNotFoundError, match="shardio_needs_this"):
        make_model("broken_models:plain", num_classes=3, image_size=32)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_missing_or_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, library, None)
        with pytest.raises(ValueError, match=f"needs {library}, which is not installed: pip install {library}"):
            make_model(f"{library}:resnet18", num_classes=3, image_size=32)
    with monkeypatch.context() as missing:
        missing.delitem(sys.modules, library, raising=False)
        (tmp_path / f"{library}.py").write_text("import library_of_library.part")
        missing.syspath_prepend(tmp_path)
        with pytest.raises(ValueError, match=r"not installed: pip install library_of_library$"):
            make_model(f"{library}:resnet18", num_classes=3, image_size=32)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::roi does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(torch.library, "define", lambda *_: None)  # Defining operators affects the whole process.
    with pytest.raises(ValueError, match=rf"with torch {torch.__version__.replace('+', '.')} .*::roi.*that match"):
        make_model(f"{library}:resnet18", num_classes=3, image_size=32)


@pytest.mark.parametrize(
    "image_size", [8, 16, 17, 31, *(pytest.param(side, marks=pytest.mark.slow) for side in (64, 65, 224))]
)
def test_the_small_model_trains_at_every_image_size(image_size: int) -> None:
    model = small_resnet(10, image_size, width=WIDTH)
    assert_trains(model, 10, image_size)
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    assert model(torch.rand(1, 3, image_size, image_size)).shape == (1, 10), "the last batch may have a single image"
    counts = [value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert set(map(int, counts)) == {2}, "training updates BatchNorm's statistics"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the libraries' caches of weights empty and the network unreachable. Return the caches' directory."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # Nothing listens on this port.
    if importlib.util.find_spec("huggingface_hub") is not None:
        constants = importlib.import_module("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))  # After the import, HF_HOME has no effect.
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def fill_tensors(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state in which each tensor repeats a single number, stored only once in memory and in files."""
    return {
        name: torch.full((), number % 100 + 1, dtype=tensor.dtype).expand(tensor.shape)
        for number, (name, tensor) in enumerate(shapes.items())
    }


def assert_weights_but_of(head: str, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Check that a model's tensors equal those in a state, except those of ``head`` if a head is named."""
    found = model.state_dict()
    assert found.keys() == state.keys()
    different = {name for name, tensor in found.items() if not torch.equal(tensor, state[name])}
    assert different == ({f"{head}.weight", f"{head}.bias"} if head else set())


@pytest.mark.parametrize(
    ("name", "head", "num_classes"),
    [
        *(("mobilenet_v3_small", "classifier.3", 5), ("squeezenet1_1", "classifier.1", 5), ("squeezenet1_1", "", 1000)),
        pytest.param("resnet18", "fc", 5, marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", "classifier.1", 5, marks=pytest.mark.slow),
        pytest.param("densenet121", "classifier", 5, marks=pytest.mark.slow),
        pytest.param("vit_b_16", "heads.head", 5, marks=pytest.mark.slow),
    ],
)
def test_torchvisions_pretrained_weights_are_loaded_but_the_head(
    caches: Path, name: str, head: str, num_classes: int
) -> None:
    models = load("torchvision").models
    with torch.device("meta"):
        shapes = models.get_model(name).state_dict()
    state = fill_tensors(shapes)
    # torch uses a file that has already been downloaded.
    (folder := caches / "torch/hub/checkpoints").mkdir(parents=True)
    torch.save(state, folder / models.get_model_weights(name).DEFAULT.url.rpartition("/")[2])
    side = 224 if name == "vit_b_16" else 64  # The weights of vit_b_16 need this size.
    model = make_model(f"torchvision:{name}", num_classes=num_classes, image_size=side, pretrained=True)
    assert_weights_but_of(head, model, state)
    with torch.no_grad():
        assert model.eval()(torch.rand(1, 3, side, side)).shape == (1, num_classes)


@pytest.mark.parametrize(("name", "head"), [("test_resnet", "fc"), ("mobilenetv3_small_050", "classifier")])
@pytest.mark.parametrize("num_classes", [5, 1000])
def test_timms_pretrained_weights_are_loaded_but_the_head(caches: Path, name: str, head: str, num_classes: int) -> None:
    timm = load("timm")
    state = fill_tensors(timm.create_model(name).state_dict())
    folder = caches / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    commit = "0" * 40
    weights = safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
    for path, content in ((f"snapshots/{commit}/model.safetensors", weights), ("refs/main", commit.encode())):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_bytes(content)

    model = make_model(f"timm:{name}", num_classes=num_classes, image_size=64, pretrained=True)
    assert_weights_but_of(head if num_classes == 5 else "", model, state)
    assert model.eval()(torch.rand(1, 3, 64, 64)).shape == (1, num_classes)


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize(("library", "reason"), [("torchvision", "refused"), ("timm", "HF_HOME")])
def test_a_failed_download_names_the_remedy(library: str, reason: str) -> None:
    load(library)
    with pytest.raises(OSError, match=rf"weights for {library}:resnet18 \(.*{reason}.*train from scratch"):
        make_model(f"{library}:resnet18", num_classes=3, image_size=32, pretrained=True)


def test_a_model_that_is_not_downloaded_is_not_said_to_be(tmp_path: Path) -> None:
    load("timm")
    with pytest.raises(OSError, match=r"timm:local-dir:.* cannot be loaded") as raised:
        make_model(f"timm:local-dir:{tmp_path}/none", num_classes=3, image_size=32)
    assert "download" not in str(raised.value)
