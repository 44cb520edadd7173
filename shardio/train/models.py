"""The models that a training run can make by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
from torch import nn

from shardio.libraries import import_library
from shardio.values import load_function

KINDS = "small, torchvision:NAME, timm:NAME, package.module:function or path/to/file.py:function"

SEVERAL_OUTPUTS = ("googlenet", "inception_v3")
"""Classifiers of torchvision that return several outputs in training mode."""


def make_model(name: str, *, num_classes: int, image_size: int, pretrained: bool = False) -> nn.Module:
    """Make a model by name.

    ======================================  ======================================================================
    ``small``                               :func:`small_resnet`
    ``torchvision:resnet18``                a torchvision classifier
    ``timm:resnet18``                       a timm model; ``timm:resnet18.a1_in1k`` and ``timm:hf-hub:…`` also work
    ``package.module:function``,            the return value of that function or class
    ``path/to/file.py:function``
    ======================================  ======================================================================

    A pretrained model keeps its head if the head has ``num_classes`` outputs, and gets a new one otherwise. Models of
    timm and torchvision that need a fixed image size are made for ``image_size``. With pretrained weights,
    torchvision's fixed-size models accept only the size that they were trained on.

    Your own function is called with those of the keyword arguments ``num_classes``, ``image_size`` and ``pretrained``
    that it has parameters for. With ``**kwargs``, it also gets ``num_classes``. It may return a scripted or a compiled
    model.

    Args:
        name: A name from the table.
        num_classes: The number of outputs.
        image_size: The side of the square images, in pixels.
        pretrained: Whether to start with the library's weights, which are downloaded if they are not cached.

    Returns:
        A model that maps images, float [N, 3, ``image_size``, ``image_size``], to outputs [N, ``num_classes``].

    Raises:
        ValueError: If the model does not exist, its library is not installed, or ``pretrained`` is set and it has no
            pretrained weights.
        TypeError: If your function does not return a model.
        OSError: If pretrained weights cannot be downloaded, or the files of a model cannot be read.
    """
    prefix, _, rest = name.partition(":")
    if make := _FACTORIES.get(prefix):
        return make(rest, num_classes, image_size, pretrained)
    return _make_own(name, num_classes, image_size, pretrained)


def small_resnet(num_classes: int, image_size: int, width: int = 32) -> nn.Sequential:
    """Return a small residual network (He et al., "Deep residual learning for image recognition", 2016).

    It has a stem and, depending on ``image_size``, one to five blocks.

    Args:
        num_classes: The number of outputs.
        image_size: The side of the square images, in pixels. The stem and each block halve the side: sides of 16 to 512
            pixels end at 4 to 8 pixels.
        width: The number of channels after the stem. Each block doubles it, up to 8 times ``width``.
    """
    num_blocks = min(max(image_size.bit_length() - 4, 1), 5)
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    channels = [min(width * 2**i, 8 * width) for i in range(num_blocks + 1)]
    blocks = [ResidualBlock(channels[i], channels[i + 1], stride=2) for i in range(num_blocks)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut. ``stride`` 2 halves the image."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def _make_small(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    if name:
        raise ValueError(f"there is only one small model, got 'small:{name}': use 'small'")
    if pretrained:
        raise ValueError("there are no pretrained weights for 'small': train it from scratch, or use another model")
    return small_resnet(num_classes, image_size)


def _make_torchvision(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    models = import_library("torchvision").models
    _check_known(name, models.list_models(module=models), "torchvision")
    if name in SEVERAL_OUTPUTS:
        raise ValueError(
            f"torchvision:{name} returns several outputs in training, but train() needs one: use another model"
        )
    # Vision transformers learn an embedding for each position in the image.
    size = {"image_size": image_size} if name.startswith("vit_") else {}
    with _errors_name_the_model(f"torchvision:{name}", image_size, pretrained):
        if not pretrained:
            model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **size)
            return model
        model = models.get_model(name, weights="DEFAULT", **size)
    _fit_head(model, num_classes)
    return model


def _fit_head(model: nn.Module, num_classes: int) -> None:
    """Replace the head of a torchvision classifier, unless it has this number of outputs.

    Model families name their heads differently, but all add the head last. It is the last Linear, or the last
    convolution in SqueezeNet, which has no Linear.
    """
    path, head = [(path, m) for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1]
    if head.weight.shape[0] == num_classes:
        return
    has_bias = head.bias is not None
    if isinstance(head, nn.Linear):
        model.set_submodule(path, nn.Linear(head.in_features, num_classes, bias=has_bias))
    else:
        model.set_submodule(path, nn.Conv2d(head.in_channels, num_classes, kernel_size=1, bias=has_bias))


def _make_timm(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    timm = import_library("timm")
    is_listed = ":" not in name  # Models such as hf-hub:… and local-dir:… have their own settings.
    if is_listed:
        _check_known(name.partition(".")[0], timm.list_models(), "timm")
    with _errors_name_the_model(f"timm:{name}", image_size, pretrained):
        is_fixed = is_listed and getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
        size = {"img_size": image_size} if is_fixed else {}
        model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **size)
    return model


def _make_own(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    try:
        function = load_function(name)
    except ValueError as error:
        raise ValueError(f"there is no model {name!r} ({error}): pass {KINDS}") from error
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if pretrained and "pretrained" not in parameters:
        raise ValueError(f"{name} has no pretrained weights: add a parameter 'pretrained' to the function")
    offered = {"num_classes": num_classes, "image_size": image_size, "pretrained": pretrained}
    wanted = {key for key in offered if key in parameters} | ({"num_classes"} if takes_any else set())
    model = function(**{key: value for key, value in offered.items() if key in wanted})
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


_FACTORIES: dict[str, Callable[[str, int, int, bool], nn.Module]] = {
    "small": _make_small,
    "torchvision": _make_torchvision,
    "timm": _make_timm,
}
"""The functions that make models, by prefix. All other names are the user's own functions."""


def _check_known(name: str, known: list[str], library: str) -> None:
    if name not in known:
        near = get_close_matches(name, known)
        remedy = f"did you mean {', '.join(near)}?" if near else f"see its documentation for its {len(known)} models"
        raise ValueError(f"{library} has no classifier {name!r}: {remedy}")


@contextmanager
def _errors_name_the_model(name: str, image_size: int, pretrained: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not pretrained or name.startswith("timm:local-dir:"):
            raise OSError(
                f"{name} cannot be loaded ({error}): check the name and, if the model comes from a hub, the connection"
            ) from error
        raise OSError(
            f"could not download pretrained weights for {name} ({error}): check the connection, put the file into the "
            "library's cache ($TORCH_HOME, or $HF_HOME for timm), or train from scratch"
        ) from error
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be made with {image_size=} and {pretrained=}: {error}") from error
