"""ImageFolder: a directory of class folders, with the same layout as in torchvision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.classes import Classes, check_classes, number_classes
from shardio.datasets.map_dataset import MapDataset
from shardio.decoding import Decode, FieldDecoder
from shardio.images import DEFAULT_MAX_PIXELS, IMAGE_FIELDS, Orientation, describe_other_images
from shardio.reading import FileReader, LabelledFile
from shardio.shared_list import SharedList
from shardio.storage import Location, parse_location, read_as_utf8


class ImageFolder(MapDataset):
    """A map-style dataset of the images in ``root/class/…``, labelled by class folder.

    Args:
        root: The directory.
        transform: A callable applied to each image.
        decode: ``array`` passes uint8 [height, width, 3] arrays to the transform, but Pillow images to pipelines of
            torchvision's and timm's that convert these; ``pil`` always passes Pillow images.
        orientation: ``apply`` honours the EXIF orientation; ``ignore``, the default, does not.
        max_pixels: The maximum number of pixels in an image; a larger image is an error, because a small file can
            hold a huge image.
        classes: Class names in the order of their labels, or another dataset that has them; by default, the sorted
            names of the class folders. Classes without a folder are allowed.
        seed_transforms: Whether a sample's rng key seeds the global generators of torch, numpy and Python, and those of
            Albumentations, before your own transforms get its image. They then draw the same random numbers for it on
            any number of workers, and after a resumption.
        transform_sample: A callable applied to each whole sample, ``{"image": array, "label": label}``; see
            :class:`shardio.ShardDataset`.

    Attributes:
        classes: The class names, by label.
        class_to_idx: The label of each class name.
        samples: (absolute path, label) of each image, in torchvision's order, as a SharedList. You can change it or set
            another list; a label that is not an integer raises TypeError when it is read.

    Raises:
        FileNotFoundError: If the directory does not exist or has no class folders, or if a class folder has no
            images.
        ValueError: If a class folder is not in ``classes``.
        TypeError: If the transform is not callable, or takes arrays but ``decode`` is ``pil``.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[Any], Any] | None = None,
        *,
        decode: Decode = "array",
        orientation: Orientation = "ignore",
        max_pixels: int = DEFAULT_MAX_PIXELS,
        classes: Classes | None = None,
        seed_transforms: bool = True,
        transform_sample: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        decoder = FieldDecoder(
            fields=("image", "label"),
            transform=transform,
            decode=decode,
            orientation=orientation,
            max_pixels=max_pixels,
            seed_transforms=seed_transforms,
            transform_sample=transform_sample,
        )
        location = parse_location(root)
        self.root = Path(str(location))
        super().__init__(decoder, FileReader(location, IMAGE_FIELDS[0]))
        folders = _find_classes(location)
        self.classes = list(folders if classes is None else check_classes(classes))
        self.samples, others = _find_samples(folders, number_classes(list(folders), self.classes, str(root)))
        if left_out := describe_other_images(others):
            warnings.warn(f"{root}: {left_out}", RuntimeWarning, stacklevel=2)

    @property
    def samples(self) -> SharedList[tuple[str, int]] | list[tuple[str, int]]:
        return self._samples

    @samples.setter
    def samples(self, samples: SharedList[tuple[str, int]] | list[tuple[str, int]]) -> None:
        try:
            self._samples: SharedList[tuple[str, int]] | list[tuple[str, int]] = SharedList(samples)
        except (TypeError, OverflowError):  # It can be read all the same, or its error says why not.
            self._samples = samples

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
        root = str(self.root / "x")[:-1]
        paths = "\n".join(path.removeprefix(root) for path, _ in self.samples)
        return xxhash.xxh3_128_hexdigest(paths.encode(errors="surrogateescape"))

    def locate(self, indices: NDArray[np.int64]) -> list[LabelledFile]:
        return [self.samples[index] for index in indices.tolist()]

    def __len__(self) -> int:
        return len(self.samples)


def _find_classes(root: Location) -> dict[str, Location]:
    """Return the class folders by name, sorted."""
    if not root.is_folder():
        raise FileNotFoundError(f"the directory {root} does not exist")
    names = sorted(name[:-1] for name in root.list() if name.endswith("/") and not name.startswith("."))
    if not names:
        raise FileNotFoundError(f"{root} has no class folders: images are expected in {root}/<class>/")
    return {read_as_utf8(name): root / name for name in names}


def _find_samples(
    folders: Mapping[str, Location], labels: Mapping[str, int]
) -> tuple[list[tuple[str, int]], list[Path]]:
    """Return the (path, label) of each image, and all other files."""
    samples = []
    others = list[Path]()
    for name, folder in folders.items():
        images = list[Path]()
        for path in map(Path, folder.walk()):
            (images if path.suffix[1:].lower() in IMAGE_FIELDS else others).append(path)
        if not images:
            raise FileNotFoundError(
                f"the class folder {folder} holds no images: add images ({', '.join(IMAGE_FIELDS)}) or remove it"
            )
        # torchvision's order: by directory, then by name.
        images.sort(key=lambda path: (str(path.parent), path.name))
        samples += [(str(path), labels[name]) for path in images]
    return samples, others
