"""The parts that all datasets share: settings, indices, epochs, labels, transforms, and the samples that they yield."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.decoding import Decode, FieldDecoder, Fields, Missing
from shardio.epochs import set_in_block
from shardio.images import DEFAULT_MAX_PIXELS, DecodedCache, Orientation, holds_images, make_cache
from shardio.order import Cursor, Words, augment_rng_keys
from shardio.reading import RemoteSamples, StoredSamples
from shardio.sample import Classes, check_classes, number_classes
from shardio.shared import SharedNumbers
from shardio.storage import RemoteAccess, StorageOptions, make_access
from shardio.transforms import Calls, Ragged, is_image_array, rng_keys_from_torch
from shardio.values import check_integer, count, parse_size
from shardio.world import find_worker_over

_BEGINNING = Cursor(epoch=0)

_LOADERS_EPOCH: ContextVar[tuple[int, int] | None] = ContextVar("loaders_epoch", default=None)

Transform = Callable[[Any], Any]

Self = TypeVar("Self", bound="Copied")
Parameters = ParamSpec("Parameters")
Settings = TypeVar("Settings")
Owner = TypeVar("Owner")

TOO_LATE = (
    "dataset.transform was set during an iteration, or persistent worker processes still hold the old transform: set "
    "it before iterating, or create a new loader"
)

MAX_CHANNELS = 4
"""The maximum number of channels in an image: red, green, blue and alpha."""


def takes(
    settings: Callable[Parameters, Settings],
) -> Callable[[Callable[[Owner, Settings], None]], Callable[Concatenate[Owner, Parameters], None]]:
    """Return a decorator for a constructor whose arguments are the fields of a dataclass.

    Callers pass the fields as arguments, and the constructor gets the dataclass. The constructor's signature and
    docstring show the fields with their types, defaults and documentation.

    Args:
        settings: The dataclass. Inherited fields are documented in the classes that they come from.
    """
    names = inspect.signature(settings).parameters
    documented = dict[str, str]()
    for kind in reversed(inspect.getmro(settings)):  # type: ignore[arg-type]  # a dataclass
        text = inspect.cleandoc(kind.__doc__ or "")
        documented |= re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE)

    def decorate(init: Callable[[Owner, Settings], None]) -> Callable[Concatenate[Owner, Parameters], None]:
        def construct(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            init(self, settings(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(construct)["__signature__"] = inspect.Signature([own, *names.values()], return_annotation=None)
        construct.__doc__ = "\nArgs:\n" + "\n".join(f"    {name}: {documented.get(name, '')}" for name in names)
        construct.__name__, construct.__qualname__ = init.__name__, init.__qualname__
        vars(settings)["__init__"].__qualname__ = init.__qualname__  # Python's error messages show this.
        return construct

    return decorate


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """The sample settings that all datasets accept.

    To add a setting, add it here and, if decoding uses it, to FieldDecoder in ``decoding/fields.py``.

    Attributes:
        transform: A callable applied to each image, or a ``Compose`` with ``fields``, applied to several fields in the
            same way.
        decode: ``array`` passes uint8 [height, width, 3] arrays to the transform, but Pillow images to torchvision and
            timm pipelines that convert Pillow images; ``pil`` always passes Pillow images.
        orientation: ``apply`` honors the EXIF orientation; ``ignore``, the default, does not.
        max_pixels: The maximum number of pixels in an image. A larger image raises an error, because a small file
            can hold a huge image.
        classes: Class names, or another dataset that has them: labels follow this list instead of the dataset's own.
        seed_transforms: Whether a sample's rng key seeds the global generators of torch, numpy and Python, and those of
            Albumentations, before your own transforms get the sample's image. The transforms then draw the same
            random numbers for the sample with any number of workers, and in a resumed run.
        transform_sample: A callable applied to each whole sample. The callable gets a dict of the values by field, and
            returns the sample. Images are arrays or, with ``decode="pil"`` and no ``transform``, Pillow images. In the
            callable's result, uint8 arrays [height, width, 3], including those within dicts, lists and tuples, become
            tensors [3, height, width]. Albumentations' transforms get the values as keyword arguments.
    """

    transform: Transform | None = None
    decode: Decode = "array"
    orientation: Orientation = "ignore"
    max_pixels: int = DEFAULT_MAX_PIXELS
    classes: Classes | None = None
    seed_transforms: bool = True
    transform_sample: Callable[[dict[str, Any]], Any] | None = None

    def make_decoder(self, **others: Any) -> FieldDecoder:
        """Return a decoder with these settings and ``others``.

        Raises:
            TypeError: If a setting has the wrong type.
            ValueError: If a setting is out of range.
        """
        names = {field.name for field in dataclasses.fields(FieldDecoder)}
        return FieldDecoder(**{name: value for name, value in {**vars(self), **others}.items() if name in names})


@dataclass(frozen=True, kw_only=True)
class FieldedSettings(SampleSettings):
    """The settings of samples whose fields the user chooses.

    Attributes:
        fields: The fields of a sample, in the order of its tuple: ``image`` (uint8 tensor [3, height, width]),
            ``label`` (int), ``key`` (str), or a field by its extension. A single name instead of a tuple yields the
            bare value. ``json``, ``txt``, ``cls``, ``npy``, ``npz``, ``safetensors`` and ``msgpack`` are decoded,
            even if they are the last of several extensions; ``npz`` and ``safetensors`` become dicts of arrays. Pickles
            are decoded only with ``trusted=True``. ``jpg``, ``png``, ``webp``, ``bmp``, ``ppm``, ``pgm`` and ``tiff``
            files are decoded to exactly what they store, or raise an error. Indices and gray values of any type, as in
            masks and depth maps, have the shape [height, width]. 8-bit colors become uint8 tensors [3, height, width],
            and other colors become arrays [height, width, 3] of their type. All other fields are bytes.
        trusted: Whether pickled fields may be unpickled, which can run arbitrary code.
        decoders: Your own decoders: a function from bytes to the value, for each field that shardio should not decode.
        missing: The treatment of a sample that lacks a field other than the image: ``error`` raises an error, and None
            gives the missing field the value None.
    """

    fields: Fields = ("image", "label")
    trusted: bool = False
    decoders: Mapping[str, Callable[[bytes], Any]] | None = None
    missing: Missing = "error"

    def make_decoder(self, **others: Any) -> FieldDecoder:
        return super().make_decoder(decoders=dict(self.decoders or {}), **others)


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """The settings of a source that may be remote.

    Attributes:
        storage_options: Settings for the store of a remote source, such as ``endpoint``, ``region``, ``profile``,
            ``retries`` or ``timeout_s``. The default settings come from the environment, as for the store's own tools.
        cache: For a remote source, a local folder in which processes and jobs on this machine keep the bytes that they
            have read. By default, the cache is a temporary folder, which is removed when the program ends.
        cache_size: The size of the cache, such as ``200GB``; by default, a fifth of the free space, and at most 32 GiB
            if ``cache`` is not given.
        cache_shared: Whether to share the folder ``cache`` with other users, and to trust copies that they wrote.
            Otherwise, only this user and root may have write access to the folder.
    """

    storage_options: StorageOptions | None = None
    cache: str | os.PathLike[str] | None = None
    cache_size: str | int | None = None
    cache_shared: bool = False

    def make_access(self) -> RemoteAccess:
        """Return a RemoteAccess for the source.

        Raises:
            TypeError: If a setting has the wrong type.
            ValueError: If a setting is out of range.
        """
        return make_access(self.storage_options, self.cache, self.cache_size, self.cache_shared)


@dataclass(frozen=True, kw_only=True)
class KeepingSettings:
    """The settings of datasets that may keep decoded images.

    Attributes:
        decoded_cache: The amount of memory, such as ``64GB``, for decoded JPEGs, which later epochs only crop and
            resize. All workers and ranks on a machine share the memory. The setting does not change the pixels.
    """

    decoded_cache: str | int | None = None

    def make_decoded_cache(self, name: str, orientation: Orientation) -> DecodedCache | None:
        """Return the decoded cache of the dataset with this name; None if the dataset keeps no decoded images.

        Raises:
            TypeError: If the size has the wrong type.
            ValueError: If the size is out of range.
        """
        if self.decoded_cache is None:
            return None
        return make_cache(parse_size("decoded_cache", self.decoded_cache), f"{name} {orientation}")


def check_indices(indices: Any, num_samples: int) -> NDArray[np.int64]:
    """Return indices as int64 [n]; negative indices count from the end.

    Args:
        indices: n Python, numpy or torch integers, or an array or tensor of integers.
        num_samples: The size of the dataset.

    Raises:
        TypeError: If an index is not an integer.
        IndexError: If an index is out of range.
    """
    integers = check_integers(indices)
    outside = (integers < -num_samples) | (integers >= num_samples)
    if outside.any():
        raise IndexError(
            f"index {integers[np.argmax(outside)]} is out of range for a dataset of {count(num_samples, 'sample')}"
        )
    return np.where(integers < 0, integers + num_samples, integers).astype(np.int64)


def check_integers(indices: Any) -> NDArray[Any]:
    """Return indices as an array [n] of signed integers, or of Python integers if 64 bits are not enough.

    Raises:
        TypeError: If an index is not an integer.
    """
    with suppress(ValueError):  # numpy raises ValueError if the indices contain sequences.
        integers = np.asarray(indices)
        if integers.ndim == 1 and integers.dtype.kind == "i":
            return integers
    # Check all other indices one by one: booleans, floats, strings, and unsigned or very large integers.
    return np.array([check_integer("an index", index) for index in indices], object)


class EpochCell:
    """The epoch and position at which the next iteration begins, the same in all workers of a loader.

    Workers start asynchronously: the training process may already have set the next epoch before they run. So a
    worker's first iteration begins at the value that was current when its process was started. Only persistent workers
    have later iterations, and torch does not report when a later iteration begins. The first worker to begin the
    iteration reads the latest value, and the other workers use the same value.

    Attributes:
        num_sets: The number of times that this process set the cell. A loader compares this count to detect that the
            user has set the epoch.
    """

    def __init__(self, cursor: Cursor = _BEGINNING) -> None:
        # The epoch and position of the next iteration, then the numbers of the workers' agreement: see _agree.
        self._numbers = SharedNumbers([cursor.epoch, cursor.position, 0, 0, 0, 0, 0])
        self._own = cursor  # The cursor that was set in this process or, in a worker, before the worker was started.
        self._num_starts = 0
        self.num_sets = 0

    @property
    def next(self) -> Cursor:
        """The start of the next iteration: the latest value, whichever process set it."""
        epoch, position = self._numbers.array[:2].tolist()
        return Cursor(epoch=epoch, position=position)

    def set(self, cursor: Cursor) -> None:
        """Set the start of the next iteration, for all processes that share the cell."""
        self._numbers.array[:2] = cursor.epoch, cursor.position
        self._own = cursor
        self.num_sets += 1

    def start(self, dataset: Any) -> Cursor:
        """Start an iteration over ``dataset``; return the cursor at which it begins."""
        worker = find_worker_over(dataset)
        # A dataset that wraps this one may iterate over it any number of times per epoch.
        if worker is None:
            return self.next
        self._num_starts += 1
        if self._num_starts == 1:
            return self._own
        return self._agree(worker.loader_seed, worker.num_workers)

    def _agree(self, loader: int, num_workers: int) -> Cursor:
        # All workers of a loader get the value that is current when the first of them asks. Another loader may have
        # the same seed, so an agreement ends after num_workers requests.
        with self._numbers.locked():
            known_loader, known_start, epoch, position, num_to_come = self._numbers.array[2:].tolist()
            if not num_to_come or (known_loader, known_start) != (loader, self._num_starts):
                epoch, position = self._numbers.array[:2].tolist()
                num_to_come = num_workers
            self._numbers.array[2:] = loader, self._num_starts, epoch, position, num_to_come - 1
        return Cursor(epoch=epoch, position=position)

    def __deepcopy__(self, memo: dict[int, Any]) -> EpochCell:
        copied = EpochCell(self.next)
        copied.num_sets = self.num_sets  # A copied loader must not treat the epoch as newly set.
        return copied


def known_epoch(seed: int, epoch: int) -> AbstractContextManager[tuple[int, int]]:
    """Use this seed and epoch for samples that are read in the block, even through wrapper datasets.

    shardio.DataLoader sends the seed and the epoch with the indices, so two loaders over one dataset do not interfere.
    """
    return set_in_block(_LOADERS_EPOCH, (seed, epoch))


class MapEpoch:
    """The seed and epoch of a map-style dataset, if the user set them. Worker processes share them."""

    def __init__(self) -> None:
        self._cell = SharedNumbers([False, 0, 0])

    def set(self, epoch: int, seed: int) -> None:
        """Make rng keys a function of (seed, epoch, sample)."""
        self._cell.array[:] = True, seed, epoch

    @property
    def known(self) -> tuple[int, int] | None:
        """The seed and epoch, if the user set them."""
        is_set, seed, epoch = self._cell.values
        return (seed, epoch) if is_set else None

    def rng_keys(self, indices: NDArray[np.int64]) -> Words:
        """Return an rng key for each sample, uint64 [n], from torch's generator if the epoch is not known."""
        known = _LOADERS_EPOCH.get() or self.known
        return rng_keys_from_torch(len(indices)) if known is None else augment_rng_keys(*known, indices)


