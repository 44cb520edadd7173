"""Copy the next batches to the device while the current one is in use."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch

from shardio.device.mixing import BatchTransform, call_transform, takes_generator
from shardio.device.streams import (
    Check,
    CopyStream,
    CudaStream,
    InFlightBatches,
    PinnedPool,
    PrefetchStats,
    Registration,
    SynchronousBatches,
    WaitingTimes,
    choose_device,
    map_tensors,
)
from shardio.device.tiles import ImagePreparation, Normalize, TiledImages, check_device
from shardio.epochs import (
    MAX_EPOCH,
    Count,
    asking_for_rng_keys,
    counted_at_once,
    counts_when_received,
    find_held,
    hand_over,
    held_back,
    restore_held,
    set_epoch,
)
from shardio.errors import StateError
from shardio.libraries import outside_of_inference_mode, own_tensors
from shardio.process import cut_short, describe_error, let_through, no_end
from shardio.values import check_choice, check_integer

DecodePlace = Literal["workers", "device"]
"""The place where images are decoded."""

CHECK_S = 0.001
"""The time in seconds to wait for the loader before checking whether the device is out of work."""

_NO_STATE = (
    "{} has no state: its saved state is empty, so a resumed run restarts the epoch. Wrap a "
    "shardio.DataLoader with shardio's order instead"
)


class DevicePrefetcher:
    """A wrapper that delivers a loader's batches on a device and, with ``normalize``, normalizes images.

    On CUDA, up to ``depth`` batches are copied in advance, from pinned memory and on a separate stream. Images are
    copied as uint8, or as tiles with ``decode="device"``; they are cast and normalized on the device. Other devices get
    the same results without streams.

    >>> normalize = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    >>> for images, labels in DevicePrefetcher(loader, "cuda", normalize=normalize): ...  # doctest: +SKIP

    Iterate over the wrapper once per epoch. If you leave an iteration early, its batches are released when its iterator
    is freed, or at the end of a ``with DevicePrefetcher(...)`` block. The state of the prefetcher, and of a shardio
    loader inside it, reflects the last batch that you received.

    Args:
        loader: Any iterable of batches. A batch may nest tensors, numpy arrays and objects with a method
            ``to(device, non_blocking=...)`` in tuples, lists, mappings and dataclasses. Other values are passed on
            unchanged.
        device: The device; by default, CUDA if available, else MPS, else the CPU.
        depth: The number of batches in flight on CUDA. With 1, a batch is copied only when the step before it is done,
            so the device waits for each copy.
        normalize: (mean, std) for pixels scaled to [0, 1], each with one value per channel or a single value. Images
            become (x / 255 - mean) / std.
        dtype: The dtype of the images; by default, float32 with ``normalize`` and uint8 without. Without
            ``normalize``, values are cast but not scaled.
        channels_last: Whether images have the channels_last memory format on the device.
        decode: Where the images of a shardio loader are decoded. By default, the loader's ``workers`` decode them. With
            ``device``, a CUDA device decodes JPEGs that were packed with ``--jpeg tile``, and gives the same pixels;
            only the tiles that the crops need are copied. This needs the cuda-core package (``pip install
            "shardio-loader[cuda]"``). Workers decode the images that the device cannot decode, and those to
            which pixel operations, such as ColorJitter, apply. With a ``collate_fn``, or datasets or transforms that
            are not shardio's, workers decode all images.
        transform: A function that takes and returns a batch, such as :class:`MixUp`, or a list of such functions to
            apply in turn. The functions run on the device after normalization; on CUDA, on the prefetcher's stream. A
            function that has a parameter ``generator`` receives a torch.Generator on the device. With shardio's order,
            the generator is seeded from the seed, epoch, position and rank, so a resumed run draws the same numbers.
            With other loaders, the generator is seeded from torch's global generator.

    On CUDA, each batch can be used on the stream that was current when you requested it; another stream must first wait
    for that stream. With ``persistent_workers=True``, a shardio loader keeps its memory, which is pinned only once.

    ``normalize``, ``dtype`` and ``channels_last`` apply only to uint8 tensors [N, C, H, W], not to labels or
    ``tv_tensors.Mask``. If ``normalize`` has one value per channel, tensors with a different number of channels stay
    unchanged; a single value applies to all channels.

    Raises:
        ValueError: If an argument is out of range, ``normalize`` is used with an integer ``dtype``, or the device is
            not available.
        ImportError: If ``decode`` is ``device``, and shardio was built without code for this device, or cuda-core is
            not installed.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | torch.device | None = None,
        *,
        depth: int = 2,
        normalize: Normalize | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool = True,
        decode: DecodePlace = "workers",
        transform: BatchTransform | Sequence[BatchTransform] | None = None,
    ) -> None:
        self.loader = loader
        chosen = choose_device(device)  # CUDA's current device may change later.
        self.device = torch.device("cuda", torch.cuda.current_device()) if str(chosen) == "cuda" else chosen
        self.depth = check_integer("depth", depth, at_least=1)
        self._takes_tiles = check_choice("decode", decode, DecodePlace) == "device"
        if self._takes_tiles:
            check_device(self.device)
        self.transform = transform
        takes_any = any(map(takes_generator, _as_list(transform)))
        self._generator = torch.Generator(self.device) if takes_any else None
        with own_tensors():
            self._prepare_images = ImagePreparation(self.device, normalize, dtype, channels_last=channels_last)
        self._stream: CopyStream | None = None
        self._pool, self._register = PinnedPool(), Registration(self.device)
        if self.device.type == "cuda":
            self._stream = CudaStream(self.device)
        self._times = WaitingTimes(has_stream=self._stream is not None)
        self._iterator: Callable[[], PrefetchIterator | None] = _no_iterator
        self._last_received = LastReceived()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError

    def __iter__(self) -> Iterator[Any]:
        self._last_received = LastReceived()
        batches: SynchronousBatches | InFlightBatches = SynchronousBatches(self._copy, self._prepare)
        if self._stream is not None:
            batches = InFlightBatches(self._stream, self._pool, self._copy, self._prepare, self._times)
        depth = 1 if self._stream is None else self.depth
        is_ahead = self.has_state and not self.counts_when_received
        iterator = PrefetchIterator(
            self.loader, batches, depth, self._last_received, self._times, self._watch, is_ahead=is_ahead
        )
        self._iterator = weakref.ref(iterator)  # With a weak reference, an abandoned iterator can be freed.
        return iterator

    def start_workers(self) -> None:
        """Start the workers of the loader's next epoch now, if it is a shardio loader; see DataLoader.start_workers."""
        if callable(start_workers := getattr(self.loader, "start_workers", None)):
            start_workers()

    def stats(self) -> PrefetchStats:
        """Return how long the program and the device have waited for data. This call does not wait for the device."""
        return self._times.sum_up()

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch on the loader, or on those of its samplers and datasets that have ``set_epoch``.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If ``epoch`` is negative or not below 2**62.
        """
        set_epoch(self.loader, check_integer("epoch", epoch, at_least=0, below=MAX_EPOCH))

    @property
    def has_state(self) -> bool:
        """Whether the loader has a state."""
        # shardio's loaders have this attribute; other loaders have a state if they have the method ``state_dict``.
        return bool(getattr(self.loader, "has_state", callable(getattr(self.loader, "state_dict", None))))

    @property
    def counts_when_received(self) -> bool:
        """Whether the loader counts a batch when the user receives it; see :mod:`shardio.epochs`."""
        return counts_when_received(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as of the last batch that you received.

        If the loader has no state, return an empty dict and issue a RuntimeWarning.

        Raises:
            StateError: If the loader counts batches when they are requested, and its ``state_dict`` has failed.
        """
        if isinstance(state := self._last_received.state, StateError):
            raise state
        if state is not None:
            return state
        if callable(state_dict := getattr(self.loader, "state_dict", None)):
            return cast(dict[str, Any], state_dict())
        warnings.warn(_NO_STATE.format(type(self.loader).__name__), RuntimeWarning, stacklevel=2)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the loader.

        If the loader has no state, accept only an empty state, and issue a RuntimeWarning.

        Raises:
            TypeError: If the loader has no state and ``state`` is not empty.
        """
        self.close()
        self._last_received = LastReceived()
        if callable(load_state_dict := getattr(self.loader, "load_state_dict", None)):
            load_state_dict(state)
            return
        if state:
            raise TypeError(f"{type(self.loader).__name__} has no load_state_dict: wrap a shardio.DataLoader instead")
        warnings.warn(_NO_STATE.format(type(self.loader).__name__), RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """End the current iteration, if there is one, and release the batches in flight."""
        if (iterator := self._iterator()) is not None:
            iterator.close()
        self._iterator = _no_iterator

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._pool.clear()

    def _watch(self) -> AbstractContextManager[object]:
        """Return a context in which the loader's epoch begins. On CUDA, the context pins the batches' memory."""
        watch_memory = getattr(self.loader, "watch_memory", None)
        takes_tiles = self._takes_tiles and _passes_batches_on(self.loader)
        if not callable(watch_memory) or (self._stream is None and not takes_tiles):
            return nullcontext()
        register = self._register if self._stream is not None else _leave_alone
        # Hold one batch more than the number in flight, because memory is released only when the next batch is sent.
        options = {"takes_tiles": True} if takes_tiles else {}
        context: AbstractContextManager[object] = watch_memory(register, num_held=self.depth + 1, **options)
        return context

    def _copy(self, batch: Any) -> Any:
        # Without a stream, support objects whose ``to`` lacks the parameter ``non_blocking``.
        options = {} if self._stream is None else {"non_blocking": True}

        def copy(value: Any) -> Any:
            return value.to(self.device, **options)

        return map_tensors(batch, copy, copy)

    def _prepare(self, batch: Any, rng_key: int | None, checks: list[Check]) -> Any:
        def decode(value: Any) -> Any:
            if not isinstance(value, TiledImages):
                return value
            return self._prepare_images.decode(value, checks, is_final=self.transform is None)

        prepared = map_tensors(batch, self._prepare_images, decode)
        if self._generator is not None:
            if rng_key is None:
                rng_key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            self._generator.manual_seed(rng_key)
        for transform in _as_list(self.transform):
            prepared = call_transform(transform, prepared, self._generator)
        return prepared


def _as_list(transform: BatchTransform | Sequence[BatchTransform] | None) -> list[BatchTransform]:
    if transform is None:
        return []
    # A callable sequence, such as nn.Sequential, is a single transform.
    return [transform] if callable(transform) else list(transform)


def _passes_batches_on(loader: Any) -> bool:
    """Return whether a loader delivers what its method ``watch_memory`` announces, without user code in between."""
    owner = next((each for each in type(loader).__mro__ if "watch_memory" in vars(each)), None)
    return owner is not None and getattr(type(loader), "__iter__", None) is getattr(owner, "__iter__", None)


def _leave_alone(memory: object) -> None:
    """Do nothing to memory that no stream reads."""


def _no_iterator() -> None:
    """Return None, as a weak reference to an iterator that no longer exists does."""


@dataclass(slots=True)
class LastReceived:
    """A record of the last batch that the user received. The record outlives an iterator that is abandoned early.

    Attributes:
        state: The loader's state as of that batch, or the error to raise when the state is requested; None if the
            loader's own state is up to date.
    """

    state: dict[str, Any] | StateError | None = None


class _Failure(NamedTuple):
    """An error in place of a batch. StopIteration is treated as an error."""

    error: Exception
    counts: list[Count]
    late_counts: list[Count]


class PrefetchIterator:
    """An iterator over batches on the device, with several batches in flight.

    The iterator raises an error from the loader after the batches that precede it. The error ends this iterator only if
    it ends the loader's iterator. A batch that fails on its way to the device is considered received when the next
    batch is requested.

    Args:
        loader: The source of batches.
        batches: The batches in flight, which this iterator closes.
        depth: The number of batches to keep in flight.
        last_received: The record of the last batch, updated when a batch is returned.
        times: The prefetcher's counts and times.
        watch: Returns a context in which the loader's epoch begins.
        is_ahead: Whether the loader counts a batch when it is requested, so the loader's state is ahead of the user
            while batches are in flight or held back.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batches: InFlightBatches | SynchronousBatches,
        depth: int,
        last_received: LastReceived,
        times: WaitingTimes,
        watch: Callable[[], AbstractContextManager[object]],
        *,
        is_ahead: bool,
    ) -> None:
        self._loader, self._in_flight, self._depth = loader, batches, depth
        self._last_received, self._is_ahead = last_received, is_ahead
        self._times, self._watch = times, watch
        self._batches: Iterator[Any] | None = None
        self._failure: _Failure | None = None
        self._late_counts: list[Count] = []
        self._is_open = True
        self._cut_short_by: str | None = None

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        if not self._is_open:
            raise StopIteration
        held = find_held()
        self._cut_short_by = "an error"  # Until a batch is returned, any interruption may lose it.
        try:
            batch, error = self._receive()
        except BaseException as interruption:
            restore_held(held)
            self._cut_short_by = describe_error(interruption)
            raise
        self._cut_short_by = None
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # Otherwise the traceback, which holds this frame, would keep the loader's iterator alive.

    def close(self) -> None:
        """Wait until all copies are done, and release the loader's iterator."""
        if self._is_open:
            self._is_open, self._batches = False, None
            self._in_flight.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_cut_short_by"):  # __init__ sets this attribute last.
            self.close()

    def _receive(self) -> tuple[Any, Exception | None]:
        self._in_flight.request(self._depth)
        hand_over(self._late_counts)
        self._late_counts = []
        while self._failure is None and len(self._in_flight) < self._depth and self._can_send():
            self._failure = self._send_next()
        if len(self._in_flight):
            batch, counts, checks = self._in_flight.receive()
            self._times.num_batches += 1
            try:
                for check in checks:
                    check()
            except Exception as error:  # An image is damaged.
                let_through(error)
                self._late_counts = counts
                return None, error
            hand_over(counts)
            return batch, None
        assert self._failure is not None, "nothing is in flight"
        failure, self._failure = self._failure, None
        self._late_counts = failure.late_counts
        hand_over(failure.counts)
        if isinstance(failure.error, StopIteration):
            self.close()
        try:
            return None, failure.error
        finally:
            del failure  # As in __next__.

    def _can_send(self) -> bool:
        """Return whether to request another batch from the loader before returning the next one in flight.

        While the device has work, this method waits for the loader. As soon as the device is idle, it needs the batch
        in flight rather than a later one. The method ``is_ready(timeout_s)`` of the loader's iterator returns whether a
        batch is ready.
        """
        is_ready = getattr(self._batches, "is_ready", None)
        if not len(self._in_flight) or not callable(is_ready):
            return True
        began = time.perf_counter()
        try:
            while not is_ready(CHECK_S):
                if self._in_flight.is_consumer_idle():
                    return False
        except Exception as error:  # The error is raised after the batches in flight are delivered.
            let_through(error)
            self._failure = _Failure(error, [], [])
            return False
        finally:
            self._times.loader_wait_s += time.perf_counter() - began
        return True

    def _send_next(self) -> _Failure | None:
        saves_state = self._is_ahead and (not self._in_flight.is_synchronous or find_held() is not None)
        # The loader's state, which is read below, includes the states of its parts, so the parts must count the batch
        # immediately.
        with counted_at_once() if saves_state else held_back() as counts, asking_for_rng_keys() as keys:
            began = time.perf_counter()
            try:
                batch = self._take()
            except StopIteration as end:
                end.with_traceback(None)  # The traceback would keep a batch on the device.
                return _Failure(end, [*counts, *self._note_state(None)], [])
            except Exception as error:
                let_through(error)
                return _Failure(error, [*counts, *self._note_state(None)], [])
            finally:
                self._times.loader_wait_s += time.perf_counter() - began
        rng_key = keys.take()
        counts += self._note_state(self._ask_for_state() if saves_state else None)
        try:
            with outside_of_inference_mode():
                self._in_flight.send(batch, counts, rng_key)
        except Exception as error:  # The user's transform or the device raised this error.
            let_through(error)
            return _Failure(no_end(error), [], counts)
        return None

    def _ask_for_state(self) -> dict[str, Any] | StateError:
        loader: Any = self._loader
        try:
            state: dict[str, Any] = loader.state_dict()
        except Exception as error:  # A user's method may fail in any way, and the state may never be requested.
            let_through(error)
            what = f"{type(loader).__name__}.state_dict() raised {describe_error(error)}"
            return StateError(f"the position of this batch is not known, because {what}")
        return state

    def _note_state(self, state: dict[str, Any] | StateError | None) -> list[Count]:
        """Return functions that record the state for the batch when the user receives it, if the loader is ahead."""
        return [partial(setattr, self._last_received, "state", state)] if self._is_ahead else []

    def _take(self) -> Any:
        if self._batches is not None:
            return next(self._batches)
        with self._watch():
            self._batches = iter(self._loader)
            return next(self._batches)  # Some iterators begin the epoch only at the first next().
