"""Define the base classes of shardio's transforms, and call other libraries' transforms and user callables.

torchvision's v2 transforms silently return numpy arrays unchanged. Albumentations' transforms accept only arrays,
passed as the keyword argument ``image``. timm's transforms accept only Pillow images. The module name of a transform's
class shows its library, so shardio need not import the library. User callables draw from generators that are seeded
with each sample's rng key.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.images import (
    CropPlan,
    DecodedPicture,
    DecoderName,
    Operations,
    Pixels,
    Sizes,
    edit_images,
    make_operations,
    render_chunk,
    sizes_of,
)
from shardio.order import Words, random_words, to_unit
from shardio.process import keep_generators, no_end

__all__ = ["Calls", "Generators", "Geometry", "PixelTransform", "Transform", "as_pillow", "call_with_sample"]
__all__ += ["is_image_array", "rng_keys_from_torch"]

Bounds = tuple[float, float]
"""The minimum and the maximum value of a parameter."""

MAX_SEARCHED = 10_000
"""The maximum number of objects to search for generators."""


class Transform(ABC):
    """A transform of uint8 [height, width, 3] arrays.

    Subclasses draw the parameters of n images in one call, as a function of the images' sizes and one rng key for each
    image. Subclasses apply the parameters to one image at a time, and keep each constructor argument in an attribute of
    the same name. Called with an image, a transform draws its rng key from torch's global generator, as torchvision's
    transforms do. Subclasses cannot override ``__call__``. :mod:`shardio.testing.samples` tests these rules.

    Attributes:
        equals_torchvisions: Whether torchvision's transform of the same name draws from the same distribution and, on
            Pillow images, gives the same pixels. If so, shardio's transform replaces torchvision's.
        unshown: The values that ``repr`` omits, by the name of the setting.
    """

    equals_torchvisions: ClassVar[bool] = True
    unshown: ClassVar[dict[str, object]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_call(cls, Transform, "Override apply(image, parameters), or pass a function to Compose([...])")

    @classmethod
    def from_torchvision(cls, theirs: Any) -> Transform | None:
        """Return this transform with the settings of torchvision's transform; None if it cannot replace torchvision's.

        Raises:
            AttributeError, TypeError, ValueError: If this transform does not support the settings.
        """
        make: Any = cls
        settings = {name: True if name == "antialias" else getattr(theirs, name) for name in _settings_of(cls)}
        transform: Transform = make(**settings)
        return transform

    def __repr__(self) -> str:
        names = [name for name in _settings_of(type(self)) if hasattr(self, name)]
        shown = [name for name in names if (name, getattr(self, name)) not in self.unshown.items()]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __call__(self, image: Any) -> Pixels:
        pixels = self.as_input(image)
        (parameters,) = self.draw(np.array([pixels.shape[:2]], dtype=np.int64), rng_keys_from_torch(1))
        return self.apply(pixels, parameters)

    def as_input(self, image: Any) -> Any:
        """Return an image in the form that :meth:`apply` accepts."""
        return as_pixels(self, image)

    @abstractmethod
    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[Any]:
        """Return the parameters of n images.

        Args:
            sizes: int64 [n, 2], the images' heights and widths.
            rng_keys: uint64 [n], one rng key for each image.

        Returns:
            An array of n rows, one for each image. :meth:`apply` receives one row.
        """

    @abstractmethod
    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        """Transform one image, given its row of parameters."""


@functools.cache
def _settings_of(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def check_call(cls: type, parent: type, remedy: str) -> None:
    """Raise TypeError if a class overrides its parent's ``__call__``, which datasets and loaders do not call."""
    if cls.__call__ is not parent.__call__:
        raise TypeError(
            f"{cls.__name__} overrides __call__, but datasets and loaders do not call it: they transform many images "
            f"at once. {remedy}"
        )


