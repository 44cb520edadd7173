"""ShardDataset: the samples of packed shards, each exactly once per epoch, in a reproducible order."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from shardio.bad_samples import BadSamples, Broken, Skipped, read_around
from shardio.datasets.ordered import Ordered, SampleIterator, read_ahead, warn_of_other_length
from shardio.datasets.samples import EpochCell, Transformed, decode_samples, follow_classes, mark_valid
from shardio.decoding import Decode, FieldDecoder, Fields, Missing
from shardio.images import DEFAULT_MAX_PIXELS, Orientation
from shardio.libraries import own_tensors
from shardio.order import (
    Cursor,
    EpochOrder,
    Remainder,
    Split,
    Words,
    augment_rng_keys,
    check_epoch,
    choose_settings,
    iterate_steps,
)
from shardio.reading import RemoteSamples, SampleReader, Verify, find_remote_shards, read_nothing_ahead
from shardio.sample import Classes
from shardio.shards import DatasetSource, open_table
from shardio.storage import StorageOptions, make_access
from shardio.world import CarriedWorld, World, find_worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class ShardDataset(Ordered, Transformed, IterableDataset[Any]):
    """An iterable-style dataset over the samples of packed shards.

    In an epoch, all ranks and workers together deliver each sample exactly once, apart from those that ``remainder``
    repeats or leaves out. This holds for any number of shards, in torch's DataLoader and in shardio's. A subclass that
    overrides ``__iter__`` must yield one value for each sample of ``super().__iter__()``, in that order.

    >>> dataset = ShardDataset("out", shuffle=True, transform=RandomResizedCrop(224))  # doctest: +SKIP
    >>> loader = DataLoader(dataset, batch_size=128, num_workers=2)  # doctest: +SKIP

    Args:
        source: A packed directory, its manifest, a directory of tars, a tar, a brace pattern such as
            ``shard-{000000..000012}.tar``, or a list of tars and patterns.
        fields: The fields of a sample, in the order of its tuple: ``image`` (uint8 tensor [3, height, width]),
            ``label`` (int), ``key`` (str), or a field by its extension: ``json``, ``txt``, ``cls``, ``npy``, ``npz``,
            ``safetensors`` and ``msgpack`` are decoded (``npz`` and ``safetensors`` to dicts of arrays), also as the
            last of several extensions, and so are pickles with ``trusted=True``. ``jpg``, ``png``, ``webp``, ``bmp``,
            ``ppm``, ``pgm`` and ``tiff`` become exactly what the file stores, or an error: [height, width] of indices
            or grey values of any type, for masks and depth maps; uint8 tensors [3, height, width] for colours of 8
            bits, and arrays [height, width, 3] of their type for other colours. All others are bytes. A single name
            instead of a tuple yields the bare value.
        shuffle: Whether to shuffle, differently in each epoch. With torch's DataLoader, call ``set_epoch`` before each
            epoch.
        seed: The seed of the order and of the transforms.
        transform: A callable applied to each image, or a ``Compose`` with ``fields``, applied to several fields in the
            same way.
        decode: ``array`` passes uint8 [height, width, 3] arrays to the transform, but Pillow images to torchvision and
            timm pipelines that convert Pillow images; ``pil`` always passes Pillow images.
        orientation: ``apply`` honours the EXIF orientation; ``ignore``, the default, does not.
        max_pixels: The maximum number of pixels in an image; a larger image is an error, because a small file can
            hold a huge image.
        remainder: The treatment of the last samples if they do not fill a batch on every rank. ``pad`` repeats some
            samples: all ranks then have the same number. ``mask`` does the same, and adds a last value ``valid``,
            which is false for repeats. ``keep`` gives some ranks one more sample. ``drop`` leaves the samples out.
        batch_size: The batch size of torch's DataLoader. Set it to get the same batches as from shardio.DataLoader,
            which uses its own batch size.
        rank: The rank of this process; by default, that of torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun.
        mesh: An alternative to ``rank`` and ``world_size``: a DeviceMesh with one dimension, such as ``mesh["dp"]``,
            whose ranks read different samples. If a mesh with several dimensions exists, as with tensor parallelism,
            ``mesh`` or ``group`` is required.
        group: Another alternative: a process group whose ranks read different samples.
        lanes: With ``shuffle``, the number of lanes: the shuffled shards, laid end to end, are cut into this many
            equal parts, and consecutive samples come from each part in turn.
        window: With ``shuffle``, the number of neighbouring samples that are shuffled together.
        trusted: Whether pickled fields may be unpickled, which can run arbitrary code.
        classes: Class names, or another dataset that has them: labels follow this list instead of the dataset's own.
        verify: ``first`` compares each sample's tar header and content with the index when a process first reads
            it; ``off`` compares nothing.
        seed_transforms: Whether a sample's rng key seeds the global generators of torch, numpy and Python, and those of
            Albumentations, before your own transforms get its image. They then draw the same random numbers for it on
            any number of workers, and after a resumption.
        transform_sample: A callable applied to each whole sample: it gets a dict of the values by field, images as
            arrays (or Pillow images, with ``decode="pil"`` and no ``transform``), and returns the sample. uint8 arrays
            [height, width, 3] in its result, also within dicts, lists and tuples, become tensors [3, height, width].
            Albumentations' transforms get the values as keyword arguments.
        decoders: Your own decoders: a function from bytes to the value, for each field that shardio shall not decode.
        missing: The treatment of a sample that lacks a field other than the image: ``error``, or None as its value.
        storage_options: Settings of the store of a remote source, such as ``endpoint``, ``region``, ``profile``,
            ``retries`` or ``timeout_s``. By default, they come from the environment, as for the store's own tools.
        cache: For a remote source, a local folder in which processes and jobs of this machine keep the bytes that they
            have read; by default, a temporary one, which is removed at the end.
        cache_size: The size of the cache, such as ``200GB``; by default, a fifth of the free space, and at most 32 GiB
            if ``cache`` is not given.
        cache_shared: Whether to share the folder ``cache`` with other users, and to trust copies that they wrote.
            Otherwise, only this user and root may be able to write to it.

    Raises:
        FileNotFoundError: If ``source`` does not exist.
        FormatError: If ``source`` is not a dataset.
        ValueError: If an argument is out of range, if no sample has a requested field, or if ``classes`` is given
            and the dataset has no classes or has a class that is not in ``classes``.
        TypeError: If the transform is not callable, or takes arrays but ``decode`` is ``pil``.
    """

    def __init__(
        self,
        source: DatasetSource,
        *,
        fields: Fields = ("image", "label"),
        shuffle: bool = False,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
        decode: Decode = "array",
        orientation: Orientation = "ignore",
        max_pixels: int = DEFAULT_MAX_PIXELS,
        remainder: Remainder = "pad",
        batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        lanes: int | None = None,
        window: int | None = None,
        trusted: bool = False,
        classes: Classes | None = None,
        verify: Verify = "first",
        seed_transforms: bool = True,
        transform_sample: Callable[[dict[str, Any]], Any] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        missing: Missing = "error",
        storage_options: StorageOptions | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_size: str | int | None = None,
        cache_shared: bool = False,
    ) -> None:
        super().__init__(
            remainder=remainder, batch_size=batch_size, rank=rank, world_size=world_size, mesh=mesh, group=group
        )
        decoder = FieldDecoder(
            fields=fields,
            transform=transform,
            decode=decode,
            orientation=orientation,
            max_pixels=max_pixels,
            trusted=trusted,
            seed_transforms=seed_transforms,
            transform_sample=transform_sample,
            decoders=dict(decoders or {}),
            missing=missing,
        )
        self.table = open_table(source, make_access(storage_options, cache, cache_size, cache_shared))
        decoder.check_fields(self.table.manifest.fields, str(source))
        self._classes, decoder = follow_classes(self.table.manifest.classes, classes, decoder, str(source))
        Transformed.__init__(self, decoder)
        self.shard_sizes = self.table.manifest.shard_sizes
        self.num_all_samples = int(self.shard_sizes.sum())
        self.digest = self.table.manifest.digest
        self.settings = choose_settings(self.shard_sizes, shuffle=shuffle, seed=seed, lanes=lanes, window=window)
        self._verify: Verify = verify
        self.reader = SampleReader(self.table, verify)
        self._cell = EpochCell()
        self._bad_samples: BadSamples | None = None
        self._keeps_broken = False

    @property
    def classes(self) -> list[str]:
        """The class names, by label."""
        return list(self._classes)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._cell.next.epoch

    @property
    def num_epoch_sets(self) -> int:
        """The number of times that the epoch was set. A loader compares this count to detect a call by the user."""
        return self._cell.num_sets

    @property
    def verify(self) -> Verify:
        """The setting that says when samples are compared with the index."""
        return self._verify

    @property
    def overrides_iteration(self) -> bool:
        """Whether a subclass overrides ``__iter__``."""
        return type(self).__iter__ is not ShardDataset.__iter__

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in this process and in running workers.

        Call this before ``iter(loader)``: an iteration that has begun keeps its epoch in all workers. If another
        dataset iterates over this one in torch's workers, each worker reads the epoch when it begins to iterate.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If it is negative, or not below 2**62.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        self.check_split_once()
        self._cell.set(Cursor(epoch=check_epoch(epoch)))

    def locate(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return samples in the form that the reader takes: their indices."""
        return indices

    def describe(self, index: int) -> tuple[str, str]:
        """Return a sample's key and location, for messages."""
        return self.reader.describe(index, self.decoder.stored_fields)

    def __len__(self) -> int:
        """Return the number of samples that this rank yields in a full epoch.

        If torch's DataLoader calls this but will make a different number of batches, a RuntimeWarning says so.
        """
        split = self.own_split(Cursor(epoch=0))
        warn_of_other_length(self, split)
        return split.num_own_samples

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's samples in this rank's share of the epoch.

        Raises:
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        cursor = self._cell.start(self)  # Now, not when the first sample is requested.
        if self._keeps_broken:
            return self._samples(cursor, self.own_split(cursor), num_left_out=0)
        return SampleIterator(self, cursor, self._samples)

    def start_at(self, cursor: Cursor) -> None:
        """Begin the next iteration at ``cursor``, in this process and in running workers."""
        self._cell.set(cursor)

    def bound(self, split: Split, bad_samples: BadSamples | None) -> ShardDataset:
        """Return a copy for one loader, with the batch size and world of ``split`` and with its own epoch.

        It yields Broken for samples that cannot be made, unless a subclass overrides ``__iter__``.

        Args:
            split: The loader's share.
            bad_samples: The policy for unreadable samples; those that it leaves out are yielded as Skipped.
        """
        dataset = copy.copy(self)
        dataset._shared_num_sets = self._shared_num_sets  # The copy must notice a transform that is set later.
        dataset.batch_size, dataset.remainder = split.batch_size, split.remainder
        dataset._world = World(rank=split.rank, world_size=split.world_size)
        dataset.reader = SampleReader(self.table, self._verify)
        dataset._cell = EpochCell()
        dataset._bad_samples, dataset._keeps_broken = bad_samples, not self.overrides_iteration
        return dataset

    def _samples(self, cursor: Cursor, split: Split, num_left_out: int) -> Iterator[Any]:
        worker = find_worker()
        order = EpochOrder(self.shard_sizes, self.settings, cursor.epoch)
        num_steps, num_in_step = divmod(num_left_out, split.batch_size)  # Only the last step may be shorter.
        steps = range(worker.worker_id, split.num_batches, worker.num_workers)[num_steps:]
        with self._read_ahead(cursor, split) as advance, closing(self.reader):
            for positions, indices in iterate_steps(order, split, steps):
                indices = indices[num_in_step:]
                valid = (np.concatenate(positions)[num_in_step:] < self.num_all_samples).tolist()
                num_in_step = 0
                for start in range(0, len(indices), self.decoder.chunk_size):
                    chunk = slice(start, start + self.decoder.chunk_size)
                    advance(len(indices[chunk]) * worker.num_workers)
                    rng_keys = augment_rng_keys(self.settings.seed, cursor.epoch, indices[chunk])
                    values = read_around(
                        self._bad_samples,
                        self._read,
                        indices[chunk],
                        rng_keys,
                        rng_keys,
                        epoch=cursor.epoch,
                        describe=self.describe,
                        keeps_broken=True,
                    )
                    for value, is_valid in zip(values, valid[chunk], strict=True):
                        is_marked = self.remainder == "mask" and not isinstance(value, Skipped | Broken)
                        yield mark_valid(value, is_valid) if is_marked else value

    def _read_ahead(self, cursor: Cursor, split: Split) -> AbstractContextManager[Callable[[int], object]]:
        """Return a context in which the first worker reads ahead for all workers of the rank."""
        return read_nothing_ahead() if find_worker().worker_id else read_ahead(self, self, cursor, split)

    def remote_samples(self) -> RemoteSamples | None:
        return find_remote_shards(self.table, self.decoder.stored_fields)

    def _read(self, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        self.check_transform()
        with own_tensors():
            stored = self.reader.read(indices, self.decoder.stored_fields)
            return decode_samples(self.decoder, stored, rng_keys)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled copy may go to a worker process, which sees neither torch.distributed nor the callers here.
        self.check_split_once()
        return {**self.__dict__, "_carried_world": CarriedWorld.find()}
