"""Pretrained weights are those of the library's files, all but the head of another number of classes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from shardio.train.models import make_model
from tests.train.libraries import load


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of weights, and nowhere to fill them from; return the directory of torchvision's."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # Nothing listens there.
    checkpoints = tmp_path / "torch/hub/checkpoints"
    checkpoints.mkdir(parents=True)
    return checkpoints


@pytest.fixture
def timm_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of timm's weights, and nowhere to fill it from."""
    load("timm")
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))  # What HF_HOME sets, but only before the import.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def fill_tensors(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state in which each tensor repeats a number of its own, in memory and in files only once."""
    return {
        name: torch.full((), number % 100 + 1, dtype=tensor.dtype).expand(tensor.shape)
        for number, (name, tensor) in enumerate(shapes.items())
    }


def other_tensors(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that are not those of a state of the same names."""
    found = model.state_dict()
    assert set(found) == set(state)
    return {name: tensor for name, tensor in found.items() if not torch.equal(tensor, state[name])}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("mobilenet_v3_small", "classifier.3"),
        ("efficientnet_b0", "classifier.1"),
        ("convnext_tiny", "classifier.2"),
        ("squeezenet1_1", "classifier.1"),
        ("densenet121", "classifier"),
        ("vit_b_16", "heads.head"),
    ],
)
def test_torchvisions_pretrained_weights_are_loaded_all_but_the_head(no_network: Path, name: str, head: str) -> None:
    models = load("torchvision").models
    with torch.device("meta"):
        shapes = models.get_model(name).state_dict()
    state = fill_tensors(shapes)
    # A file that torch has downloaded before is used as it is.
    torch.save(state, no_network / models.get_model_weights(name).DEFAULT.url.rpartition("/")[2])

    side = 224 if name == "vit_b_16" else 64  # Its weights are for images of that size alone.
    model = make_model(f"torchvision:{name}", num_classes=5, image_size=side, pretrained=True)
    new = other_tensors(model, state)
    assert set(new) == {f"{head}.weight", f"{head}.bias"}
    with torch.no_grad():
        assert model.eval()(torch.rand(1, 3, side, side)).shape == (1, 5)


def test_torchvisions_head_is_kept_where_it_has_as_many_outputs(no_network: Path) -> None:
    models = load("torchvision").models
    state = fill_tensors(models.squeezenet1_1().state_dict())
    torch.save(state, no_network / models.get_model_weights("squeezenet1_1").DEFAULT.url.rpartition("/")[2])
    model = make_model("torchvision:squeezenet1_1", num_classes=1000, image_size=64, pretrained=True)
    assert not other_tensors(model, state)


@pytest.mark.parametrize(("name", "head"), [("test_resnet", "fc"), ("mobilenetv3_small_050", "classifier")])
@pytest.mark.parametrize("num_classes", [5, 1000])
def test_timms_pretrained_weights_are_loaded_all_but_the_head(
    timm_cache: Path, name: str, head: str, num_classes: int
) -> None:
    timm = load("timm")
    state = fill_tensors(timm.create_model(name).state_dict())
    folder = timm_cache / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    commit = "0" * 40
    for path, content in [
        (
            f"snapshots/{commit}/model.safetensors",
            safetensors.torch.save({k: t.contiguous() for k, t in state.items()}),
        ),
        ("refs/main", commit.encode()),
    ]:
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_bytes(content)

    model = make_model(f"timm:{name}", num_classes=num_classes, image_size=64, pretrained=True)
    new = other_tensors(model, state)
    assert set(new) == ({f"{head}.weight", f"{head}.bias"} if num_classes == 5 else set())
    assert model.eval()(torch.rand(1, 3, 64, 64)).shape == (1, num_classes)


def test_weights_that_cannot_be_downloaded_are_an_error_that_says_what_to_do(no_network: Path) -> None:
    load("torchvision")
    with pytest.raises(OSError, match=r"weights for torchvision:resnet18 \(.*refused.*train from scratch"):
        make_model("torchvision:resnet18", num_classes=3, image_size=32, pretrained=True)


def test_weights_that_timm_cannot_download_are_the_same_error(timm_cache: Path) -> None:
    with pytest.raises(OSError, match=r"weights for timm:resnet18 \(.*HF_HOME.*train from scratch"):
        make_model("timm:resnet18", num_classes=3, image_size=32, pretrained=True)


def test_a_pretrained_transformer_of_another_image_size_is_refused_before_the_download(no_network: Path) -> None:
    load("torchvision")
    with pytest.raises(ValueError, match=r"image_size=32 and pretrained=True: .*expected value 224 but got 32"):
        make_model("torchvision:vit_b_16", num_classes=3, image_size=32, pretrained=True)