class Geometry(Transform):
    """A transform that extends crop plans, so only the needed parts of images are decoded."""

    @property
    def is_planned(self) -> bool:
        """Whether crop plans can express this transform; otherwise, :meth:`apply` transforms whole images."""
        return type(self).apply is Geometry.apply

    @abstractmethod
    def needs_pixels(self, plan: CropPlan, parameters: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of n images must be rendered before this transform can extend their plan, bool [n]."""

    @abstractmethod
    def extend(self, plan: CropPlan, parameters: NDArray[Any]) -> CropPlan:
        """Return the extended plan. Images for which :meth:`needs_pixels` is true have already been rendered."""

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        picture = DecodedPicture(image)
        plan = self.extend(CropPlan.whole(sizes_of([picture])), np.asarray(parameters)[None])
        pixels: Pixels = render_chunk([picture], plan).images[0]
        return pixels


class PixelTransform(Transform):
    """A transform that keeps the sizes of images, and draws their operations: OPERATION [n, k] for n images."""

    @property
    def is_planned(self) -> bool:
        """Whether crop plans can end with the operations; otherwise, :meth:`apply` is called for each image."""
        return type(self).apply is PixelTransform.apply

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        edited = np.array(image)
        edit_images([edited], np.asarray(parameters).reshape(1, -1))
        return edited


class RandomPixelTransform(PixelTransform):
    """The base class of transforms that apply one operation to some of the images.

    Args:
        p: The probability that an image is changed.
    """

    code: ClassVar[int]
    """The operation's code, from the kernel or from :func:`shardio.images.define_operation`."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = check_probability(p)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The operation's numbers."""
        return ()

    def draw(self, sizes: Sizes, rng_keys: Words) -> Operations:
        """Return the operations on n images, OPERATION [n, 1]; for unchanged images, operations that do nothing."""
        operations = make_operations(len(sizes), self.code, *self.numbers)
        operations["code"][~draw_chance(rng_keys, self.p)] = 0
        return operations


def as_pixels(transform: Transform, image: Any) -> Pixels:
    """Convert an image to the kind of array that a transform accepts: uint8 [height, width, 3].

    Raises:
        TypeError: If the image is neither an array of this kind nor a uint8 tensor [3, height, width].
    """
    if not is_pillow_image(image):
        image = as_array(image)  # torchvision's transforms return tensors.
    if isinstance(image, np.ndarray) and image.size and image.dtype == np.uint8 and image.shape[2:] == (3,):
        return image
    got = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
    raise TypeError(
        f"{transform!r} takes uint8 [height, width, 3] arrays that are not empty, got {got}: convert the image first, "
        "or use this as the first transform, with decode='array', the default"
    )


def rng_keys_from_torch(num_keys: int) -> Words:
    """Draw rng keys from torch's global generator, uint64 [num_keys]."""
    import torch

    return torch.randint(-(2**63), 2**63 - 1, (num_keys,), device="cpu").numpy().view(np.uint64)


def draw_units(rng_keys: Words, num_numbers: int) -> NDArray[np.float64]:
    """Return random numbers in [0, 1) for each of n rng keys, float64 [n, num_numbers]."""
    return to_unit(random_words(rng_keys[:, None], np.arange(num_numbers, dtype=np.uint64)))


def draw_chance(rng_keys: Words, p: float) -> NDArray[np.bool_]:
    """Return bool [n], each true with probability ``p``, for n rng keys."""
    return np.asarray(draw_units(rng_keys, 1)[:, 0] < p)


def check_probability(p: float) -> float:
    """Check that p is a probability, and return it."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be a probability from 0 to 1, got {p}")
    return p


def between(bounds: Sequence[Any], unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Map numbers in [0, 1) to numbers between two bounds."""
    low, high = bounds
    return np.asarray(low + (high - low) * unit)


def to_integers(unit: NDArray[np.float64], counts: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Map numbers in [0, 1) to integers from 0 to ``counts`` - 1."""
    integers: NDArray[np.int64] = np.minimum((unit * counts).astype(np.int64), np.asarray(counts) - 1)
    return integers


Family = Literal["v2", "v1", "albumentations", "timm", "module", "other"]

_FAMILIES: dict[str, Family] = {
    "torchvision.transforms.v2.": "v2",
    "torchvision.transforms.": "v1",
    "albumentations.": "albumentations",
    "timm.data.": "timm",
    "torch.nn.modules.module.": "module",
}
"""The families of classes, by prefixes of their base classes' module names. The first match determines the family."""

_SEQUENCES = frozenset(
    {
        "torchvision.transforms.transforms.Compose",
        "torchvision.transforms.v2._container.Compose",
        "torch.nn.modules.container.Sequential",
    }
)
"""The classes that only call other transforms in order."""


def steps_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in a sequence from another library, or None if the transform is not such a sequence."""
    kind = type(transform)
    if f"{kind.__module__}.{kind.__qualname__}" not in _SEQUENCES:
        return None
    return list(transform if kind.__name__ == "Sequential" else transform.transforms)


def is_known(kind: type) -> bool:
    """Return whether a class is another library's transform or module, so calling it would only create an instance."""
    return _family_of(kind) != "other"


def call(transform: Callable[..., Any], image: Any) -> Any:
    """Convert an image to a form that a transform accepts, and call the transform with it.

    Args:
        transform: Another library's transform, or any callable.
        image: An array, a tensor [C, H, W] or a Pillow image.

    Raises:
        TypeError: If the transform accepts none of these forms, or passes an array to a torchvision transform that
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
    images as torchvision's own tensors. All other callables get the dict.

    Args:
        transform: Another library's transform, or any callable.
        sample: The values by field.
    """
    match _family(transform):
        case "albumentations":
            return transform(**sample)
        case "v2":
            tv_tensors = sys.modules["torchvision.tv_tensors"]  # The transform's module imports tv_tensors.
            images = [name for name, value in sample.items() if is_image_array(value)]
            return transform({**sample, **{name: tv_tensors.Image(next(_forms(sample[name]))) for name in images}})
        case _:
            return transform(sample)


def is_image_array(value: Any) -> bool:
    """Return whether a value is a uint8 array [height, width, 3]."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def is_pillow_image(image: Any) -> bool:
    """Return whether an image is a Pillow image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def as_pillow(pixels: NDArray[np.uint8]) -> Any:
    """Return pixels, uint8 [height, width, 3], as a Pillow image."""
    from PIL import Image

    return Image.fromarray(pixels)


def as_array(image: Any) -> Any:
    """Convert a tensor [C, H, W] or a Pillow image to an array [H, W, C]; return anything else unchanged."""
    if is_pillow_image(image):
        return np.array(image)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(image, torch.Tensor) and image.ndim == 3:
        return np.ascontiguousarray(image.as_subclass(torch.Tensor).permute(1, 2, 0).numpy())
    return image


def _choose_form(transform: Any, image: Any) -> Any:
    """Return an image in a form that a torchvision transform, and every transform that it calls, accepts.

    If they accept different forms, return one that the first accepts, because that transform may convert the image.
    """
    leaves = list(_leaves(transform))
    for called in (leaves, leaves[:1]):
        for form in _forms(image):
            if all(_acts_on(leaf, form) for leaf in called):
                return form
    got = type(image).__name__
    raise TypeError(f"{transform!r} ignores images of type {got}: remove it, or convert the images first")


def _forms(image: Any) -> Iterator[Any]:
    """Yield an image in the forms that transforms may accept, the likeliest first: a tensor before an array."""
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
    return _family_of(kind)


@functools.cache
def _family_of(kind: Any) -> Family:
    modules = [f"{base.__module__}." for base in kind.__mro__]
    found = (family for start, family in _FAMILIES.items() if any(module.startswith(start) for module in modules))
    return next(found, "other")


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
            from torch.utils._pytree import tree_flatten  # The image may be a tuple of crops.

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
            return False  # Albumentations' transforms accept the image only as a keyword argument.
        case _:
            return True


def _refuse_ignored(transform: Any, kind: type) -> AbstractContextManager[Any]:
    """Raise TypeError inside the ``with`` block if a v2 transform is called with an object that it ignores.

    The transforms that a function uses are known only during the call. The result does not reveal that an image was
    ignored, because random transforms may also return an image unchanged.
    """
    if "torchvision.transforms.v2" not in sys.modules:
        return nullcontext()
    from torch.nn.modules.module import register_module_forward_pre_hook

    thread = threading.get_ident()  # torch calls the hook in all threads.

    def check(module: Any, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], kind) or threading.get_ident() != thread:
            return
        if _family(module) == "v2" and _inner(module) is None and not _acts_on(module, args):
            raise TypeError(
                f"torchvision's {type(module).__name__}, called by {transform!r}, ignores images of type "
                f"{type(args[0]).__name__}. Pass torchvision's transforms directly to the dataset, as "
                "transform=Compose([...]), or call them with torch.from_numpy(image).permute(2, 0, 1)"
            )

    return register_module_forward_pre_hook(check)


_INCREMENT = 0xDA3E39CB94B95BDB
"""The increment of PCG64, an arbitrary odd number."""


class Generators:
    """The random generators of transforms: the global generators, and those of Albumentations' transforms.

    Each Albumentations transform has its own generators, which this class replaces permanently. The class finds the
    transforms in sequences, closures, attributes, and the globals that functions use.

    Args:
        transforms: The transforms, and any other callables.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        self._python, self._numpy = random.Random(0), np.random.Generator(np.random.PCG64(0))
        owners = [found for found in _reachable(transforms) if _owns_generators(found)]
        for owner in owners:
            owner.set_random_state(self._numpy, self._python)
        self._has_owners = bool(owners)

    def seed(self, rng_key: int) -> None:
        """Seed all generators from a uint64. Seeding takes 12 µs, or 25 µs with Albumentations' transforms."""
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.default_generator.manual_seed(rng_key)  # torch.manual_seed seeds all devices, in 140 µs.
        np.random.seed(rng_key & 0xFFFFFFFF)  # Seeding with 64 bits takes nine times as long as with 32.
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
    queue, seen = deque([transforms]), dict[int, object]()
    while queue and len(seen) < MAX_SEARCHED:
        found = queue.popleft()
        if id(found) not in seen:
            seen[id(found)] = found  # Keep a reference, so that no other object gets this object's id.
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
    except ValueError:  # The cell is empty.
        return


class Calls:
    """The object that calls user callables for the images of a chunk.

    Args:
        generators: The generators to seed with each image's rng key; None to seed none.

    Attributes:
        elapsed_s: The total duration of all calls, in seconds.
        decoder_names: The decoder of each image rendered so far.
        failed_row: The row of the image for which a callable raised an error; None if no callable did.
    """

    def __init__(self, generators: Generators | None = None) -> None:
        self._generators = generators
        self.elapsed_s = 0.0
        self.decoder_names: list[DecoderName] = []
        self.failed_row: int | None = None

    def call(self, callables: Sequence[Callable[..., Any]], images: Iterable[Any], rng_keys: Words) -> list[Any]:
        """Apply all callables, in order, to each image, and return the results.

        Args:
            callables: Transforms of other libraries, or functions.
            images: n images.
            rng_keys: uint64 [n]. An image's rng key seeds the generators for all callables.
        """
        results, self.failed_row = list[Any](), None
        with nullcontext() if self._generators is None else keep_generators():
            for image, rng_key in zip(images, rng_keys.tolist(), strict=True):
                began = time.perf_counter()
                try:
                    results.append(self._call_with_seed(callables, image, rng_key))
                except BaseException as error:  # The caller adds the sample to the error.
                    self.failed_row = len(results)
                    if isinstance(error, StopIteration):  # A StopIteration would silently end an epoch.
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
        # A callable has just imported torch, and may have drawn from torch's generator before it was seeded.
        self._generators.seed(rng_key)
        return _call_all(callables, original)


def _call_all(callables: Sequence[Callable[..., Any]], image: Any) -> Any:
    for each in callables:
        image = call(each, image)
    return image
