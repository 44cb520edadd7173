"""One iteration over a worker's streams, with a state for shardio's loader and torchdata's StatefulDataLoader."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shardio.bad_samples import Broken
from shardio.epochs import MAX_EPOCH
from shardio.errors import StateError
from shardio.interruptions import cut_short, describe_error
from shardio.order import StreamOrder
from shardio.shards.streamed import StreamedSample
from shardio.streams import StreamPlace
from shardio.values import check_integer
from shardio.world import find_worker

if TYPE_CHECKING:
    from shardio.datasets.stream_dataset import StreamDataset

STATE_VERSION = 1
"""The version of the state's format and of the order. A state resumes only in the order in which it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """A sample that was read and not yet decoded.

    Attributes:
        turn: Which of the worker's shards it is in, counting in their order.
        shard: The shard's number in the dataset.
        before: The place before it in the shard.
        sample: The sample.
    """

    turn: int
    shard: int
    before: StreamPlace
    sample: StreamedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """How far a worker is in an epoch.

    Attributes:
        epoch: The epoch.
        turn: Which of the worker's shards the window begins in, counting in their order.
        place: Where in that shard it begins.
        window: The window's number.
        num_yielded: How many samples of the window were yielded, in the window's order.
        digest: The digest of the window's samples; 0 before one of them was yielded.
    """

    epoch: int
    turn: int = 0
    place: StreamPlace = StreamPlace()  # noqa: RUF009  # It is frozen.
    window: int = 0
    num_yielded: int = 0
    digest: int = 0


class StreamIterator(Iterator[Any]):
    """An iterator that yields the samples of a worker's streams. An error in one sample does not end it.

    Args:
        dataset: The dataset.
        epoch: The epoch.
    """

    _position: StreamPosition
    _values: Generator[tuple[Any, StreamPosition], None, None]
    _cut_short_by: str | None

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

    def __next__(self) -> Any:
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        try:
            value, self._position = next(self._values)
        except StopIteration:
            raise
        except BaseException as error:  # The generator has ended, the epoch has not.
            self._cut_short_by = describe_error(error)
            raise
        if isinstance(value, Broken):
            raise value.error
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the position: a small JSON-serializable dict without names of commands."""
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
            StateError: If it belongs to another dataset, order, rank or worker; the message names what differs.
        """
        position = _read_state(state, self._share.identity())
        self.close()
        self._begin(position)

    def close(self) -> None:
        """Close the stream that is being read, and end its command. This also happens when the iterator is freed."""
        self._values.close()

    def _begin(self, position: StreamPosition) -> None:
        self._position, self._cut_short_by = position, None
        # The generator does not refer to this iterator, so that it is closed as soon as this is freed.
        self._values = self._share.values(position)
        weakref.finalize(self, _close, self._values)  # At Python's exit, too, while commands can still be ended.


class _Share:
    """A worker's share of the streams.

    Samples are read into a window of the size of the dataset's buffer, and yielded in the order of a bijection. While a
    window is yielded, the next one is read at the same pace, so that no batch waits for a whole window.
    """

    def __init__(self, dataset: StreamDataset, order: StreamOrder) -> None:
        self._dataset, self._order = dataset, order

    def identity(self) -> dict[str, dict[str, Any]]:
        """Return what a state must have in common with this share."""
        dataset, order = self._dataset, self._order
        return {
            "dataset": {"digest": dataset.digest, "streams": order.num_shards},
            "order": {
                "seed": order.seed,
                "shuffle": order.shuffle,
                "buffer": dataset.buffer if order.shuffle else None,
            },
            "share": {
                "rank": order.rank,
                "world_size": order.world_size,
                "worker_id": order.worker_id,
                "num_workers": order.num_workers,
            },
        }

    def values(self, start: StreamPosition) -> Generator[tuple[Any, StreamPosition], None, None]:
        """Yield the values from a position on, each with the position after it. Broken values are errors."""
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
                    # Before the last sample of a window is yielded, where the next one begins must be known.
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
        """Return the position of the window after the one at ``start``, given the samples that are left."""
        window = start.window + self._order.shuffle
        if not left:
            num_shards = len(self._order.own_shards(start.epoch))
            return StreamPosition(epoch=start.epoch, turn=num_shards, window=window)
        return StreamPosition(epoch=start.epoch, turn=left[0].turn, place=left[0].before, window=window)

    def _read(self, start: StreamPosition) -> Generator[StreamItem, None, None]:
        """Yield the samples from the beginning of a window on, in the order in which they are read."""
        dataset = self._dataset
        shards, place = self._order.own_shards(start.epoch).tolist(), start.place
        for turn, shard in list(enumerate(shards))[start.turn :]:
            with dataset.open_shard(shard, place) as stream:
                before = stream.place
                while (sample := stream.next()) is not None:
                    yield StreamItem(turn=turn, shard=shard, before=before, sample=sample)
                    before = stream.place
            place = StreamPlace()


def _close(values: Generator[Any, None, None]) -> None:
    if inspect.getgeneratorstate(values) != inspect.GEN_RUNNING:  # A thread may run it that Python does not wait for.
        values.close()


def _digest(items: Sequence[StreamItem]) -> int:
    """Return a digest of samples and of the shards that they are in."""
    numbers = np.array([(item.turn, item.sample.digest) for item in items], np.uint64)
    return xxhash.xxh3_64_intdigest(numbers.tobytes())


def _read_state(state: Any, identity: dict[str, dict[str, Any]]) -> StreamPosition:
    """Check that a state belongs to a dataset, an order and a share, and return its position."""
    if not isinstance(state, dict) or not isinstance(place := state.get("place"), dict):
        raise StateError("this is not the state of a StreamDataset's iterator: pass what its state_dict() returned")
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, but this version of shardio reads version "
            f"{STATE_VERSION}: resume with the version of shardio that saved the state"
        )
    saved = {part: values if isinstance(values := state.get(part), dict) else {} for part in identity}
    differences = [
        f"{part}.{name} is {saved[part].get(name)!r} in the state and {value!r} here"
        for part, values in identity.items()
        for name, value in values.items()
        if saved[part].get(name) != value
    ]
    if differences:
        raise StateError(
            f"this state belongs to other streams, another order or another share of them ({'; '.join(differences)}): "
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
