"""Render the pictures of a chunk into the rows of a batch according to a crop plan, and edit their pixels.

The kernel does this if it can; otherwise, libjpeg-turbo, OpenCV, Pillow and numpy do. The kernel and the libraries give
the same pixels. :mod:`shardio.kernel.operations` lists the kernel's operations.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.images.crop_plan import (
    MAX_RESIZED_PIXELS,
    CropPlan,
    PlannedCrop,
    Render,
    Resampling,
    Rows,
    flip,
    prepare_render,
)
from shardio.images.jpeg import Box
from shardio.images.jpeg.head import EOI, JPEG_START, SOF2, marker_bytes, read_head, why_irregular
from shardio.images.netpbm import PixelPicture, find_pixels
from shardio.images.opening import JpegPicture
from shardio.images.pictures import UPRIGHT, DecoderName, Picture, Pixels
from shardio.kernel import find_functions, find_kernel, operations as codes
from shardio.kernel.functions import Content, StoredPixels, scratch_pixels
from shardio.kernel.records import (
    LUMA_FACTORS,
    MIRRORED,
    OPENCV_BILINEAR,
    OPERATION,
    PILLOW_BICUBIC,
    PILLOW_BILINEAR,
    PILLOW_BOX,
    PLAN,
    TRANSPOSED,
    UPSIDE_DOWN,
)
from shardio.process import let_through

if TYPE_CHECKING:
    from PIL import Image

Operations = NDArray[np.void]
"""OPERATION [n, k]: the operations on n images, in order."""

Floats = NDArray[np.float32]

_RESAMPLINGS: dict[Resampling, int] = {
    "bilinear": OPENCV_BILINEAR,
    "plain bilinear": OPENCV_BILINEAR,
    "antialiased bilinear": PILLOW_BILINEAR,
    "antialiased bicubic": PILLOW_BICUBIC,
    "antialiased box": PILLOW_BOX,
}
"""The number that stands for each resampling method in a PLAN."""

_SMALLEST_WEIGHT = 2.0**-26
"""The smallest weight to use. Smaller weights are negligible in sums of 32-bit floats."""

_KERNEL_FACTORS = frozenset((luma, (1, 1), (1, 1)) for luma in LUMA_FACTORS)


class DecodeError(ValueError):
    """The error for a chunk with an image that cannot be decoded.

    Attributes:
        row: The row of that image in the chunk.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type[DecodeError], tuple[int, str]]:
        return type(self), (self.row, str(self))


class RenderedImages(NamedTuple):
    """The rendered images of a chunk.

    Attributes:
        images: The n images, uint8 [height, width, 3], or results of other libraries' transforms.
        decoder_names: The decoder of each image. The list is empty if the decoders are unknown.
    """

    images: list[Any]
    decoder_names: list[DecoderName]


def render_chunk(pictures: Sequence[Picture], plan: CropPlan, rows: Rows | None = None) -> RenderedImages:
    """Render one crop of each image; see :func:`render_crops`."""
    return render_crops([PlannedCrop(pictures, plan)], [rows])[0]


def render_crops(crops: Sequence[PlannedCrop], rows: Sequence[Rows | None]) -> list[RenderedImages]:
    """Decode images, and crop, resize, mirror and edit each image once for each of its crops.

    Only the parts that the crops need are decoded, and all heavy work releases the GIL. The pixels are those of a full
    decode that is then cropped and resized.

    Args:
        crops: The crops of n images, at least one for each image.
        rows: The destinations of each crop: n uint8 [height, width, 3] arrays of the plan's output sizes, or a single
            array that contains them; None for new arrays.

    Returns:
        The rows of each crop, and the decoder of each image.

    Raises:
        DecodeError: If an image is truncated or damaged, or would be too large when resized.
        MemoryError: If memory runs out, even if no image is damaged.
    """
    destinations = [_make_rows(crop.plan) if given is None else given for crop, given in zip(crops, rows, strict=True)]
    is_rendered = render_by_kernel(crops, destinations)
    rendered = []
    for crop, destination, is_done in zip(crops, destinations, is_rendered.T, strict=True):
        _render_by_libraries(crop, destination, np.flatnonzero(~is_done).tolist())
        if (operations := operations_of(crop.plan)) is not None:
            edit_images(destination, operations)
        decoder_names: list[DecoderName] = [
            picture.kernel_name if by_kernel else picture.decoder_name
            for picture, by_kernel in zip(crop.pictures, is_done.tolist(), strict=True)
        ]
        rendered.append(RenderedImages(list(destination), decoder_names))
    return rendered


