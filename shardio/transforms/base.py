"""What a transform is: parameters for a whole batch at once, then pixels, one image at a time."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.images import (
    CropPlan,
    DecodedPicture,
    DecodeError,
    DecoderName,
    Picture,
    Pixels,
    Sizes,
    decode_all,
    decode_chunk,
    make_rows,
)
from shardio.order import Words, derive_rng_key
from shardio.transforms import foreign

_REMEDY = (
    "with decode='pil' or after a callable that returns something else, use that library's own transforms, or leave "
    "decode at 'array'"
)


class Planned:
    """What is planned for many images at once. Nothing but a use by hand calls it, so ``__call__`` stays as it is."""

    _instead: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__call__ is not Planned.__call__:
            raise TypeError(
                f"{cls.__name__} overrides __call__, and datasets and loaders do not call it: they transform many "
                f"images at once. {cls._instead}"
            )

    def __call__(self, image: Any) -> Any:
        """Transform one image with parameters from torch's global generator."""
        return apply_transform(self, [image], rng_keys_from_torch(1))[0]


class Transform(Planned, ABC):
    """A transform of uint8 [height, width, 3] arrays.

    Subclasses draw their parameters for n images at once, as a function of the images' sizes and one random
    key an image, and apply them to one image at a time. Called by hand, a transform takes its key from
    torch's global generator, as torchvision's transforms do. Subclasses cannot override ``__call__``.
    """

    _instead = "Override apply(image, parameters), or put a function into Compose([...])"

    @abstractmethod
    def draw(self, sizes: Sizes, rng_keys: Words) -> NDArray[Any]:
        """Return the parameters of n images.

        Args:
            sizes: int64 [n, 2], their heights and widths.
            rng_keys: uint64 [n], one random key an image.

        Returns:
            An array of n rows; :meth:`apply` gets one.
        """

    @abstractmethod
    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        """Transform one image by its row of parameters."""


class Geometry(Transform):
    """A transform that says what it does by crop plans: of encoded images only what is needed is decoded."""

    @abstractmethod
    def needs_pixels(self, plans: CropPlan, parameters: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which of n images must be rendered before this transform can extend their plans, bool [n]."""

    @abstractmethod
    def extend(self, plans: CropPlan, parameters: NDArray[Any]) -> CropPlan:
        """Return the plans of n images with this transform behind them; none of them must be rendered before."""

    def apply(self, image: Pixels, parameters: Any) -> Pixels:
        picture = DecodedPicture(image)
        return decode_all([picture], self.extend(_whole([picture]), np.asarray(parameters)[None]))[0]


class Compose(Planned):
    """Several transforms in a row. Subclasses cannot override ``__call__``.

    Args:
        transforms: Transforms of this package, which share the batch's random keys, and any other callables, which
            bring their own randomness. Torchvision's, and other ``torch.nn.Module``, get a uint8 tensor [3, H, W];
            Albumentations' get the array by name, and their image is taken; all others get the array (or what came
            before them). What the last one returns is the sample's image.

    Raises:
        TypeError: If it is a single transform, or one of them cannot be called.
    """

    _instead = "Put what it does into the list, as a function: Compose([..., function])"

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        if not isinstance(transforms, Iterable):
            raise TypeError(f"Compose takes a list of transforms, got {transforms!r}: write Compose([...])")
        self.transforms = list(transforms)
        for transform in self.transforms:
            _check_transform(transform)

    def __repr__(self) -> str:
        return f"Compose([{', '.join(map(repr, self.transforms))}])"


def apply_transform(transform: Callable[[Any], Any], images: Sequence[Any], rng_keys: Words) -> list[Any]:
    """Transform n images, each by its own random key.

    Args:
        transform: A transform of this package or any other callable.
        images: Arrays uint8 [height, width, 3], pictures that are not decoded yet, or what other callables take.
        rng_keys: uint64 [n], one key an image. The place of a transform in a Compose is part of what it draws by.

    Raises:
        DecodeError: If a picture cannot be decoded.
    """
    return render_images(*plan_images(transform, images, rng_keys))[0]


def plan_images(
    transform: Callable[[Any], Any] | None, images: Sequence[Any], rng_keys: Words
) -> tuple[list[Any], CropPlan | None]:
    """Transform n images as far as that needs no pixels.

    Args:
        transform: As for :func:`apply_transform`, or None.
        images: Likewise.
        rng_keys: Likewise.

    Returns:
        The images, and what is still to be done with them: for :func:`render_images`.

    Raises:
        DecodeError: If a picture had to be decoded, and cannot be.
    """
    images = list(images)
    plans: CropPlan | None = None  # What is still to be done with the images.
    for step, step_keys in _flatten(transform, rng_keys) if transform is not None else ():
        if isinstance(step, Geometry) and type(step).apply is Geometry.apply:
            if plans is None:
                images = [_as_picture(step, image) for image in images]
                plans = _whole(images)
            parameters = step.draw(plans.output_size, step_keys)
            images, plans = _render(images, plans, np.flatnonzero(step.needs_pixels(plans, parameters)))
            plans = step.extend(plans, parameters)
            continue
        if isinstance(step, Transform):
            images, plans = render_images(images, _plan_whole(images, plans))[0], None
            parameters = step.draw(_sizes([_as_picture(step, image) for image in images]), step_keys)
            images = [step.apply(image, row) for image, row in zip(images, parameters, strict=True)]
        else:
            # One by one: whole images are large, and what a callable makes of them may be small.
            images, plans = [foreign.call(step, image) for image in _finish_each(images, plans)], None
    return images, _plan_whole(images, plans)


def render_images(
    images: list[Any], plans: CropPlan | None, rows: Pixels | None = None
) -> tuple[list[Any], list[DecoderName]]:
    """Carry out what :func:`plan_images` left to be done.

    Args:
        images: n images.
        plans: What is to be done with them, if anything is.
        rows: uint8 [n, height, width, 3] to write to, which must fit the plans; by default new arrays.

    Returns:
        The n images, and who decoded each of them; nobody knows if nothing was to be done.

    Raises:
        DecodeError: If a picture cannot be decoded.
    """
    if plans is None:
        return images, []
    into = make_rows(plans) if rows is None else rows
    decoder_names = decode_chunk(images, plans, into)
    return list(into), decoder_names


def refuse_pillow(transform: Callable[[Any], Any] | None) -> None:
    """Raise TypeError if what is done first to an image is a transform of this package, which takes no Pillow image."""
    step = next(_steps(transform), None)
    if isinstance(step, Transform):
        raise TypeError(
            f"{step!r} takes uint8 [height, width, 3] arrays, and decode='pil' gives it Pillow images: {_REMEDY}"
        )


def rng_keys_from_torch(num_keys: int) -> Words:
    """Draw keys from torch's global generator, uint64 [num_keys]."""
    import torch

    return torch.randint(-(2**63), 2**63 - 1, (num_keys,), device="cpu").numpy().view(np.uint64)


