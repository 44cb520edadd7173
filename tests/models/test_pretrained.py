"""Pretrained weights come from the library's files, except the head for another number of classes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from shardio.train.models import make_model
from tests.models.model_libraries import load


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the caches of weights empty and the network unreachable; return torchvision's cache directory."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # Nothing listens on this port.
    checkpoints = tmp_path / "torch/hub/checkpoints"
    checkpoints.mkdir(parents=True)
    return checkpoints


@pytest.fixture
def timm_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the cache of timm's weights empty and the network unreachable; return the cache directory."""
    load("timm")
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))  # What HF_HOME sets, but only before the import.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def fill_tensors(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state whose tensors each repeat one number, which is stored only once in memory and in files."""
    return {
        name: torch.full((), number % 100 + 1, dtype=tensor.dtype).expand(tensor.shape)
        for number, (name, tensor) in enumerate(shapes.items())
    }


def other_tensors(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model that differ from those of a state with the same names."""
    found = model.state_dict()
    assert set(found) == set(state)
    return {name: tensor for name, tensor in found.items() if not torch.equal(tensor, state[name])}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("mobilenet_v3_small", "classifier.3"),
        ("squeezenet1_1", "classifier.1"),
        pytest.param("resnet18", "fc", marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", "classifier.1", marks=pytest.mark.slow),
        pytest.param("densenet121", "classifier", marks=pytest.mark.slow),
        pytest.param("vit_b_16", "heads.head", marks=pytest.mark.slow),
    ],
)
def test_torchvisions_pretrained_weights_are_loaded_except_the_head(no_network: Path, name: str, head: str) -> None:
    models = load("torchvision").models
    with torch.device("meta"):
        shapes = models.get_model(name).state_dict()
    state = fill_tensors(shapes)
    # torch uses a file that was downloaded before.
    torch.save(state, no_network / models.get_model_weights(name).DEFAULT.url.rpartition("/")[2])

    side = 224 if name == "vit_b_16" else 64  # Its weights only fit images of this size.
    model = make_model(f"torchvision:{name}", num_classes=5, image_size=side, pretrained=True)
    new = other_tensors(model, state)
    assert set(new) == {f"{head}.weight", f"{head}.bias"}
    with torch.no_grad():
        assert model.eval()(torch.rand(1, 3, side, side)).shape == (1, 5)


def test_torchvisions_head_is_kept_if_it_has_the_right_number_of_outputs(no_network: Path) -> None:
    models = load("torchvision").models
    state = fill_tensors(models.squeezenet1_1().state_dict())
    torch.save(state, no_network / models.get_model_weights("squeezenet1_1").DEFAULT.url.rpartition("/")[2])
    model = make_model("torchvision:squeezenet1_1", num_classes=1000, image_size=64, pretrained=True)
    assert not other_tensors(model, state)


@pytest.mark.parametrize(("name", "head"), [("test_resnet", "fc"), ("mobilenetv3_small_050", "classifier")])
@pytest.mark.parametrize("num_classes", [5, 1000])
def test_timms_pretrained_weights_are_loaded_except_the_head(
    timm_cache: Path, name: str, head: str, num_classes: int
) -> None:
    timm = load("timm")
    state = fill_tensors(timm.create_model(name).state_dict())
    folder = timm_cache / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    commit = "0" * 40
    weights = safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
    for path, content in ((f"snapshots/{commit}/model.safetensors", weights), ("refs/main", commit.encode())):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_bytes(content)

    model = make_model(f"timm:{name}", num_classes=num_classes, image_size=64, pretrained=True)
    new = other_tensors(model, state)
    assert set(new) == ({f"{head}.weight", f"{head}.bias"} if num_classes == 5 else set())
    assert model.eval()(torch.rand(1, 3, 64, 64)).shape == (1, num_classes)


def test_a_failed_download_of_torchvisions_weights_names_the_remedy(no_network: Path) -> None:
    load("torchvision")
    with pytest.raises(OSError, match=r"weights for torchvision:resnet18 \(.*refused.*train from scratch"):
        make_model("torchvision:resnet18", num_classes=3, image_size=32, pretrained=True)


def test_a_failed_download_of_timms_weights_names_the_remedy(timm_cache: Path) -> None:
    with pytest.raises(OSError, match=r"weights for timm:resnet18 \(.*HF_HOME.*train from scratch"):
        make_model("timm:resnet18", num_classes=3, image_size=32, pretrained=True)


def test_a_pretrained_transformer_for_another_image_size_is_refused_before_the_download(no_network: Path) -> None:
    load("torchvision")
    with pytest.raises(ValueError, match=r"image_size=32 and pretrained=True: .*expected value 224 but got 32"):
        make_model("torchvision:vit_b_16", num_classes=3, image_size=32, pretrained=True)


def test_a_model_that_is_not_downloaded_is_not_said_to_be(tmp_path: Path) -> None:
    load("timm")
    with pytest.raises(OSError, match=r"timm:local-dir:.* cannot be loaded") as raised:
        make_model(f"timm:local-dir:{tmp_path}/none", num_classes=3, image_size=32)
    assert "download" not in str(raised.value)
