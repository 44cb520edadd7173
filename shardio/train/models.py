"""Models by their names, as ``shardio train --model`` has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

from torch import nn

from shardio.functions import load_function
from shardio.train.libraries import import_library
from shardio.train.resnet import small_resnet

KINDS = "small, torchvision:NAME, timm:NAME, package.module:function or path/to/file.py:function"

SEVERAL_OUTPUTS = ("googlenet", "inception_v3")
"""Classifiers of torchvision that return several outputs while they are trained."""


def make_model(name: str, *, num_classes: int, image_size: int, pretrained: bool = False) -> nn.Module:
    """Make a model by its name.

    ======================================  ======================================================================
    ``small``                               :func:`small_resnet`
    ``torchvision:resnet18``                a classifier of torchvision
    ``timm:resnet18``                       a model of timm, also ``timm:resnet18.a1_in1k`` and ``timm:hf-hub:…``
    ``package.module:function``,            what that function or class returns
    ``path/to/file.py:function``
    ======================================  ======================================================================

    Pretrained weights come with their head where that has ``num_classes`` outputs, else with a new one. Models of timm
    and torchvision that are made for one size of images are made for ``image_size``, those of torchvision only without
    pretrained weights.

    A function of one's own is called with keyword arguments: with ``num_classes`` if it has a parameter of that name
    or takes ``**kwargs``; with ``image_size`` and with ``pretrained`` if it has parameters of these names. It may
    return a scripted or a compiled model.

    Args:
        name: As above.
        num_classes: The number of outputs.
        image_size: Of the square images in pixels.
        pretrained: Whether to begin with the weights that the library offers, downloaded if they are not in its cache.

    Returns:
        A model from images float [N, 3, ``image_size``, ``image_size``] to outputs [N, ``num_classes``].

    Raises:
        ValueError: If there is no such model, its library is not installed, or there are no pretrained weights for it.
        TypeError: If a function of one's own returns something else.
        OSError: If pretrained weights cannot be downloaded.
    """
    prefix, _, rest = name.partition(":")
    if maker := MAKERS.get(prefix):
        return maker(rest, num_classes, image_size, pretrained)
    return _make_own(name, num_classes, image_size, pretrained)


def _make_small(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    if name:
        raise ValueError(f"there is one small model, got 'small:{name}': write small")
    if pretrained:
        raise ValueError("there are no pretrained weights for 'small': train it from scratch, or choose another model")
    return small_resnet(num_classes, image_size)


def _make_torchvision(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    models = import_library("torchvision").models
    _check_known(name, models.list_models(module=models), "torchvision")
    if name in SEVERAL_OUTPUTS:
        raise ValueError(f"torchvision:{name} returns several outputs in training, where one is taken: choose another")
    # Vision transformers learn a vector for each place in the image.
    size = {"image_size": image_size} if name.startswith("vit_") else {}
    with _errors_name_the_model(f"torchvision:{name}", image_size, pretrained):
        if not pretrained:
            model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **size)
            return model
        model = models.get_model(name, weights="DEFAULT", **size)
    _fit_head(model, num_classes)
    return model


def _fit_head(model: nn.Module, num_classes: int) -> None:
    """Give a classifier of torchvision a new head, unless its own has that number of outputs.

    Families give their heads different names. But modules are listed in the order in which they were added, and every
    family adds its head last: the last Linear, after those of attention blocks and of hidden layers; in SqueezeNet,
    which has none, the last convolution.
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
    is_listed = ":" not in name  # Not so hf-hub:… and local-dir:…, which bring their own settings.
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
        raise ValueError(f"there is no model {name!r} ({error}): a model is {KINDS}") from error
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if pretrained and "pretrained" not in parameters:
        raise ValueError(f"{name} has no pretrained weights to ask for: give the function a parameter 'pretrained'")
    offered = {"num_classes": num_classes, "image_size": image_size, "pretrained": pretrained}
    wanted = {key for key in offered if key in parameters} | ({"num_classes"} if takes_any else set())
    model = function(**{key: value for key, value in offered.items() if key in wanted})
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} must return a torch.nn.Module, got {type(model).__name__}: have it return the model")
    return model


Maker = Callable[[str, int, int, bool], nn.Module]

MAKERS: dict[str, Maker] = {"small": _make_small, "torchvision": _make_torchvision, "timm": _make_timm}
"""Who makes the models of a prefix. All others are functions of one's own."""


def _check_known(name: str, known: list[str], library: str) -> None:
    """Raise a ValueError unless a library knows a model."""
    if name not in known:
        near = get_close_matches(name, known)
        remedy = f"did you mean {', '.join(near)}?" if near else f"its documentation lists the {len(known)} that it has"
        raise ValueError(f"{library} has no classifier {name!r}: {remedy}")


@contextmanager
def _errors_name_the_model(name: str, image_size: int, pretrained: bool) -> Iterator[None]:
    """Say which model could not be made, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"could not download pretrained weights for {name} ({error}): check the connection, put the file into the "
            "library's cache ($TORCH_HOME, for timm $HF_HOME), or train from scratch"
        ) from error
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be made with {image_size=} and {pretrained=}: {error}") from error
