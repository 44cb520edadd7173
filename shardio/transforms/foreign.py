"""Call other libraries' transforms and user callables, with random generators seeded from each sample's rng key.

torchvision's v2 transforms silently return numpy arrays unchanged. Albumentations' transforms accept only arrays, as
the keyword argument ``image``, and timm's only Pillow images. The module names of a transform's classes show which
library it comes from, so shardio imports none of these libraries.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.images import DecoderName
from shardio.order import Words
from shardio.process import no_end

Family = Literal["v2", "v1", "albumentations", "timm", "module", "other"]

_SEQUENCES = frozenset(
    {
        "torchvision.transforms.transforms.Compose",
        "torchvision.transforms.v2._container.Compose",
        "torch.nn.modules.container.Sequential",
    }
)
"""Classes that only call other transforms in order."""

MAX_SEARCHED = 10_000
"""The most objects in which to search for generators."""


def steps_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in another library's sequence, or None if it is not a sequence."""
    kind = type(transform)
    if f"{kind.__module__}.{kind.__qualname__}" not in _SEQUENCES:
        return None
    return list(transform if kind.__name__ == "Sequential" else transform.transforms)


def is_known(kind: type) -> bool:
    """Return whether a class is another library's transform or module, which a call would only instantiate."""
    return _family_of_class(kind) != "other"


def call(transform: Callable[..., Any], image: Any) -> Any:
    """Call a transform with an image, converted to a form that the transform acts on.

    Args:
        transform: Another library's transform, or any callable.
        image: An array, a tensor [C, H, W] or a Pillow image.

    Raises:
        TypeError: If the transform acts on none of these forms, or passes an array to a torchvision transform that
            ignores arrays.
    """
    family = _family(transform)
    if family == "albumentations":
        return transform(image=as_array(image))["image"]
    if family == "other":
        form = image
    elif family == "timm":
        form = as_pillow(image) if is_image_array(image) else image
    else:
        form = next(_forms(image), image) if family == "module" else _choose_form(transform, image)
    with _refuse_ignored(transform, object if family in ("v1", "v2") else np.ndarray):
        return transform(form)


def call_with_sample(transform: Callable[..., Any], sample: dict[str, Any]) -> Any:
    """Call a transform of whole samples with a sample.

    Albumentations' transforms get the values as keyword arguments. torchvision's transforms ignore arrays, so they get
    images as torchvision's own tensors. All others get the dict.

    Args:
        transform: Another library's transform, or any callable.
        sample: The values by field.
    """
    match _family(transform):
        case "albumentations":
            return transform(**sample)
        case "v2":
            tv_tensors = sys.modules["torchvision.tv_tensors"]  # The transform's class has imported it.
            images = [name for name, value in sample.items() if is_image_array(value)]
            return transform({**sample, **{name: tv_tensors.Image(next(_forms(sample[name]))) for name in images}})
        case _:
            return transform(sample)


def is_image_array(value: Any) -> bool:
    """Return whether a value is a uint8 array [height, width, 3]."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def is_pillow_image(image: Any) -> bool:
    """Return whether an image is a Pillow image. This does not import Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def as_pillow(pixels: NDArray[np.uint8]) -> Any:
    """Return pixels, uint8 [height, width, 3], as a Pillow image."""
    from PIL import Image

    return Image.fromarray(pixels)


def as_array(image: Any) -> Any:
    """Return a tensor [C, H, W] or a Pillow image as an array [H, W, C], and anything else unchanged."""
    if is_pillow_image(image):
        return np.array(image)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(image, torch.Tensor) and image.ndim == 3:
        return np.ascontiguousarray(image.as_subclass(torch.Tensor).permute(1, 2, 0).numpy())
    return image


def _choose_form(transform: Any, image: Any) -> Any:
    """Return an image in a form that a torchvision transform, and all transforms that it calls, act on.

    If they act on different forms, return one that the first of them acts on: it may convert the image.
    """
    leaves = list(_leaves(transform))
    for called in (leaves, leaves[:1]):
        for form in _forms(image):
            if all(_acts_on(leaf, form) for leaf in called):
                return form
    got = type(image).__name__
    raise TypeError(f"{transform!r} ignores images of type {got}: remove it, or convert the images first")


