"""StreamDataset: the samples of tars that can only be read forwards, such as the output of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from shardio.bad_samples import read_around
from shardio.classes import Classes, check_classes
from shardio.datasets.epoch_cell import EpochCell
from shardio.datasets.ranked import Ranked
from shardio.datasets.samples import decode_samples
from shardio.datasets.stream_iterator import StreamItem, StreamIterator
from shardio.datasets.transformed import Transformed
from shardio.decoding import Decode, FieldDecoder, Fields, Missing
from shardio.images import DEFAULT_MAX_PIXELS, Orientation
from shardio.order import Cursor, StreamOrder, Words, check_epoch
from shardio.reading import StoredSamples
from shardio.streams import ShardStream, StreamNames, StreamPlace, find_streams
from shardio.torch_modes import own_tensors
from shardio.values import check_flag, check_integer, check_seconds
from shardio.world import CarriedWorld

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


_REMEDY = (
    ". If the tar was made without tar --sort=name, the members of a sample may not be adjacent, and the field may "
    "come later: index the tar (shardio index) and read it with ShardDataset"
)


class StreamDataset(Ranked, Transformed, IterableDataset[Any]):
    """An iterable-style dataset over tars that are read as streams: forwards, without an index.

    Use it for the output of commands (``pipe:``), for servers that answer no range requests, and for tars that you may
    not index. :class:`shardio.ShardDataset` is better wherever it can be used: its order is a shuffle of single
    samples, all ranks get the same number of them, and a state fits any number of ranks and workers.

    In an epoch, exactly one worker of one rank reads each tar, from its beginning to its end. So use at least as many
    tars as there are workers on all ranks, preferably several times as many, of equal sizes.

    **The ranks get different numbers of samples**, because the sizes of the tars are unknown. A training loop that
    synchronises its ranks must end the epoch after the same number of batches on all of them, such as
    ``itertools.islice(loader, num_batches)``, or use torch's ``Join``. To get equal ranks, index the tars (``shardio
    index``) or pack them, and use ShardDataset.

    A stream cannot gather the members of a sample that are not adjacent in the tar, as after ``tar`` without
    ``--sort=name``. If some follow after other samples, an error says so. ShardDataset reads such tars.

    If a stream fails, it is opened again, and the samples that were already delivered are skipped. A command fails if
    its exit status is not 0, a tar if it has no end.

    >>> dataset = StreamDataset("pipe:aws s3 cp s3://bucket/{000000..000099}.tar -", shuffle=True)  # doctest: +SKIP
    >>> loader = DataLoader(dataset, batch_size=128, num_workers=4)  # doctest: +SKIP

    Args:
        source: A command, URL or path of a tar, a brace pattern of these, or a list of them. Commands and the URLs that
            WebDataset knows (``https://``, ``gs://``, …) need WebDataset: ``pip install
            'shardio-loader[webdataset]'``. Tars may be compressed with gzip. Commands are run by the shell: pass only
            those that you trust.
        fields: The fields of a sample: see :class:`shardio.ShardDataset`.
        shuffle: Whether to shuffle the tars and, in each worker, neighbouring samples, differently in each epoch. Call
            ``set_epoch`` before each epoch.
        seed: The seed of the order and of the transforms.
        buffer: With ``shuffle``, the number of samples that a worker reads and shuffles together. It holds as many
            undecoded samples in memory.
        transform: A callable applied to each image, or a ``Compose`` with ``fields``, applied to several fields alike.
        decode: ``array`` or ``pil``: what the transform gets.
        orientation: ``apply`` honours the EXIF orientation; ``ignore``, the default, does not.
        max_pixels: The maximum number of pixels in an image; a larger image is an error.
        rank: The rank of this process; by default, that of torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun.
        mesh: An alternative to ``rank`` and ``world_size``: a DeviceMesh with one dimension.
        group: Another alternative: a process group whose ranks read different samples.
        trusted: Whether pickled fields may be unpickled, which can run arbitrary code.
        classes: Class names by label, or another dataset that has them, for the attribute ``classes``. Tars have no
            class names, so the labels stay as they are stored.
        seed_transforms: Whether a sample's rng key seeds the global generators before your own transforms get it.
        transform_sample: A callable applied to each whole sample.
        decoders: Your own decoders: a function from bytes to the value, for each field that shardio shall not decode.
        missing: What happens if a sample lacks a field other than the image: ``error``, or None as its value.
        retries: How often a failed stream is opened again in a row without a further sample. Waits between the
            attempts are random, grow exponentially, and take up to 20 s.
        timeout_s: How long to wait for the next bytes of a command, in seconds, before it counts as failed.

    Attributes:
        sources: Where the streams come from. Their text shows no secrets.
        digest: The identity of the list of streams. It does not depend on their contents.

    Raises:
        FileNotFoundError: If a local tar does not exist.
        FormatError: If a stream is named twice.
        ImportError: If WebDataset is needed, and is not installed.
        ValueError: If an argument is out of range.
        TypeError: If the transform is not callable, or takes arrays but ``decode`` is ``pil``.
    """

    def __init__(
        self,
        source: StreamNames,
        *,
        fields: Fields = ("image", "label"),
        shuffle: bool = False,
        seed: int = 0,
        buffer: int = 1000,
        transform: Callable[[Any], Any] | None = None,
        decode: Decode = "array",
        orientation: Orientation = "ignore",
        max_pixels: int = DEFAULT_MAX_PIXELS,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        trusted: bool = False,
        classes: Classes | None = None,
        seed_transforms: bool = True,
        transform_sample: Callable[[dict[str, Any]], Any] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
        missing: Missing = "error",
        retries: int = 10,
        timeout_s: float = 300.0,
    ) -> None:
        Ranked.__init__(self, rank=rank, world_size=world_size, mesh=mesh, group=group)
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
        Transformed.__init__(self, decoder)
        self.classes = [] if classes is None else list(check_classes(classes))
        self.shuffle = check_flag("shuffle", shuffle)
        self.seed = check_integer("seed", seed, at_least=0, below=2**64)
        self.buffer = check_integer("buffer", buffer, at_least=1)
        self.retries = check_integer("retries", retries, at_least=0)
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self.sources = find_streams(source)
        self.digest = xxhash.xxh3_128_hexdigest("\n".join(map(str, self.sources)).encode(errors="surrogateescape"))
        self._cell = EpochCell()

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._cell.next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in this process and in running workers.

        An iteration that has begun keeps its epoch. One that resumes from a state has the epoch of the state.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If it is negative, or not below 2**62.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        self.check_split_once()
        self._cell.set(Cursor(epoch=check_epoch(epoch)))

    def __iter__(self) -> StreamIterator:
        """Iterate over the samples of this worker's tars.

        Raises:
            ValueError: If there are fewer tars than ranks.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        if self.world_size > len(self.sources):
            raise ValueError(
                f"{len(self.sources)} tars cannot be dealt to {self.world_size} ranks, because each tar is read by one "
                "of them: write more, smaller tars, or index them (shardio index) and use ShardDataset"
            )
        return StreamIterator(self, self._cell.start(self).epoch)

    def open_shard(self, shard: int, place: StreamPlace) -> ShardStream:
        """Return the stream of a tar from a place on."""
        return ShardStream(
            self.sources[shard], self.decoder.stored_fields, place, retries=self.retries, timeout_s=self.timeout_s
        )

    def decode_items(self, items: Sequence[StreamItem], epoch: int, order: StreamOrder) -> list[Any]:
        """Return the values of samples that were read; Broken for those that cannot be decoded."""
        shards = np.array([item.shard for item in items], dtype=np.int64)
        numbers = np.array([item.before.num_samples for item in items], dtype=np.int64)
        rng_keys = order.rng_keys(epoch, shards, numbers)

        def decode(rows: NDArray[np.int64], rng_keys: Words) -> list[Any]:
            return self._decode([items[row] for row in rows.tolist()], rng_keys)

        rows = np.arange(len(items))
        return read_around(None, decode, rows, rng_keys, rng_keys, epoch=epoch, describe=None, keeps_broken=True)

    def _decode(self, items: Sequence[StreamItem], rng_keys: Words) -> list[Any]:
        def describe(row: int, _: Sequence[str]) -> tuple[str, str]:
            item = items[row]
            return item.sample.key, f"{self.sources[item.shard]} at byte {item.sample.offset}"

        self.check_transform()
        samples = [item.sample for item in items]
        stored = StoredSamples(
            {field: [each.contents.get(field) for each in samples] for field in self.decoder.stored_fields},
            len(items),
            describe=describe,
            list_keys=lambda: [each.key for each in samples],
            remedy=_REMEDY,
        )
        with own_tensors():
            return decode_samples(self.decoder, stored, rng_keys)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled copy may go to a worker process, which sees neither torch.distributed nor the callers here.
        self.check_split_once()
        return {**self.__dict__, "_carried_world": CarriedWorld.find()}