def follow_classes(
    packed: Sequence[str], classes: Classes | None, decoder: FieldDecoder, where: str
) -> tuple[tuple[str, ...], FieldDecoder]:
    """Return a dataset's class names, by label, and a decoder that returns those labels. The stored data is unchanged.

    Args:
        packed: The class names, by stored label.
        classes: The class names to follow instead, or None.
        decoder: The dataset's decoder.
        where: The dataset's source, for messages.

    Raises:
        TypeError: If ``classes`` is neither a list of names nor a dataset that has them.
        ValueError: If the dataset has no class names, or has a class that is not in ``classes``.
    """
    if classes is None:
        return tuple(packed), decoder
    names = check_classes(classes)
    if not packed:
        raise ValueError(
            f"{where} has no class names, so classes= cannot be applied: omit it, or pack the images "
            "from class folders (shardio pack IMAGES OUT)"
        )
    labels = tuple(number_classes(packed, names, where).values())
    return names, replace(decoder, labels=None if labels == tuple(range(len(labels))) else labels)


SHARED = (EpochCell, MapEpoch, SharedNumbers)
"""The types of attributes whose changes are visible in worker processes."""


class Copied:
    """A dataset whose epoch and transform do not change when those of a copy are set."""

    def __copy__(self: Self) -> Self:
        copied = object.__new__(type(self))
        own = {name: deepcopy(value) for name, value in self.__dict__.items() if isinstance(value, SHARED)}
        copied.__dict__.update({**self.__dict__, **own})
        return copied


