"""ShardMapDataset: the samples of packed shards by index."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from shardio.classes import Classes
from shardio.datasets.labels import follow_classes
from shardio.datasets.map_dataset import MapDataset
from shardio.decoding import Decode, FieldDecoder, Fields, Missing
from shardio.images import DEFAULT_MAX_PIXELS, Orientation
from shardio.reading import RemoteSamples, SampleReader, Verify, find_remote_shards
from shardio.shards import DatasetSource, open_table
from shardio.storage import StorageOptions, make_access


class ShardMapDataset(MapDataset):
    """A map-style dataset over the samples of packed shards, in manifest order.

    As with any map-style dataset, the sampler decides which samples a rank gets, and in which order:
    :class:`shardio.EpochSampler` provides shardio's order. The arguments mean the same as in
    :class:`shardio.ShardDataset`.

    Args:
        source: A packed directory, its manifest, a directory of tars, a tar, a brace pattern, or a list of tars and
            patterns.
        fields: The fields of a sample: a tuple of names, or one name for bare values.
        transform: A callable applied to each image, or a ``Compose`` with ``fields``, applied to several fields alike.
        decode: ``array`` passes uint8 [height, width, 3] arrays to the transform, but Pillow images to pipelines of
            torchvision's and timm's that convert these; ``pil`` always passes Pillow images.
        orientation: ``apply`` honours the EXIF orientation; ``ignore``, the default, does not.
        max_pixels: The maximum number of pixels in an image.
        trusted: Whether pickled fields may be unpickled, which can run arbitrary code.
        classes: Class names, or another dataset that has them: labels follow this list instead of the dataset's own.
        verify: When to compare samples with the index: ``first`` or ``off``.
        seed_transforms: Whether a sample's rng key seeds the global generators of torch, numpy and Python, and those of
            Albumentations, before your own transforms get its image. They then draw the same random numbers for it on
            any number of workers, and after a resumption.
        transform_sample: A callable applied to each whole sample: it gets a dict of the values by field, images as
            arrays (or Pillow images, with ``decode="pil"`` and no ``transform``), and returns the sample. uint8 arrays
            [height, width, 3] in what it returns, also in dicts, lists and tuples, become tensors [3, height, width].
            Albumentations' transforms get the values as keyword arguments.
        decoders: Your own decoders: a function from bytes to the value, for each field that shardio shall not decode.
        missing: What happens if a sample lacks a field other than the image: ``error``, or None as its value.
        storage_options: Settings of the store of a remote source, such as ``endpoint``, ``region``, ``profile``,
            ``retries`` or ``timeout_s``. By default, they come from the environment, as for the store's own tools.
        cache: For a remote source, a local folder in which processes and jobs of this machine keep what they have read;
            by default, a temporary one, which is removed at the end.
        cache_size: The size of the cache, such as ``200GB``; by default, a fifth of the free space, and at most 32 GiB
            if ``cache`` is not given.
        cache_shared: Whether other users share the folder ``cache``, so that copies that they wrote are believed.
            Otherwise, only this user and root may be able to write to it.

    Raises:
        FileNotFoundError: If ``source`` does not exist.
        FormatError: If ``source`` is not a dataset.
        ValueError: If no sample has a requested field, or if ``classes`` is given and the dataset has no classes or has
            a class that is not in ``classes``.
        TypeError: If the transform is not callable, or takes arrays but ``decode`` is ``pil``.
    """

    def __init__(
        self,
        source: DatasetSource,
        *,
        fields: Fields = ("image", "label"),
        transform: Callable[[Any], Any] | None = None,
        decode: Decode = "array",
        orientation: Orientation = "ignore",
        max_pixels: int = DEFAULT_MAX_PIXELS,
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
        self.shard_sizes = self.table.manifest.shard_sizes
        self.digest = self.table.manifest.digest
        super().__init__(decoder, SampleReader(self.table, verify))

    @property
    def classes(self) -> list[str]:
        """The class names, by label."""
        return list(self._classes)

    def remote_samples(self) -> RemoteSamples | None:
        return find_remote_shards(self.table, self.decoder.stored_fields)

    def __len__(self) -> int:
        return int(self.shard_sizes.sum())
