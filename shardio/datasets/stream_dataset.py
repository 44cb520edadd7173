"""StreamDataset: the samples of tars that can only be read sequentially, such as the output of commands."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.bad_samples import read_around
from shardio.datasets.ranked import Iterated, Ranked, RankSettings, TolerantIterator
from shardio.datasets.samples import FieldedSettings, Transformed, decode_samples, takes
from shardio.epochs import MAX_EPOCH
from shardio.errors import StateError
from shardio.libraries import own_tensors
from shardio.order import StreamOrder, Words, find_differences
from shardio.process import describe_error
from shardio.reading import StoredSamples
from shardio.sample import check_classes
from shardio.shards.tar_scan import StreamedSample
from shardio.streams import ShardStream, StreamNames, StreamPlace, find_streams
from shardio.values import check_flag, check_integer, check_seconds, count
from shardio.world import find_worker

STATE_VERSION = 1
"""The version of the state's format and of the order. A state is valid only for the order in which it was saved."""

_REMEDY = (
    ". If the tar was made without tar --sort=name, the members of a sample may not be adjacent, and the field may "
    "come later: index the tar (shardio index) and read it with ShardDataset"
)


@dataclass(frozen=True, kw_only=True)
class StreamSettings(RankSettings, FieldedSettings):
    """The arguments of StreamDataset.

    Attributes:
        source: A command, URL or path of a tar, a brace pattern of these, or a list of them. Commands and the URLs that
            WebDataset supports (``https://``, ``gs://``, …) require WebDataset: ``pip install
            'shardio-loader[webdataset]'``. Tars may be compressed with gzip. The shell runs commands: pass only those
            that you trust.
        shuffle: Whether to shuffle the tars and, in each worker, neighboring samples, differently in each epoch. Call
            ``set_epoch`` before each epoch.
        seed: The seed of the order and of the transforms.
        buffer: With ``shuffle``, the number of samples that a worker reads and shuffles together. The worker holds this
            many undecoded samples in memory.
        classes: Class names by label, or another dataset that has them, for the attribute ``classes``. Tars have no
            class names, so the labels stay as they are stored.
        retries: The maximum number of consecutive attempts to reopen a failed stream without getting another sample.
            Waits between the attempts are random and grow exponentially, up to 20 s.
        timeout_s: The maximum wait, in seconds, for the next bytes from a command. After this time, the command fails.
    """

    source: StreamNames = field(kw_only=False)
    shuffle: bool = False
    seed: int = 0
    buffer: int = 1000
    retries: int = 10
    timeout_s: float = 300.0