class Transformed(Copied):
    """A dataset whose transform can be read and set.

    Attributes:
        decoder: The decoder of the stored fields.
    """

    def __init__(self, decoder: FieldDecoder) -> None:
        self.decoder = decoder
        self._num_sets = 0
        self._shared_num_sets = SharedNumbers([0])  # Workers compare this count to detect an outdated transform.

    @property
    def transform(self) -> Transform | None:
        """The transform of the images; it can be set before an iteration, not during one."""
        return self.decoder.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self.decoder = replace(self.decoder, transform=transform)
        self._num_sets += 1
        self._shared_num_sets.array[:] = self._num_sets

    @property
    def target_transform(self) -> None:
        """Always None: labels are not transformed. Override ``__getitem__`` to change labels."""
        return

    @property
    def fields(self) -> Fields:
        """The fields of a sample. Like all settings except ``transform``, the fields are fixed at construction."""
        return self.decoder.fields

    @property
    def decode(self) -> Decode:
        """The type of image that transforms receive: arrays or Pillow images."""
        return self.decoder.decode

    @property
    def orientation(self) -> Orientation:
        """Whether the EXIF orientation is applied."""
        return self.decoder.orientation

    @property
    def max_pixels(self) -> int:
        """The maximum number of pixels in an image; a larger image raises an error."""
        return self.decoder.max_pixels

    @property
    def trusted(self) -> bool:
        """Whether fields may be unpickled."""
        return self.decoder.trusted

    @property
    def seed_transforms(self) -> bool:
        """Whether samples' rng keys seed the generators of your own transforms."""
        return self.decoder.seed_transforms

    def remote_samples(self) -> RemoteSamples | None:
        """Return the samples to read ahead; None if the samples are local."""
        return None

    def follow(self, other: Transformed) -> None:
        """Take over the transform of another dataset, so that ``check_transform`` detects a later change there."""
        self.decoder, self._num_sets, self._shared_num_sets = other.decoder, other._num_sets, other._shared_num_sets

    def check_transform(self) -> None:
        """Raise RuntimeError if the transform was set after this copy was made for a worker process."""
        if self._shared_num_sets.array[0] != self._num_sets:
            raise RuntimeError(TOO_LATE)


