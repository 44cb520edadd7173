"""Transforms of other libraries, each called with what it acts on.

Torchvision's v2 transforms return a numpy array as it is, without a word; Albumentations' take arrays alone, by name.
Whose a transform is, is seen from its classes, so that none of these libraries is imported.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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


def steps_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms that another library's sequence calls; None for anything else."""
    kind = type(transform)
    if f"{kind.__module__}.{kind.__qualname__}" not in _SEQUENCES:
        return None
    return list(transform if kind.__name__ == "Sequential" else transform.transforms)


def is_known(kind: type) -> bool:
    """Say whether a class is another library's, of transforms or modules: called, it makes one."""
    return _family_of_class(kind) != "other"


def call(transform: Callable[..., Any], image: Any) -> Any:
    """Call a transform with an image: an array, a tensor [C, H, W] or a Pillow image, made into what it acts on.

    Raises:
        TypeError: If it acts on none of them, or calls one of torchvision's with an array, which that ignores.
    """
    family = _family(transform)
    if family == "albumentations":
        return transform(image=as_array(image))["image"]
    if family == "other":
        form = image
    else:
        form = next(_forms(image), image) if family == "module" else _choose_form(transform, image)
    with _refuse_ignored(transform, object if family in ("v1", "v2") else np.ndarray):
        return transform(form)


def as_array(image: Any) -> Any:
    """Return a tensor [C, H, W] or a Pillow image as an array [H, W, C]; anything else as it is."""
    if isinstance(image, Image.Image):
        return np.array(image)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(image, torch.Tensor) and image.ndim == 3:
        return np.ascontiguousarray(image.as_subclass(torch.Tensor).permute(1, 2, 0).numpy())
    return image


def _choose_form(transform: Any, image: Any) -> Any:
    """Return an image as what one of torchvision's transforms acts on, and all those that it calls if it calls others.

    Where these take different kinds of images, what the first of them acts on: it may turn it into another kind.
    """
    leaves = list(_leaves(transform))
    for called in (leaves, leaves[:1]):
        for form in _forms(image):
            if all(_acts_on(leaf, form) for leaf in called):
                return form
    raise TypeError(f"{transform!r} does nothing to an image that comes as {type(image).__name__}: leave it out")


def _forms(image: Any) -> Iterator[Any]:
    """Yield an image as what transforms may take, beginning with what is likely: no array where a tensor will do."""
    import torch

    if not isinstance(image, np.ndarray):
        yield image
    array = as_array(image)
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3):
        return
    array = np.require(array, requirements=("C", "W"))  # Torch takes no mirrored arrays.
    tensor = torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)
    yield tensor
    yield array
    if array.dtype == np.uint8:
        yield Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)
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


def _inner(transform: Any) -> Iterable[Any] | None:
    """Return what a container of torchvision's, such as RandomApply, calls; None for what acts by itself."""
    inner = getattr(transform, "transforms", None)
    return inner if isinstance(inner, Iterable) and not isinstance(inner, str) else None


def _leaves(transform: Any) -> Iterator[Any]:
    """Yield the transforms that act by themselves: those in a container, or the transform itself."""
    if (inner := _inner(transform)) is None:
        yield transform
    else:
        for each in inner:
            yield from _leaves(each)


def _acts_on(transform: Any, image: Any) -> bool:
    names = {base.__name__ for base in type(transform).__mro__}
    match _family(transform):
        case "v2":
            from torch.utils._pytree import tree_flatten  # As torchvision does: the image may be a tuple of crops.

            types = transform.types if "Lambda" in names else transform._transformed_types
            return "Identity" in names or any(
                isinstance(part, kind) if isinstance(kind, type) else kind(part)
                for part in tree_flatten(image)[0]
                for kind in types
            )
        case "v1":
            if "PILToTensor" in names:
                return isinstance(image, Image.Image)
            if "ToTensor" in names:
                return isinstance(image, np.ndarray | Image.Image)
            return not isinstance(image, np.ndarray)
        case "albumentations":
            return False  # Only its name for the argument makes it work.
        case _:
            return True


def _refuse_ignored(transform: Any, kind: type) -> AbstractContextManager[Any]:
    """Raise TypeError in the block if a v2 transform is called with an object of a kind that it returns as it is.

    What a function calls, if anything, is only seen when it does: what it returns does not tell, since a transform that
    is applied now and then returns what it got as well.
    """
    if "torchvision.transforms.v2" not in sys.modules:
        return nullcontext()
    from torch.nn.modules.module import register_module_forward_pre_hook

    thread = threading.get_ident()  # The hook is called in all threads, and others may do what they like.

    def check(module: Any, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], kind) or _family(module) != "v2" or threading.get_ident() != thread:
            return
        if _inner(module) is None and not _acts_on(module, args):
            raise TypeError(
                f"torchvision's {type(module).__name__}, called by {transform!r}, ignores an image that comes as "
                f"{type(args[0]).__name__}. Give torchvision's transforms themselves to the dataset's "
                "transform=Compose([...]), or call them with torch.from_numpy(image).permute(2, 0, 1)"
            )

    return register_module_forward_pre_hook(check)
