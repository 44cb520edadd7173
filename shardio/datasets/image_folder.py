"""ImageFolder: a directory of class folders, as torchvision has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from torch.utils.data import Dataset

from shardio.datasets.fields import Decode, FieldDecoder
from shardio.datasets.indices import check_indices
from shardio.datasets.map_epoch import MapEpoch
from shardio.errors import SampleError
from shardio.images import DEFAULT_MAX_PIXELS, Orientation
from shardio.sample import Sample
from shardio.shards import IMAGE_FIELDS, LABEL_FIELD
from shardio.storage import walk_files


class ImageFolder(Dataset[Any]):
    """The images below ``root/class/…``, with the class folder's number as label.

    Args:
        root: The directory.
        transform: Applied to the image.
        decode: ``array`` gives the transform uint8 [height, width, 3] arrays, ``pil`` Pillow images.
        orientation: ``apply`` honours the EXIF orientation.
        max_pixels: An image of more pixels is an error: small files can hold huge ones.

    Attributes:
        classes: The class names, sorted.
        class_to_idx: The label of each class name.
        samples: (path, label) of each image, in torchvision's order.

    Raises:
        FileNotFoundError: If there is no such directory, it has no class folders, or one of them has no image.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Decode = "array",
        orientation: Orientation = "ignore",
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self._decoder = FieldDecoder(
            fields=("image", "label"),
            transform=transform,
            decode=decode,
            orientation=orientation,
            max_pixels=max_pixels,
        )
        self._epoch = MapEpoch()
        self.root = Path(root)
        self.classes = _find_classes(self.root)
        self.samples = _find_samples(self.root, self.classes)

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def targets(self) -> list[int]:
        """The label of each image."""
        return [label for _, label in self.samples]

    @cached_property
    def digest(self) -> str:
        """The dataset's identity: xxh3-128 over the images' paths below the root, in order."""
        paths = "\n".join(os.path.relpath(path, self.root) for path, _ in self.samples)
        return xxhash.xxh3_128_hexdigest(paths.encode(errors="surrogateescape"))

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """Make random transforms a function of (seed, epoch, sample) from here on.

        With an EpochSampler in shardio.DataLoader they are that without it.
        """
        self._epoch.set(epoch, seed)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        """Return (image, label); negative numbers count from the end."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch of samples (torch's DataLoader calls this)."""
        numbers = check_indices(indices, len(self))
        samples = [self._read(*self.samples[number]) for number in numbers.tolist()]
        return self._decoder.decode_batch(samples, self._epoch.keys(numbers))

    def _read(self, path: str, label: int) -> Sample:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise SampleError(f"the image {path} cannot be read: {error}") from error
        fields = {IMAGE_FIELDS[0]: content, LABEL_FIELD: str(label).encode()}
        return Sample(key=path, fields=fields, origin=str(self.root))


def _find_classes(root: Path) -> list[str]:
    if not root.is_dir():
        raise FileNotFoundError(f"there is no directory {root}")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise FileNotFoundError(f"{root} has no class folders: images are expected in {root}/<class>/")
    return classes


def _find_samples(root: Path, classes: list[str]) -> list[tuple[str, int]]:
    samples = []
    for label, name in enumerate(classes):
        images = [path for path in walk_files(root / name) if path.suffix[1:].lower() in IMAGE_FIELDS]
        if not images:
            raise FileNotFoundError(f"the class folder {root / name} holds no image ({', '.join(IMAGE_FIELDS)})")
        # torchvision's order: by directory, then by name.
        images.sort(key=lambda path: (str(path.parent), path.name))
        samples += [(str(path), label) for path in images]
    return samples