def _forms(image: Any) -> Iterator[Any]:
    """Yield an image in the forms that transforms may accept, likely ones first: a tensor before an array."""
    import torch

    if not isinstance(image, np.ndarray):
        yield image
    array = as_array(image)
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3):
        return
    array = np.require(array, requirements=("C", "W"))  # torch does not accept arrays with negative strides.
    tensor = torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)
    yield tensor
    yield array
    if array.dtype == np.uint8:
        from PIL import Image

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
    if any(module.startswith("timm.data.") for module in modules):
        return "timm"
    return "module" if "torch.nn.modules.module" in modules else "other"


def _inner(transform: Any) -> Iterable[Any] | None:
    inner = getattr(transform, "transforms", None)
    return inner if isinstance(inner, Iterable) and not isinstance(inner, str) else None


def _leaves(transform: Any) -> Iterator[Any]:
    if (inner := _inner(transform)) is None:
        yield transform
    else:
        for each in inner:
            yield from _leaves(each)


def _acts_on(transform: Any, image: Any) -> bool:
    names = {base.__name__ for base in type(transform).__mro__}
    match _family(transform):
        case "v2":
            from torch.utils._pytree import tree_flatten  # As in torchvision: the image may be a tuple of crops.

            types = transform.types if "Lambda" in names else transform._transformed_types
            return "Identity" in names or any(
                isinstance(part, kind) if isinstance(kind, type) else kind(part)
                for part in tree_flatten(image)[0]
                for kind in types
            )
        case "v1":
            if "PILToTensor" in names:
                return is_pillow_image(image)
            if "ToTensor" in names:
                return isinstance(image, np.ndarray) or is_pillow_image(image)
            return not isinstance(image, np.ndarray)
        case "albumentations":
            return False  # They accept the image only as a keyword argument.
        case _:
            return True


def _refuse_ignored(transform: Any, kind: type) -> AbstractContextManager[Any]:
    """Raise TypeError inside the ``with`` block if a v2 transform is called with an object of a type that it ignores.

    Only the call shows which transforms a function uses. The result does not, because a transform that is applied with
    some probability may also return the image unchanged.
    """
    if "torchvision.transforms.v2" not in sys.modules:
        return nullcontext()
    from torch.nn.modules.module import register_module_forward_pre_hook

    thread = threading.get_ident()  # torch calls the hook in all threads.

    def check(module: Any, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], kind) or _family(module) != "v2" or threading.get_ident() != thread:
            return
        if _inner(module) is None and not _acts_on(module, args):
            raise TypeError(
                f"torchvision's {type(module).__name__}, called by {transform!r}, ignores images of type "
                f"{type(args[0]).__name__}. Pass torchvision's transforms directly to the dataset, as "
                "transform=Compose([...]), or call them with torch.from_numpy(image).permute(2, 0, 1)"
            )

    return register_module_forward_pre_hook(check)


_INCREMENT = 0xDA3E39CB94B95BDB
"""PCG64's increment. It may be any odd number."""


@contextmanager
def borrowed_generators() -> Iterator[None]:
    """Restore the global generators of torch (on the CPU), numpy and Python at the end of a ``with`` block."""
    torch: Any = sys.modules.get("torch")
    torch_state = None if torch is None else torch.get_rng_state()
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class Generators:
    """The random generators of transforms: the global ones, and those of Albumentations' transforms.

    Each transform of Albumentations has its own generators. The constructor replaces these by new ones, for good. It
    finds the transforms in sequences, closures, attributes, and globals that a function names.

    Args:
        transforms: The transforms, and any other callables.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self._python, self._numpy = random.Random(0), np.random.Generator(np.random.PCG64(0))
        self._has_owners = False
        for found in _reachable(transforms):
            if _owns_generators(found):
                found.set_random_state(self._numpy, self._python)
                self._has_owners = True

    def seed(self, rng_key: int) -> None:
        """Seed all generators from a uint64. This takes 12 µs, or 25 µs with Albumentations' transforms."""
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.default_generator.manual_seed(rng_key)  # torch.manual_seed takes 140 µs, for other devices.
        np.random.seed(rng_key & 0xFFFFFFFF)  # A list of two 32-bit numbers would take nine times as long.
        random.seed(rng_key)
        if self._has_owners:
            self._python.seed(rng_key)
            state = {"state": (rng_key << 64) | rng_key, "inc": _INCREMENT}
            full = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}
            self._numpy.bit_generator.state = full