class StreamDataset(Iterated, Transformed):
    """An iterable-style dataset over tars that are read as streams: sequentially, without an index.

    Use it for the output of commands (``pipe:``), for servers that do not support range requests, and for tars that
    you cannot index. Otherwise, prefer :class:`shardio.ShardDataset`: it shuffles individual samples, all ranks get the
    same number of them, and a state fits any number of ranks and workers.

    In an epoch, exactly one worker of one rank reads each tar, from its beginning to its end. So use at least as many
    tars as there are workers on all ranks, preferably several times as many, of equal sizes.

    **The ranks get different numbers of samples**, because the sizes of the tars are unknown. A training loop that
    synchronizes its ranks must end the epoch after the same number of batches on all of them: use
    ``itertools.islice(loader, num_batches)``, for example, or torch's ``Join``. To give all ranks the same number of
    samples, index the tars (``shardio index``) or pack them, and use ShardDataset.

    In a tar made without ``--sort=name``, the members of a sample may not be adjacent. A stream cannot collect
    scattered members: members that follow other samples cause an error. ShardDataset reads such tars.

    If a stream fails, it is opened again, and the samples that have already been delivered are skipped. A command fails
    if its exit status is not 0; a tar fails if its end is missing.

    >>> dataset = StreamDataset("pipe:aws s3 cp s3://bucket/{000000..000099}.tar -", shuffle=True)  # doctest: +SKIP
    >>> loader = DataLoader(dataset, batch_size=128, num_workers=4)  # doctest: +SKIP

    Attributes:
        sources: The sources of the streams. ``str(source)`` contains no secrets.
        digest: The identity of the list of streams, which does not depend on the streams' contents.

    Raises:
        FileNotFoundError: If a local tar does not exist.
        FormatError: If a stream is listed twice.
        ImportError: If WebDataset is required but not installed.
        ValueError: If an argument is out of range.
        TypeError: If the transform is not callable, or requires arrays but ``decode`` is ``pil``.
    """

    @takes(StreamSettings)
    def __init__(self, options: StreamSettings) -> None:
        Ranked.__init__(self, options)
        Iterated.__init__(self)
        Transformed.__init__(self, options.make_decoder())
        self.classes = [] if options.classes is None else list(check_classes(options.classes))
        self.shuffle = check_flag("shuffle", options.shuffle)
        self.seed = check_integer("seed", options.seed, at_least=0, below=2**64)
        self.buffer = check_integer("buffer", options.buffer, at_least=1)
        self.retries = check_integer("retries", options.retries, at_least=0)
        self.timeout_s = check_seconds("timeout_s", options.timeout_s)
        self.sources = find_streams(options.source)
        self.digest = xxhash.xxh3_128_hexdigest("\n".join(map(str, self.sources)).encode(errors="surrogateescape"))

    def __iter__(self) -> StreamIterator:
        """Iterate over the samples of this worker's tars.

        Raises:
            ValueError: If there are fewer tars than ranks.
            RuntimeError: If a framework splits the samples over ranks a second time.
        """
        if self.world_size > len(self.sources):
            raise ValueError(
                f"{count(len(self.sources), 'tar')} cannot be split over {self.world_size} ranks, because each tar "
                "is read by a single rank: write more, smaller tars, or index them (shardio index) and use ShardDataset"
            )
        return StreamIterator(self, self._cell.start(self).epoch)

    def open_shard(self, shard: int, place: StreamPlace) -> ShardStream:
        """Return the stream of a tar, beginning at ``place``."""
        return ShardStream(
            self.sources[shard], self.decoder.stored_fields, place, retries=self.retries, timeout_s=self.timeout_s
        )

    def decode_items(self, items: Sequence[StreamItem], epoch: int, order: StreamOrder) -> list[Any]:
        """Return the values of samples that were read, with a Broken in place of each sample that cannot be decoded."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """A sample that has been read but not yet decoded.

    Attributes:
        turn: The number of the sample's shard in the worker's order.
        shard: The shard's number in the dataset.
        before: The place in the shard where the sample begins.
        sample: The sample.
    """

    turn: int
    shard: int
    before: StreamPlace
    sample: StreamedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """The position of a worker in an epoch.

    Attributes:
        epoch: The epoch.
        turn: The number, in the worker's order, of the shard in which the window begins.
        place: The place in that shard where the window begins.
        window: The window's number.
        num_yielded: The number of samples that were yielded from the window, in the window's order.
        digest: The digest of the window's samples; 0 before the first sample is yielded.
    """

    epoch: int
    turn: int = 0
    place: StreamPlace = StreamPlace()  # noqa: RUF009  # It is frozen.
    window: int = 0
    num_yielded: int = 0
    digest: int = 0


class StreamIterator(TolerantIterator[Any]):
    """An iterator that yields the samples of a worker's streams in an epoch."""

    _position: StreamPosition
    _values: Generator[tuple[Any, StreamPosition], None, None]

    def __init__(self, dataset: StreamDataset, epoch: int) -> None:
        world, worker = dataset.check_split_once(), find_worker()
        order = StreamOrder(
            num_shards=len(dataset.sources),
            seed=dataset.seed,
            shuffle=dataset.shuffle,
            rank=world.rank,
            world_size=world.world_size,
            worker_id=worker.worker_id,
            num_workers=worker.num_workers,
        )
        self._share = _Share(dataset, order)
        self._begin(StreamPosition(epoch=epoch))

    def _take(self) -> Any:
        value, self._position = next(self._values)
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the position: a small JSON-serializable dict that contains no commands."""
        position = self._position
        return {
            "version": STATE_VERSION,
            "epoch": position.epoch,
            **self._share.identity(),
            "place": {
                "turn": position.turn,
                "samples": position.place.num_samples,
                "digest": f"{position.place.digest:016x}",
                "window": position.window,
                "yielded": position.num_yielded,
                "window_digest": f"{position.digest:016x}",
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateError: If the state belongs to a different dataset, order, rank or worker; the message names what
                differs.
        """
        position = _read_state(state, self._share.identity())
        self.close()
        self._begin(position)

    def close(self) -> None:
        """Close the stream that is being read, and end its command. Freeing the iterator has the same effect."""
        self._values.close()

    def _begin(self, position: StreamPosition) -> None:
        self._position, self._cut_short_by = position, None
        # The generator does not refer to this iterator, so the generator is closed as soon as the iterator is freed.
        self._values = self._share.values(position)
        weakref.finalize(self, _close, self._values)  # The finalizer also ends the command when Python exits.