def _steps(transform: Callable[[Any], Any] | None) -> Iterator[Callable[[Any], Any]]:
    """Yield the single transforms of a nest of Compose."""
    inner = transform.transforms if isinstance(transform, Compose) else foreign.steps_of(transform)
    if inner is not None:
        for each in inner:
            yield from _steps(each)
    elif transform is not None:
        yield transform


def _flatten(transform: Callable[[Any], Any], rng_keys: Words) -> Iterator[tuple[Callable[[Any], Any], Words]]:
    """Yield the single transforms of a nest of Compose, each with its own keys."""
    steps = transform.transforms if isinstance(transform, Compose) else foreign.steps_of(transform)
    if steps is None:
        _check_transform(transform)
        yield transform, rng_keys
        return
    for place, step in enumerate(steps):
        yield from _flatten(step, derive_rng_key(rng_keys, np.array([place], dtype=np.uint64)))


def _check_transform(transform: object) -> None:
    """Raise TypeError for what is no transform, and for a transform's class: called with an image, it would be made."""
    if isinstance(transform, type) and (issubclass(transform, Transform | Compose) or foreign.is_known(transform)):
        raise TypeError(f"{transform.__name__} is a class, not a transform: write {transform.__name__}(...)")
    if not callable(transform):
        raise TypeError(f"a transform is called with an image, and {reprlib.repr(transform)} cannot be called")


def _render(images: list[Any], plans: CropPlan, rows: NDArray[np.int64]) -> tuple[list[Any], CropPlan]:
    """Render some of the images, and only those: what becomes of the others does not depend on them."""
    if not rows.size:
        return images, plans
    try:
        rendered, decoder_names = render_images([images[row] for row in rows], plans.take(rows))
    except DecodeError as error:
        raise DecodeError(int(rows[error.row]), str(error)) from error
    images = list(images)
    for row, pixels, decoder_name in zip(rows.tolist(), rendered, decoder_names, strict=True):
        images[row] = DecodedPicture(pixels, decoder_name)
    return images, plans.begin_again(rows)


def _finish_each(images: list[Any], plans: CropPlan | None) -> Iterator[Any]:
    """Yield the images that :func:`render_images` returns, one by one."""
    plans = _plan_whole(images, plans)
    for number, image in enumerate(images):
        plan = None if plans is None else plans.take(np.array([number]))
        try:
            yield render_images([image], plan)[0][0]
        except DecodeError as error:
            raise DecodeError(number, str(error)) from error


def _plan_whole(images: Sequence[Any], plans: CropPlan | None) -> CropPlan | None:
    """Return what is to be done with images; pictures for which there is no plan are to be decoded whole."""
    return _whole(images) if plans is None and images and isinstance(images[0], Picture) else plans


def _whole(images: Sequence[Picture]) -> CropPlan:
    return CropPlan.whole(_sizes(images))


def _sizes(images: Sequence[Picture]) -> Sizes:
    return np.array([image.size for image in images], dtype=np.int64).reshape(-1, 2)


def _as_picture(transform: Transform, image: Any) -> Picture:
    if isinstance(image, Picture):
        return image
    if not isinstance(image, Image.Image):
        image = foreign.as_array(image)  # Of a tensor, which torchvision's transforms return.
    is_rgb = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    if is_rgb and image.size:
        return DecodedPicture(image)
    got = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
    raise TypeError(f"{transform!r} takes uint8 [height, width, 3] arrays with pixels, got {got}: {_REMEDY}")