def _render_by_libraries(crop: PlannedCrop, destinations: Rows, rows: list[int]) -> None:
    if not rows:
        return
    pictures, plan = crop
    boxes, sizes, windows = plan.box.tolist(), plan.size.tolist(), plan.window.tolist()
    flips, halved = plan.flip.tolist(), plan.is_halved.tolist()
    renders: list[tuple[int, Render]] = []
    # Run all Python code first, then all decoding: each is faster while its own data stays in the processor's caches.
    for row in rows:
        with _name_row(row):
            resampling: Resampling = "antialiased bilinear" if halved[row] else plan.resampling
            args = Box(*boxes[row]), *sizes[row], Box(*windows[row]), resampling
            renders.append((row, prepare_render(pictures[row], *args)))
    for row, render in renders:
        destination = destinations[row]
        unflipped = scratch_pixels("unflipped", *destination.shape[:2]) if flips[row] else destination
        with _name_row(row):
            render(unflipped)
        if flips[row]:
            flip(unflipped, out=destination)


@contextmanager
def _name_row(row: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        let_through(error)
        raise DecodeError(row, str(error)) from error


def operations_of(plan: CropPlan) -> Operations | None:
    """Return all operations on the pixels of a plan's crops, OPERATION [n, k]; None if there are none."""
    if plan.upside_down is None or not plan.upside_down.any():
        return plan.operations
    flips = make_operations(len(plan.upside_down), codes.NONE)
    flips["code"][plan.upside_down] = codes.VERTICAL_FLIP
    return flips if plan.operations is None else np.concatenate([flips, plan.operations], axis=1)


def _make_rows(plan: CropPlan) -> Rows:
    sizes = plan.output_size.tolist()
    if sizes and all(size == sizes[0] for size in sizes):
        return np.empty((len(sizes), *sizes[0], 3), np.uint8)
    return [np.empty((height, width, 3), np.uint8) for height, width in sizes]


def why_not_by_kernel(content: bytes) -> str | None:
    """Return the reason why the kernel cannot render an image, or None if it can.

    The function checks only the head and the end of the file. The kernel also skips damaged files, files with very
    unusual heads, such as JFIF 2, and crops that would be too large when resized. There are only a few distinct
    reasons, all short, so callers can count images by reason.

    Args:
        content: The bytes of the image file.
    """
    if find_pixels(content) is not None:
        return None
    if not content.startswith(JPEG_START):
        return "not a JPEG"
    try:
        head = read_head(content)
    except ValueError:
        return "unusual head"
    if (why := why_irregular(head)) is not None and head.process != SOF2:
        return why
    if len(head.factors) > 1 and head.factors not in _KERNEL_FACTORS:
        return "unusual sampling factors"
    if not content.endswith(marker_bytes(EOI)):
        return "no end-of-image marker"
    return None


def render_by_kernel(crops: Sequence[PlannedCrop], rows: Sequence[Rows]) -> NDArray[np.bool_]:
    """Render the crops that the kernel can render, if a kernel is available.

    Args:
        crops: The crops of n images, at least one for each image. The kernel renders all crops of one picture together.
        rows: The destinations of each crop.

    Returns:
        bool [n, crops], true for rendered crops.
    """
    pictures = crops[0].pictures
    is_rendered = np.zeros((len(pictures), len(crops)), np.bool_)
    kernel = find_kernel() if len(pictures) else None
    if kernel is None:
        return is_rendered
    is_for_kernel = np.stack(
        [find_suitable(crop, pictures) & _are_contiguous(given) for crop, given in zip(crops, rows, strict=True)], 1
    )
    is_used: list[bool] = np.asarray(is_for_kernel.any(axis=1)).tolist()
    contents = [find_content(picture) if used else b"" for picture, used in zip(pictures, is_used, strict=True)]
    if not any(is_used):
        return is_rendered
    records = np.stack([as_records(crop.plan) for crop in crops], axis=1)
    records["height"][~is_for_kernel] = 0
    # Sort by how much of an untiled file must be read, so that images decoded together take about the same time.
    bottom = np.max([crop.plan.box[:, 0] + crop.plan.box[:, 2] for crop in crops], axis=0)
    lengths = [len(each if isinstance(each, bytes) else each.content or b"") for each in contents]
    order = np.argsort(bottom / [picture.size[0] for picture in pictures] * lengths)
    turns = np.array([encode_turn(picture) for picture in pictures])
    flat = rows[0] if len(rows) == 1 else [pixels for of_image in zip(*rows, strict=True) for pixels in of_image]
    is_done = kernel.decode(contents, records.reshape(-1), order, flat, turns)
    return is_for_kernel & is_done[:, np.newaxis]


def find_suitable(crop: PlannedCrop, pictures: Sequence[Picture]) -> NDArray[np.bool_]:
    """Return whether the kernel may be able to render each image's crop, bool [n], given the first crop's pictures."""
    return np.asarray(crop.plan.size.prod(axis=1) <= MAX_RESIZED_PIXELS) & [
        isinstance(picture, JpegPicture | PixelPicture) and picture is first
        for picture, first in zip(crop.pictures, pictures, strict=True)
    ]


def _are_contiguous(rows: Rows) -> NDArray[np.bool_]:
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        return np.ones(len(rows), np.bool_)
    return np.array([pixels.flags.c_contiguous for pixels in rows], np.bool_)


def find_content(picture: Picture) -> Content:
    """Return a JPEG, or the pixels of a PPM, in the form that the kernel takes."""
    if isinstance(picture, JpegPicture):
        return picture.content if picture.kept is None else picture.kept
    assert isinstance(picture, PixelPicture), "the kernel renders no other pictures"
    source, layout = picture.source, picture.layout
    if isinstance(source, bytes):
        return StoredPixels(source, None, *layout[:4])
    return StoredPixels(None, source.file.number, layout.offset + source.start, *layout[1:4])


def encode_turn(picture: Picture) -> int:
    """Encode the turn of a picture for the kernel, as in IMAGE.turn."""
    if not isinstance(picture, JpegPicture) or picture.turn == UPRIGHT:
        return 0
    is_upside_down, is_mirrored, is_transposed = picture.turn
    return UPSIDE_DOWN * is_upside_down + MIRRORED * is_mirrored + TRANSPOSED * is_transposed


def as_records(plan: CropPlan) -> NDArray[np.void]:
    """Encode a plan for the kernel, as PLAN [n]."""
    records = np.empty(len(plan.box), PLAN)
    records["top"], records["left"], records["height"], records["width"] = plan.box.T
    records["new_height"], records["new_width"] = plan.size.T
    records["window_top"], records["window_left"] = plan.window[:, :2].T
    records["is_flipped"] = plan.flip
    averaged = _RESAMPLINGS["antialiased bilinear"]
    records["resampling"] = np.where(plan.is_halved, averaged, _RESAMPLINGS[plan.resampling])
    return records


def make_operations(num_images: int, code: int, *numbers: object) -> Operations:
    """Return one operation for each image, OPERATION [n, 1].

    Args:
        num_images: n.
        code: The operation's code.
        numbers: The operation's numbers: each is one value for all images, or an array [n].

    Raises:
        ValueError: If no operation has this code.
    """
    if not codes.NONE <= code <= codes.END_MIXTURE and code not in _DEFINED:  # The kernel does not check codes.
        raise ValueError(
            f"there is no operation with the code {code}: the kernel's operations have codes up to "
            f"{codes.END_MIXTURE}, and define_operation returns the codes of other operations"
        )
    operations = np.zeros((num_images, 1), OPERATION)
    operations["code"] = code
    for index, number in enumerate(numbers):
        operations["numbers"][:, 0, index] = number
    return operations


def edit_images(rows: Pixels | Sequence[Pixels], operations: Operations) -> None:
    """Apply operations to images in place.

    Args:
        rows: The images: uint8 [n, height, width, 3], or n uint8 [height, width, 3] arrays.
        operations: OPERATION [n, k].
    """
    if not operations["code"].any():
        return
    edited = [np.ascontiguousarray(pixels) for pixels in rows]  # Most rows are contiguous and are not copied.
    functions = find_functions()
    if functions is None or operations["code"].min() < 0:
        edited = [edit_by_pillow(row, own) for row, own in zip(edited, operations, strict=True)]
    else:
        functions.edit_images(edited, np.ascontiguousarray(operations))
    for pixels, row in zip(rows, edited, strict=True):
        if row is not pixels and not np.may_share_memory(row, pixels):
            np.copyto(pixels, row)


def normalize_image(pixels: Pixels, means: Floats, deviations: Floats) -> Floats:
    """Return (pixels / 255 - mean) / deviation, float32 [3, height, width], rounded to 32 bits after each step.

    Args:
        pixels: uint8 [height, width, 3].
        means: float32 [3], for red, green and blue.
        deviations: float32 [3].
    """
    functions = find_functions()
    if functions is not None:
        return functions.normalize_image(np.ascontiguousarray(pixels), means, deviations)
    scaled = pixels.transpose(2, 0, 1).astype(np.float32, order="C")
    scaled *= np.float32(1 / 255)
    return normalize_floats(scaled, means, deviations)


def normalize_floats(image: Floats, means: Floats, deviations: Floats) -> Floats:
    """Return (image - mean) / deviation. The image and the result are float32 [3, height, width]."""
    normalized: Floats = image - means[:, None, None]
    normalized /= deviations[:, None, None]
    return normalized


Edit = Callable[["Image.Image", Sequence[float]], "Image.Image"]
"""A function that applies an operation, given its numbers, to a Pillow image, and returns a new image."""

_DEFINED: dict[int, Edit] = {}
"""The operations that the kernel does not have, by code."""


def define_operation(name: str, edit: Edit) -> int:
    """Define an operation that the kernel does not have. Return the operation's code, the same in every process.

    Transforms can then draw the operation, crop plans can contain it, and ``edit`` applies it.

    Args:
        name: A name that no other operation has.
        edit: A function that applies the operation to an image, given up to twelve numbers.

    Raises:
        ValueError: If another operation has this name.
    """
    code = _Code(-1 - zlib.crc32(name.encode()))
    if _DEFINED.setdefault(code, edit) is not edit:
        raise ValueError(f"an operation named {name!r} already exists: choose another name")
    return code


class _Code(int):
    """The code of a defined operation.

    Unpickling the code defines the operation, because a worker process does not run the script that defined it.
    """

    def __reduce__(self) -> tuple[Callable[[int, Edit], int], tuple[int, Edit]]:
        return _restore_code, (int(self), _DEFINED[self])


def _restore_code(code: int, edit: Edit) -> int:
    _DEFINED.setdefault(code, edit)
    return _Code(code)


def edit_by_pillow(pixels: Pixels, operations: NDArray[np.void]) -> Pixels:
    """Apply operations to an image, and return the result.

    Args:
        pixels: uint8 [height, width, 3].
        operations: OPERATION [k].
    """
    from PIL import Image

    image = original = Image.fromarray(pixels)
    total = np.zeros(pixels.shape, np.float32)
    for code, numbers in operations.tolist():
        if code == codes.BEGIN_MIXTURE:
            original, total = image, np.asarray(image, np.float32) * np.float32(numbers[0])
        elif code == codes.ADD_TO_MIXTURE:
            image, total = original, total + np.asarray(image, np.float32) * np.float32(numbers[0])
        elif code == codes.END_MIXTURE:
            image = Image.fromarray(total.clip(0, 255).astype(np.uint8))
        elif code != codes.NONE:
            image = (_kernels_operations().get(code) or _DEFINED[code])(image, numbers)
    return np.array(image)


@cache
def _kernels_operations() -> dict[int, Edit]:
    from PIL import Image, ImageEnhance, ImageOps

    def turn_hue(image: Image.Image, numbers: Sequence[float]) -> Image.Image:
        hue, saturation, value = image.convert("HSV").split()
        turned = hue.point([(level + int(numbers[0])) % 256 for level in range(256)])
        return Image.merge("HSV", (turned, saturation, value)).convert("RGB")

    def warp(image: Image.Image, numbers: Sequence[float], method: Image.Transform) -> Image.Image:
        matrix = numbers[:6] if method == Image.Transform.AFFINE else [*numbers[:6], *numbers[10:]]
        fill, interpolation = tuple(map(int, numbers[6:9])), Image.Resampling(int(numbers[9]))
        return image.transform(image.size, method, matrix, interpolation, fillcolor=fill)

    def erase(image: Image.Image, numbers: Sequence[float]) -> Image.Image:
        top, left, height, width, *color = map(int, numbers[:7])
        erased = image.copy()
        erased.paste(tuple(color), (left, top, left + width, top + height))
        return erased

    return {
        codes.BRIGHTNESS: lambda image, numbers: ImageEnhance.Brightness(image).enhance(numbers[0]),
        codes.CONTRAST: lambda image, numbers: ImageEnhance.Contrast(image).enhance(numbers[0]),
        codes.SATURATION: lambda image, numbers: ImageEnhance.Color(image).enhance(numbers[0]),
        codes.SHARPNESS: lambda image, numbers: ImageEnhance.Sharpness(image).enhance(numbers[0]),
        codes.HUE: turn_hue,
        codes.GRAYSCALE: lambda image, _: image.convert("L").convert("RGB"),
        codes.SOLARIZE: lambda image, numbers: ImageOps.solarize(image, int(numbers[0])),
        codes.POSTERIZE: lambda image, numbers: image.point([level & int(numbers[0]) for level in range(256)] * 3),
        codes.INVERT: lambda image, _: ImageOps.invert(image),
        codes.AUTOCONTRAST: lambda image, _: ImageOps.autocontrast(image),
        codes.EQUALIZE: lambda image, _: ImageOps.equalize(image),
        codes.AFFINE: partial(warp, method=Image.Transform.AFFINE),
        codes.PERSPECTIVE: partial(warp, method=Image.Transform.PERSPECTIVE),
        codes.ERASE: erase,
        codes.VERTICAL_FLIP: lambda image, _: ImageOps.flip(image),
        codes.GAUSSIAN_BLUR: lambda image, numbers: Image.fromarray(blur(np.asarray(image), *numbers[:4])),
    }


def blur(image: Pixels, radius_down: float, ratio_down: float, radius_across: float, ratio_across: float) -> Pixels:
    """Blur an image with a Gaussian, first vertically, then horizontally. GAUSSIAN_BLUR describes the numbers.

    Beyond the border, the image is mirrored at the centers of the border's pixels.
    """
    down = _add_neighbors(image, _weigh(int(radius_down), ratio_down))
    across = _add_neighbors(down.swapaxes(0, 1), _weigh(int(radius_across), ratio_across)).swapaxes(0, 1)
    pixels: Pixels = np.rint(across).astype(np.uint8)
    return pixels


def _add_neighbors(image: NDArray[np.generic], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weighted sum of each pixel and those above and below it, float32, added from the middle outward."""
    radius, height = len(weights) - 1, len(image)
    padded = np.pad(image.astype(np.float32), ((radius, radius), (0, 0), (0, 0)), mode="reflect")
    total: NDArray[np.float32] = weights[0] * padded[radius : radius + height]
    for i in range(1, radius + 1):
        above, below = padded[radius - i : radius - i + height], padded[radius + i : radius + i + height]
        total = total + weights[i] * (above + below)
    return total


def _weigh(radius: int, ratio: float) -> NDArray[np.float32]:
    """Return the weights of a pixel and of its neighbors up to a radius, omitting negligible weights."""
    total, weight, step = 1.0, 1.0, ratio
    for _ in range(radius):
        weight, step = weight * step, step * (ratio * ratio)
        total += 2 * weight
    weights, weight, step = list[float](), 1 / total, ratio
    while len(weights) <= radius and weight >= _SMALLEST_WEIGHT:
        weights.append(weight)
        weight, step = weight * step, step * (ratio * ratio)
    return np.array(weights, np.float32)