class RaggedTensor(torch.Tensor):
    """A tensor whose length differs between samples: a batch holds a list of tensors, even if all are equally long.

    Operations return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in torch.nn.Parameter


def decode_samples(
    decoder: FieldDecoder, stored: StoredSamples, rng_keys: Words, calls: Calls | None = None
) -> list[Any]:
    """Return the samples that a dataset yields, decoded from stored ones.

    Each sample is a tuple of values, or a bare value. Images are uint8 tensors [3, height, width], or tuples of such
    tensors for a MultiCrop. Fields that follow the images in a Compose are also tensors: a mask [height, width], or a
    RaggedTensor of boxes, labels or points. ``transform_sample`` may return anything else.

    Args:
        decoder: The decoder.
        stored: n samples.
        rng_keys: uint64 [n], one for each sample's random transforms.
        calls: The object that calls and times user code; by default, a new one.

    Raises:
        SampleError: If a field is missing or cannot be decoded.
    """
    calls = calls or decoder.make_calls()
    columns = decoder.decode_columns(stored, rng_keys, calls)
    if decoder.transform_sample is not None:
        return list(map(_convert_images, decoder.transform_samples(columns, stored, rng_keys, calls)))
    followers = [(each.name, each.entry) for each in decoder.followers]
    for index, name in enumerate(decoder.names):
        if (name, None) in followers:
            columns[index] = list(map(_as_follower, columns[index]))
        elif entries := [entry for parent, entry in followers if parent == name]:
            columns[index] = [_convert_entries(value, entries) for value in columns[index]]
        elif holds_images(name):
            columns[index] = list(map(as_tensor, columns[index]))
    return list(columns[0]) if isinstance(decoder.fields, str) else list(zip(*columns, strict=True))


def mark_valid(sample: Any, is_valid: bool) -> Any:
    """Return a sample with its mark, which is false for a repeat: see :func:`add_value`."""
    return add_value(sample, "valid", is_valid)


def add_value(sample: Any, name: str, value: Any) -> Any:
    """Return a sample with a value added: last in a tuple, or under ``name`` in a dict. A bare value becomes a pair."""
    if isinstance(sample, dict):
        return {**sample, name: value}
    return (*sample, value) if isinstance(sample, tuple) else (sample, value)


def _as_follower(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(np.require(value, requirements=["C", "W"]).view(np.ndarray))
    return tensor.as_subclass(RaggedTensor) if isinstance(value, Ragged) else tensor


def _convert_entries(value: Any, entries: Sequence[str | None]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _as_follower(each) if name in entries else each for name, each in value.items()}


def _convert_images(value: Any) -> Any:
    if is_image_array(value):
        return as_tensor(value)
    if type(value) is dict:
        return {name: _convert_images(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_convert_images, value))
    return value


def as_tensor(image: Any) -> Any:
    """Return pixels, including those in a tuple, as tensors that share their memory; return anything else unchanged.

    Pixels are uint8 arrays [height, width, channels]. timm's arrays, [1 to 4, height, width], stay arrays.
    """
    if isinstance(image, tuple):
        return tuple(map(as_tensor, image))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        if image.shape[0] <= MAX_CHANNELS < image.shape[2]:
            return image
        return torch.from_numpy(image).permute(2, 0, 1)
    return image