class _Share:
    """A worker's share of the streams.

    Samples are read into a window as large as the dataset's buffer, and yielded in a permuted order. While a window is
    yielded, the next one is read at the same pace, so no batch waits for a whole window.
    """

    def __init__(self, dataset: StreamDataset, order: StreamOrder) -> None:
        self._dataset, self._order = dataset, order

    def identity(self) -> dict[str, dict[str, Any]]:
        """Return the values that must be the same in a state and in this share."""
        dataset, order = self._dataset, self._order
        buffer = dataset.buffer if order.shuffle else None
        return {
            "dataset": {"digest": dataset.digest, "streams": order.num_shards},
            "order": {"seed": order.seed, "shuffle": order.shuffle, "buffer": buffer},
            "share": {name: getattr(order, name) for name in ("rank", "world_size", "worker_id", "num_workers")},
        }

    def values(self, start: StreamPosition) -> Generator[tuple[Any, StreamPosition], None, None]:
        """Yield the values after a position, each with the position that follows it. A Broken value holds an error."""
        dataset, shuffles = self._dataset, self._order.shuffle
        chunk_size = dataset.decoder.chunk_size
        window_size = dataset.buffer if shuffles else chunk_size
        with closing(self._read(start)) as items:
            following = list(islice(items, window_size))
            while following:
                digest = _digest(following)
                if start.num_yielded and digest != start.digest:
                    raise StateError(
                        f"{dataset.sources[following[0].shard]}, or a stream after it, does not have the same samples "
                        "as when the state was saved: restore the tar, or start a new run"
                    )
                window, following = dict(enumerate(following)), []
                rows = self._order.order_window(start.epoch, start.window, len(window)).tolist()
                for row in rows[: start.num_yielded]:
                    del window[row]
                after = start
                for first in range(start.num_yielded, len(rows), chunk_size):
                    # The start of the next window must be known before the last sample of a window is yielded.
                    following += islice(items, min(chunk_size, window_size - len(following)))
                    chunk = [window.pop(row) for row in rows[first : first + chunk_size]]
                    values = dataset.decode_items(chunk, start.epoch, self._order)
                    for row, value in enumerate(values, 1):
                        if shuffles and first + row < len(rows):
                            after = replace(start, num_yielded=first + row, digest=digest)
                        else:
                            after = self._begin_at([*chunk[row:], *following[:1]], start)
                        yield value, after
                following += islice(items, window_size - len(following))
                start = after

    def _begin_at(self, left: list[StreamItem], start: StreamPosition) -> StreamPosition:
        window = start.window + self._order.shuffle
        if not left:
            num_shards = len(self._order.own_shards(start.epoch))
            return StreamPosition(epoch=start.epoch, turn=num_shards, window=window)
        return StreamPosition(epoch=start.epoch, turn=left[0].turn, place=left[0].before, window=window)

    def _read(self, start: StreamPosition) -> Generator[StreamItem, None, None]:
        dataset = self._dataset
        shards, place = self._order.own_shards(start.epoch).tolist(), start.place
        for turn, shard in list(enumerate(shards))[start.turn :]:
            with closing(dataset.open_shard(shard, place)) as stream:
                before = stream.place
                while (sample := stream.next()) is not None:
                    yield StreamItem(turn=turn, shard=shard, before=before, sample=sample)
                    before = stream.place
            place = StreamPlace()


def _close(values: Generator[Any, None, None]) -> None:
    if inspect.getgeneratorstate(values) != inspect.GEN_RUNNING:  # A daemon thread may be running the generator.
        values.close()


def _digest(items: Sequence[StreamItem]) -> int:
    numbers = np.array([(item.turn, item.sample.digest) for item in items], np.uint64)
    return xxhash.xxh3_64_intdigest(numbers.tobytes())


def _read_state(state: Any, identity: dict[str, dict[str, Any]]) -> StreamPosition:
    if not isinstance(state, dict) or not isinstance(place := state.get("place"), dict):
        raise StateError("this is not the state of a StreamDataset's iterator: pass what its state_dict() returned")
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, but this version of shardio reads version "
            f"{STATE_VERSION}: resume with the version of shardio that saved the state"
        )
    if differences := find_differences(state, identity):
        raise StateError(
            f"this state belongs to different streams, a different order or a different share ({differences}): "
            "use the dataset, the settings, and the numbers of ranks and workers that it was saved with"
        )
    try:
        numbers = [check_integer(name, place[name], at_least=0) for name in ("turn", "samples", "window", "yielded")]
        epoch = check_integer("epoch", state["epoch"], at_least=0, below=MAX_EPOCH)
        digest, window_digest = int(place["digest"], 16), int(place["window_digest"], 16)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state of a StreamDataset's iterator is damaged: {describe_error(error)}") from error
    turn, num_samples, window, num_yielded = numbers
    stream_place = StreamPlace(num_samples=num_samples, digest=digest)
    return StreamPosition(
        epoch=epoch, turn=turn, place=stream_place, window=window, num_yielded=num_yielded, digest=window_digest
    )