def _owns_generators(found: object) -> bool:
    modules = [base.__module__.partition(".")[0] for base in type(found).__mro__]
    return "albumentations" in modules and hasattr(found, "set_random_state") and not isinstance(found, type)


def _reachable(transforms: object) -> Iterator[Any]:
    """Yield the objects that transforms refer to, including the transforms, nearest first."""
    queue, seen = deque([transforms]), dict[int, object]()
    while queue and len(seen) < MAX_SEARCHED:
        found = queue.popleft()
        if id(found) not in seen:
            seen[id(found)] = found  # Kept, so that no other object gets its id.
            yield found
            queue.extend(_referents(found))


def _referents(found: Any) -> Iterator[Any]:
    match found:
        case FunctionType():
            for cell in found.__closure__ or ():
                yield from _contents(cell)
            yield from (found.__globals__[name] for name in found.__code__.co_names if name in found.__globals__)
            yield from found.__defaults__ or ()
        case MethodType():
            yield from (found.__self__, found.__func__)
        case functools.partial():
            yield from (found.func, *found.args, *found.keywords.values())
        case list() | tuple() | set() | frozenset():
            yield from found
        case dict():
            yield from found.values()
        case type() | str() | bytes() | int() | float():
            return
        case _ if isinstance(found, type(sys)):  # A module.
            return
        case _:
            yield from getattr(found, "__dict__", {}).values()
            yield from (method for name, method in vars(type(found)).items() if name == "__call__")


def _contents(cell: Any) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # It is empty.
        return


class Calls:
    """The calls of user callables for a chunk.

    Args:
        generators: The generators to seed from each image's rng key; None to leave them as they are.

    Attributes:
        elapsed_s: The duration of all calls, in seconds.
        decoder_names: The decoder of each image that is rendered so far.
        failed_row: The row of the image with which a callable raised an error; None if none did.
    """

    def __init__(self, generators: Generators | None = None) -> None:
        self._generators = generators
        self.elapsed_s = 0.0
        self.decoder_names: list[DecoderName] = []
        self.failed_row: int | None = None

    def call(self, callables: Sequence[Callable[..., Any]], images: Iterable[Any], rng_keys: Words) -> list[Any]:
        """Return each image after all callables, one after the other.

        Args:
            callables: Other libraries' transforms, and functions.
            images: n images.
            rng_keys: uint64 [n]. An image's rng key seeds the generators for all callables.
        """
        results, self.failed_row = list[Any](), None
        with nullcontext() if self._generators is None else borrowed_generators():
            for image, rng_key in zip(images, rng_keys.tolist(), strict=True):
                began = time.perf_counter()
                try:
                    results.append(self._call_with_seed(callables, image, rng_key))
                except BaseException as error:  # The caller adds the sample to the error.
                    self.failed_row = len(results)
                    if isinstance(error, StopIteration):  # It would silently end an epoch.
                        raise no_end(error) from error
                    raise
                finally:
                    self.elapsed_s += time.perf_counter() - began
        return results

    def _call_with_seed(self, callables: Sequence[Callable[..., Any]], image: Any, rng_key: int) -> Any:
        if self._generators is None:
            return _call_all(callables, image)
        original = None if "torch" in sys.modules else copy.deepcopy(image)
        self._generators.seed(rng_key)
        result = _call_all(callables, image)
        if original is None or "torch" not in sys.modules:
            return result
        # A callable has just imported torch, and may have drawn from a generator without a seed.
        self._generators.seed(rng_key)
        return _call_all(callables, original)


def _call_all(callables: Sequence[Callable[..., Any]], image: Any) -> Any:
    for each in callables:
        image = call(each, image)
    return image
