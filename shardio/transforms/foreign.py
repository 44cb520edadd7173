"""Transforms of other libraries, each called with what it acts on.

Torchvision's v2 transforms return a numpy array as it is, without a word; Albumentations' take arrays alone, by name.
Whose a transform is, is seen from its classes, so that none of these libraries is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

Family = Literal["v2", "v1", "albumentations", "module", "other"]

_SEQUENCES = frozenset(
    {
        "torchvision.transforms.transforms.Compose",
        "torchvision.transforms.v2._container.Compose",
        "torch.nn.modules.container.Sequential",
    }
)
"""Classes that do nothing but call others one after another."""

_DEPTH = 4
"""How deep a callable is searched for transforms that it holds."""


def steps_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms that another library's sequence calls; None for anything else."""
    kind = type(transform)
    if f"{kind.__module__}.{kind.__qualname__}" not in _SEQUENCES:
        return None
    return list(getattr(transform, "transforms", None) or transform)


def call(transform: Callable[..., Any], image: Any) -> Any:
    """Call a transform with an image: an array, a tensor [C, H, W] or a Pillow image, made into what it acts on.

    Raises:
        TypeError: If it acts on none of them.
    """
    family = _family(transform)
    if family == "other":
        return transform(image)
    if family == "albumentations":
        return transform(image=as_array(image))["image"]
    if family == "module":
        return transform(next(_forms(image)))
    leaves = list(_leaves(transform))
    for form in _forms(image):
        if all(_acts_on(leaf, form) for leaf in leaves):
            return transform(form)
    raise TypeError(
        f"{transform!r} does nothing to an image that comes as {type(image).__name__}, or parts of it take different "
        "kinds of images: leave it out, or put its parts into Compose([...]) one by one"
    )


def refuse_silent(transform: Callable[..., Any]) -> None:
    """Raise TypeError if a callable that returned the arrays it got calls torchvision's, which ignore arrays."""
    if _family(transform) == "other" and (held := _find_held(transform, _DEPTH)) is not None:
        raise TypeError(
            f"{transform!r} returned the arrays that it got: torchvision's {type(held).__name__}, which it calls, "
            "ignores numpy arrays. Give torchvision's transform itself to the dataset or to Compose, or call it with "
            "torch.from_numpy(image).permute(2, 0, 1)"
        )


def as_array(image: Any) -> Any:
    """Return a tensor [C, H, W] or a Pillow image as an array [H, W, C]; anything else as it is."""
    if isinstance(image, Image.Image):
        return np.array(image)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(image, torch.Tensor) and image.ndim == 3:
        return np.ascontiguousarray(image.as_subclass(torch.Tensor).permute(1, 2, 0).numpy())
    return image


def _forms(image: Any) -> Iterator[Any]:
    """Yield an image as what transforms may take, beginning with what is likely: no array where a tensor will do."""
    import torch

    if not isinstance(image, np.ndarray):
        yield image
    array = as_array(image)
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3):
        return
    tensor = torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)
    yield tensor
    yield array
    if array.dtype == np.uint8:
        yield Image.fromarray(array)
    if (tv_tensors := sys.modules.get("torchvision.tv_tensors")) is not None:
        yield tv_tensors.Image(tensor)


def _family(transform: Any) -> Family:
    kind: Any = type(transform)
    return _family_of_class(kind)


@functools.cache
def _family_of_class(kind: Any) -> Family:
    modules = [base.__module__ for base in kind.__mro__]
    if any(module.startswith("torchvision.transforms.v2.") for module in modules):
        return "v2"
    if any(module.startswith("torchvision.transforms.") for module in modules):
        return "v1"
    if any(module.partition(".")[0] == "albumentations" for module in modules):
        return "albumentations"
    return "module" if "torch.nn.modules.module" in modules else "other"


def _leaves(transform: Any) -> Iterator[Any]:
    """Yield the transforms that a container of torchvision's calls, or the transform itself."""
    inner = getattr(transform, "transforms", None)
    if isinstance(inner, Iterable) and not isinstance(inner, str):
        for each in inner:
            yield from _leaves(each)
    else:
        yield transform


def _acts_on(transform: Any, image: Any) -> bool:
    match _family(transform):
        case "v2":
            types = getattr(transform, "types", None) or transform._transformed_types
            return any(isinstance(image, kind) if isinstance(kind, type) else kind(image) for kind in types)
        case "v1":
            names = {base.__name__ for base in type(transform).__mro__}
            if "PILToTensor" in names:
                return isinstance(image, Image.Image)
            if "ToTensor" in names:
                return isinstance(image, np.ndarray | Image.Image)
            return not isinstance(image, np.ndarray)
        case "albumentations":
            return False  # Only its name for the argument makes it work.
        case _:
            return True


def _find_held(value: Any, depth: int) -> Any:
    """Return a v2 transform that a callable holds, in its attributes, closure or globals; None if none is found."""
    if _family(value) == "v2":
        return value
    if depth == 0:
        return None
    inner: list[Any] = []
    if isinstance(value, list | tuple):
        inner += value
    elif isinstance(value, dict):
        inner += value.values()
    elif isinstance(value, functools.partial):
        inner += [value.func, *value.args, *value.keywords.values()]
    elif hasattr(value, "__code__"):
        inner += [cell.cell_contents for cell in value.__closure__ or ()]
        inner += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
    elif hasattr(value, "__func__"):
        inner += [value.__self__, value.__func__]
    elif not isinstance(value, type) and type(value).__module__ != "builtins":
        inner += [*getattr(value, "__dict__", {}).values(), getattr(type(value), "__call__", None)]  # noqa: B004
    return next((held for each in inner if (held := _find_held(each, depth - 1)) is not None), None)
