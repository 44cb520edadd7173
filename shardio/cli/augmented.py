"""The rows of the contact sheet of ``shardio augment``: a source's images, and the results of a transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from PIL import Image

from shardio.cli.contact_sheet import SheetRow, fit_cell
from shardio.cli.options import has_class_folders
from shardio.cli.terminal import printable
from shardio.datasets import ImageFolder, MapDataset, ShardMapDataset
from shardio.decoding import Decode, FieldDecoder
from shardio.images import IMAGE_FIELDS
from shardio.reading import FileReader, LabelledFile
from shardio.storage import StorageOptions, absolute_path, find_path, make_access, parse_location, walk_files
from shardio.viewer import holds_shards

CHANNELS = (1, 3, 4)
"""The numbers of channels that can be shown: grey, RGB, and RGB with an alpha channel, which is ignored."""

Transform = Callable[[Any], Any]


class ImageFiles(MapDataset):
    """A dataset of image files without labels, in any folders below a root. All paths are absolute.

    Attributes:
        samples: The path of each image and an unused label.
    """

    def __init__(self, root: Path, paths: Sequence[Path], transform: Transform, decode: Decode) -> None:
        decoder = FieldDecoder(fields=("image",), transform=transform, decode=decode)
        super().__init__(decoder, FileReader(parse_location(root), IMAGE_FIELDS[0]))
        self.samples = [(str(path), 0) for path in paths]

    def locate(self, indices: NDArray[np.int64]) -> list[LabelledFile]:
        return [self.samples[index] for index in indices.tolist()]

    def __len__(self) -> int:
        return len(self.samples)


def open_images(
    source: Path, transform: Transform, decode: Decode, storage_options: StorageOptions | None = None
) -> MapDataset:
    """Open a source as the dataset whose samples begin with images.

    Args:
        source: Class folders, any other directory of images, an image file, or a packed dataset.
        transform: The transform of the images.
        decode: The type of the images that the transform receives: arrays or Pillow images.
        storage_options: Settings of the store of a remote source.

    Raises:
        FileNotFoundError: If the source does not exist, or holds no images.
        FormatError: If it is not a dataset.
        TypeError: If the transform does not accept images of that type.
    """
    access = make_access(storage_options)
    if find_path(parse_location(source, access)) is None:
        if has_class_folders(source, access):
            return ImageFolder(source, transform, decode=decode, storage_options=storage_options)
        return ShardMapDataset(
            source, fields=("image",), transform=transform, decode=decode, storage_options=storage_options
        )
    source = absolute_path(source)
    if source.is_file() and _is_image(source):
        return ImageFiles(source.parent, [source], transform, decode)
    if not source.is_dir() or holds_shards(parse_location(source)):
        return ShardMapDataset(source, fields=("image",), transform=transform, decode=decode)
    if has_class_folders(source):
        try:
            return ImageFolder(source, transform, decode=decode)
        except FileNotFoundError:
            pass  # Not every folder is a class: some hold no images.
    paths = list(filter(_is_image, walk_files(source)))
    if not paths:
        raise FileNotFoundError(f"{source} holds neither images ({', '.join(IMAGE_FIELDS)}) nor shards")
    return ImageFiles(source, paths, transform, decode)


def choose_evenly(num_samples: int, num_chosen: int) -> list[int]:
    """Return the indices of ``num_chosen`` evenly spaced samples; all indices if there are fewer samples."""
    num_chosen = min(num_samples, num_chosen)
    return [number * num_samples // num_chosen for number in range(num_chosen)]


def make_row(dataset: MapDataset, index: int, num_epochs: int, seed: int) -> SheetRow:
    """Return the row of one sample: the original image, and its images in the first epochs.

    Values that are not uint8, such as normalised ones, are stretched to 0..255. One range applies to the whole row, so
    that differences between epochs stay visible.

    Args:
        dataset: A dataset of :func:`open_images`.
        index: The sample's index.
        num_epochs: The number of epochs.
        seed: The seed of the run.

    Raises:
        SampleError: If the image cannot be read or decoded.
        typer.BadParameter: If the transform does not return images, or returns NaN.
    """
    untransformed = copy(dataset)
    untransformed.transform = None
    original = _as_array(untransformed[index][0])
    name = printable(_name(dataset, index))
    results = list[list[NDArray[Any]]]()
    for epoch in range(num_epochs):
        dataset.set_epoch(epoch, seed)
        result = dataset[index][0]
        results.append([_as_array(image) for image in (result if isinstance(result, tuple | list) else [result])])
    others = [array for arrays in results for array in arrays if array.dtype != np.uint8]
    low, high = (min(map(np.min, others)), max(map(np.max, others))) if others else (0, 255)
    if not all(np.isfinite(array).all() for array in others):
        raise typer.BadParameter(f"the transform returned NaN or infinite values for {name}", param_hint="--transform")
    groups = [[_show(array, low, high) for array in arrays] for arrays in results]
    return SheetRow(
        names=[f"{name} (stretched)" if others else name], groups=[[fit_cell(Image.fromarray(original))], *groups]
    )


def _is_image(path: Path) -> bool:
    return path.suffix[1:].lower() in IMAGE_FIELDS


def _name(dataset: MapDataset, index: int) -> str:
    key, where = dataset.describe(index)
    return Path(key).relative_to(where).as_posix() if isinstance(dataset.reader, FileReader) else key


def _as_array(image: Any) -> NDArray[Any]:
    """Return an image as an array [height, width] or [height, width, 3].

    Raises:
        typer.BadParameter: If it is not an image.
    """
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    is_tensor = isinstance(image, torch.Tensor)
    if is_tensor and image.is_floating_point():
        image = image.float()  # NumPy has no bfloat16.
    array = image.numpy(force=True) if is_tensor else np.asarray(image)
    if array.size and array.dtype.kind in "biuf":
        if array.ndim == 2:
            return array
        # Tensors usually are [channels, height, width], and arrays [height, width, channels].
        for axis in (0, 2) if is_tensor else (2, 0):
            if array.ndim == 3 and array.shape[axis] in CHANNELS:
                array = np.moveaxis(array, axis, 2)
                return array[..., 0] if array.shape[2] == 1 else array[..., :3]
    got = f"{array.dtype} {list(array.shape)}" if array.ndim else type(image).__name__
    raise typer.BadParameter(
        f"must return an image with 1, 3 or 4 channels, or a tuple of images, but returned {got}",
        param_hint="--transform",
    )


def _show(array: NDArray[Any], low: float, high: float) -> Image.Image:
    """Return an array as an image that fits into a cell, with the range from low to high stretched to 0..255."""
    if array.dtype != np.uint8:
        span = float(high) - float(low) or 1.0
        array = np.rint((array.astype(np.float64) - float(low)) * (255 / span)).astype(np.uint8)
    return fit_cell(Image.fromarray(np.ascontiguousarray(array)).convert("RGB"))
