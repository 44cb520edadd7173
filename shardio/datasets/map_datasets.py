"""Map-style datasets: ImageFolder and ShardMapDataset."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shardio.datasets.samples import (
    FieldedSettings,
    KeepingSettings,
    MapEpoch,
    RemoteSettings,
    SampleSettings,
    Transform,
    Transformed,
    check_indices,
    decode_samples,
    follow_classes,
    takes,
)
from shardio.decoding import FieldDecoder
from shardio.errors import SampleError, find_user_level, move_mark
from shardio.images import IMAGE_FIELDS, describe_other_images
from shardio.libraries import own_tensors
from shardio.order import Words, check_epoch
from shardio.reading import (
    FileReader,
    LabeledFile,
    Reader,
    RemoteFiles,
    RemoteSamples,
    SampleReader,
    Verify,
    find_remote_shards,
)
from shardio.sample import check_classes, number_classes
from shardio.shards import DatasetSource, ShardTable, is_split, open_table
from shardio.shared import SharedList
from shardio.storage import Location, parse_location, read_as_utf8
from shardio.values import check_integer

if TYPE_CHECKING:
    from shardio.storage.listing import CachedFiles, Listing


class MapDataset(Transformed, Dataset[Any]):
    """The base class of shardio's map-style datasets.

    Attributes:
        decoder: The decoder of the stored fields.
        reader: The reader, which takes samples in the form that :meth:`locate` returns.
        map_epoch: The seed and epoch, if the user set them.
    """

    def __init__(self, decoder: FieldDecoder, reader: Reader) -> None:
        super().__init__(decoder)
        self.reader = reader
        self.map_epoch = MapEpoch()

    def set_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Make random transforms a function of (seed, epoch, sample) from now on.

        An EpochSampler in shardio.DataLoader does not need this call.

        Args:
            epoch: The epoch's number.
            seed: The seed of the transforms; by default, the previous seed, which is initially 0.

        Raises:
            TypeError: If an argument is not an integer.
            ValueError: If an argument is negative, the epoch is not below 2**62, or the seed is not below 2**63.
        """
        if seed is None:
            seed, _ = self.map_epoch.known or (0, 0)
        self.map_epoch.set(check_epoch(epoch), check_integer("seed", seed, at_least=0, below=2**63))

    def locate(self, indices: NDArray[np.int64]) -> Any:
        """Return samples in the form that the reader accepts: their indices, unless a subclass overrides this."""
        return indices

    def describe(self, index: int) -> tuple[str, str]:
        """Return a sample's key and location, for messages."""
        return self.reader.describe(self.locate(np.array([index]))[0], self.decoder.stored_fields)

    def __len__(self) -> int:
        raise NotImplementedError  # Abstract: each kind of dataset counts its own samples.

    def __getitem__(self, index: int) -> Any:
        """Return one sample; a negative index counts from the end.

        Raises:
            TypeError: If ``index`` is not an integer.
            IndexError: If ``index`` is out of range.
            SampleError: If the sample cannot be read or decoded.
        """
        if self._owner("__getitem__") is MapDataset:
            return self.__getitems__([index])[0]
        return self._get([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch of samples. torch's DataLoader calls this method.

        If a subclass overrides only ``__getitem__``, the samples come from that method.

        Raises:
            TypeError: If an index is not an integer.
            IndexError: If an index is out of range.
            SampleError: If a sample cannot be read or decoded.
        """
        single = self._owner("__getitem__")
        # A class that overrides both methods handles single samples in its own __getitems__.
        if single is MapDataset or single is self._owner("__getitems__"):
            return self._get(indices)
        return [self._get_single(row, index) for row, index in enumerate(indices)]

    def _owner(self, method: str) -> type:
        # Return the class that defines a method for this dataset.
        return next(kind for kind in type(self).__mro__ if method in vars(kind))

    def _get_single(self, row: int, index: int) -> Any:
        try:
            return self[index]
        except SampleError as error:
            raise error.at_row(row) from error

    def _get(self, indices: Sequence[int]) -> list[Any]:
        checked = check_indices(indices, len(self))
        return self.read(checked, self.map_epoch.rng_keys(checked))

    def read(self, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        """Return the samples at the indices, int64 [n], with the rng keys of their transforms, uint64 [n].

        Raises:
            SampleError: If a sample cannot be read or decoded.
        """
        self.check_transform()
        values = list[Any]()
        for start in range(0, len(indices), self.decoder.chunk_size):
            chunk = slice(start, start + self.decoder.chunk_size)
            try:
                with own_tensors():
                    stored = self.reader.read(
                        self.locate(indices[chunk]), self.decoder.stored_fields, self.decoder.deferred_fields
                    )
                    values += decode_samples(self.decoder, stored, rng_keys[chunk])
            except SampleError as error:
                raise error.at_row(start + error.row) from error
            except Exception as error:  # User code may raise anything; the error is re-raised.
                move_mark(error, start)
                raise
        return values


def takes_rng_keys(dataset: Any) -> bool:
    """Return whether samples can be read with :meth:`MapDataset.read`: a subclass may override how it gets samples."""
    methods = ("__getitem__", "__getitems__")
    return isinstance(dataset, MapDataset) and all(
        getattr(type(dataset), name) is getattr(MapDataset, name) for name in methods
    )


@dataclass(frozen=True)
class FolderRoot:
    """The first argument of ImageFolder.

    Attributes:
        root: The directory, or the URL of a folder in an object store.
    """

    root: str | Path


@dataclass(frozen=True, kw_only=True)
class FolderSettings(RemoteSettings, KeepingSettings, SampleSettings, FolderRoot):
    """The arguments of ImageFolder.

    Attributes:
        transform: A callable applied to each image.
        classes: Class names in the order of their labels, or another dataset that has them; by default, the sorted
            names of the class folders. Classes without a folder are allowed.
        listing: For a remote folder, a local file that keeps its listing. If the file exists, the folder is not listed
            again: delete the file after adding or removing images. By default, each process lists the folder.
    """

    transform: Transform | None = field(default=None, kw_only=False)  # The second argument, as in torchvision.
    listing: str | os.PathLike[str] | None = None


class ImageFolder(MapDataset):
    """A map-style dataset of the images in ``root/class/…``, labeled by class folder.

    Attributes:
        root: The directory as a Path, or the URL.
        classes: The class names, by label.
        class_to_idx: The label of each class name.
        samples: (absolute path or URL, label) of each image, in torchvision's order, as a SharedList. You can modify
            or replace this list; reading a label that is not an integer raises TypeError.

    Raises:
        FileNotFoundError: If the directory does not exist or has no class folders, or if a class folder has no
            images.
        ValueError: If a class folder is not in ``classes``.
        FormatError: If ``listing`` is damaged or belongs to a different folder.
        StoreError: If a remote store keeps failing.
        TypeError: If the transform is not callable, or requires arrays but ``decode`` is ``pil``.
    """

    @takes(FolderSettings)
    def __init__(self, options: FolderSettings) -> None:
        root = options.root
        cache = options.make_decoded_cache(str(root), options.orientation)
        decoder = options.make_decoder(fields=("image", "label"), decoded_cache=cache)
        location = parse_location(root, options.make_access())
        listing, files = (None, None) if location.store.is_local else _list_files(location, options.listing)
        self.root: Path | str = Path(location.key) if listing is None else str(location)
        super().__init__(decoder, FileReader(location, IMAGE_FIELDS[0], files))
        paths = _find_local(location) if listing is None else _find_listed(listing)
        self.classes = list(paths if options.classes is None else check_classes(options.classes))
        labels = number_classes(list(paths), self.classes, str(root))
        self.samples, others = _label_images(paths, labels, location, None if listing is None else listing.path)
        if len(paths) > 1 and all(map(is_split, paths)):
            warnings.warn(
                f"{root}: the classes {', '.join(paths)} look like the splits of a dataset, not classes: pass one of "
                f"their folders, such as {root}/{next(iter(paths))}",
                RuntimeWarning,
                stacklevel=find_user_level(),
            )
        if left_out := describe_other_images(others):
            warnings.warn(f"{root}: {left_out}", RuntimeWarning, stacklevel=find_user_level())

    @property
    def samples(self) -> SharedList[tuple[str, int]] | list[tuple[str, int]]:
        return self._samples

    @samples.setter
    def samples(self, samples: SharedList[tuple[str, int]] | list[tuple[str, int]]) -> None:
        try:
            self._samples: SharedList[tuple[str, int]] | list[tuple[str, int]] = (
                samples.copy() if isinstance(samples, SharedList) else SharedList(samples)
            )
        except (TypeError, OverflowError):  # Keep other values in a plain list; reading a bad value raises an error.
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
        root = str(self.root).rstrip("/") + "/"
        paths = "\n".join(path.removeprefix(root) for path, _ in self.samples)
        return xxhash.xxh3_128_hexdigest(paths.encode(errors="surrogateescape"))

    def locate(self, indices: NDArray[np.int64]) -> list[LabeledFile]:
        return [self.samples[index] for index in indices.tolist()]

    def remote_samples(self) -> RemoteSamples | None:
        files = self.reader.files if isinstance(self.reader, FileReader) else None
        return None if files is None else RemoteFiles(files, self._list_keys)

    def _list_keys(self, indices: NDArray[np.int64]) -> list[str]:
        assert isinstance(self.reader, FileReader), "it reads files"
        return [self.reader.find_key(path) for path, _ in self.locate(indices)]

    def __len__(self) -> int:
        return len(self.samples)


def _list_files(root: Location, kept: str | os.PathLike[str] | None) -> tuple[Listing, CachedFiles | None]:
    from shardio.storage.listing import open_files  # Local folders do not need this module.

    return open_files(root, kept)


def _find_local(root: Location) -> dict[str, Iterable[str]]:
    if not root.is_folder():
        raise FileNotFoundError(f"the directory {root} does not exist")
    entries = [name for name in root.list() if not name.startswith(".")]
    for name in entries:
        if not name.endswith("/") and "." not in name and not (path := Path((root / name).key)).exists():
            raise FileNotFoundError(
                f"{path} is a symbolic link whose target does not exist. If it is a class folder, its "
                "images would be left out: correct or remove the link"
            )
    names = sorted(name[:-1] for name in entries if name.endswith("/"))
    if not names:
        raise _no_class_folders(root)
    return {read_as_utf8(name): (root / name).walk() for name in names}


def _find_listed(listing: Listing) -> dict[str, Iterable[str]]:
    folder, found = listing.folder, {name: list[str]() for name in listing.folders}
    start, prefix = len(f"{folder.key}/" if folder.key else ""), folder.store.prefix
    for key in listing.keys:
        found[key[start : key.index("/", start)]].append(prefix + key)
    if not found:
        raise _no_class_folders(folder)
    return dict(sorted(found.items()))


def _no_class_folders(root: Location) -> FileNotFoundError:
    return FileNotFoundError(f"{root} has no class folders: images are expected in {root}/<class>/")


def _label_images(
    paths: Mapping[str, Iterable[str]], labels: Mapping[str, int], root: Location, listing: Path | None
) -> tuple[SharedList[tuple[str, int]], list[Path]]:
    samples = list[SharedList[tuple[str, int]]]()  # One per class: all classes' strings would need a lot of memory.
    others = list[Path]()
    for name, files in paths.items():
        images, num_before = list[str](), len(others)
        for path in files:
            if path.rpartition(".")[2].lower() in IMAGE_FIELDS:
                images.append(path)
            else:
                others.append(Path(path))
        if not images:
            left_out = describe_other_images(others[num_before:])
            what = left_out or f"add images ({', '.join(IMAGE_FIELDS)}) or remove it"
            kept = "" if listing is None else f". Then delete the listing {listing}"
            raise FileNotFoundError(f"the class folder {root / name} holds no images: {what}{kept}")
        # torchvision's order: by directory, then by name. In a single directory, comparing whole paths is faster.
        is_flat = "".join(images).count("/") == f"{root / name}/".count("/") * len(images)
        images.sort(key=None if is_flat else lambda path: path.rpartition("/")[::2])
        samples.append(SharedList([(path, labels[name]) for path in images]))
    return SharedList.joined(samples), others


@dataclass(frozen=True, kw_only=True)
class ShardSettings(RemoteSettings, KeepingSettings, FieldedSettings):
    """The arguments of ShardMapDataset.

    Attributes:
        source: A packed directory, its manifest, a directory of tars, a tar, a pattern such as
            ``shard-{000000..000012}.tar``, or a list of tars and patterns.
        verify: ``first`` compares each sample's tar header and content with the index when a process first reads
            it; ``off`` compares nothing.
    """

    source: DatasetSource = field(kw_only=False)
    verify: Verify = "first"

    def open(self) -> tuple[ShardTable, tuple[str, ...], FieldDecoder]:
        """Return the table of the shards, the class names, and the decoder."""
        decoder, where = self.make_decoder(decoded_cache=None), str(self.source)
        table = open_table(self.source, self.make_access())
        cache = self.make_decoded_cache(table.manifest.digest, self.orientation)
        decoder = replace(decoder, decoded_cache=cache)
        decoder.check_fields(table.manifest.fields, where)
        return table, *follow_classes(table.manifest.classes, self.classes, decoder, where)


class ShardMapDataset(MapDataset):
    """A map-style dataset over the samples of packed shards, in manifest order.

    As with any map-style dataset, the sampler decides which samples a rank gets, and in which order:
    :class:`shardio.EpochSampler` provides shardio's order.

    Raises:
        FileNotFoundError: If ``source`` does not exist.
        FormatError: If ``source`` is not a dataset.
        ValueError: If no sample has a requested field, or if ``classes`` is given and the dataset has no classes or has
            a class that is not listed.
        TypeError: If the transform is not callable, or requires arrays but ``decode`` is ``pil``.
    """

    @takes(ShardSettings)
    def __init__(self, options: ShardSettings) -> None:
        self._open(*options.open(), options.verify)

    @classmethod
    def over(
        cls, table: ShardTable, classes: tuple[str, ...], decoder: FieldDecoder, verify: Verify
    ) -> ShardMapDataset:
        """Return a dataset of the samples of a table, given the class names, the decoder and the setting ``verify``."""
        dataset = cls.__new__(cls)
        dataset._open(table, classes, decoder, verify)
        return dataset

    def _open(self, table: ShardTable, classes: tuple[str, ...], decoder: FieldDecoder, verify: Verify) -> None:
        super().__init__(decoder, SampleReader(table, verify))
        self.table, self._classes, self.verify = table, classes, verify
        self.shard_sizes, self.digest = table.manifest.shard_sizes, table.manifest.digest

    @property
    def classes(self) -> list[str]:
        """The class names, by label."""
        return list(self._classes)

    def remote_samples(self) -> RemoteSamples | None:
        return find_remote_shards(self.table, self.decoder.stored_fields)

    def __len__(self) -> int:
        return int(self.shard_sizes.sum())
