"""DevicePrefetcher: copy the next batches to the device while the current one is in use."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, cast

import torch

from shardio.device.batches import map_tensors
from shardio.device.choice import choose_device
from shardio.device.generators import BatchTransform, call_transform, takes_generator
from shardio.device.in_flight import InFlightBatches, SynchronousBatches
from shardio.device.iterator import LastReceived, PrefetchIterator
from shardio.device.pinned import PinnedPool, Registration
from shardio.device.preparing import ImagePreparation, Normalize
from shardio.device.streams import CopyStream, CudaStream
from shardio.device.waiting import PrefetchStats, WaitingTimes
from shardio.epochs import MAX_EPOCH, set_epoch
from shardio.errors import StateError
from shardio.handover import counts_when_received
from shardio.torch_modes import own_tensors
from shardio.values import check_integer

_NO_STATE = (
    "{} has no state: its saved state is empty, so a resumed run restarts the epoch. Wrap a "
    "shardio.DataLoader with shardio's order instead"
)


class DevicePrefetcher:
    """A wrapper that delivers a loader's batches on a device and, with ``normalize``, normalises images.

    On CUDA, up to ``depth`` batches are copied ahead, from pinned memory and on a separate stream.
    Images are copied as uint8; they are cast and normalised on the device. Other devices get the
    same results without streams.

    >>> normalize = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    >>> for images, labels in DevicePrefetcher(loader, "cuda", normalize=normalize): ...  # doctest: +SKIP

    Iterate over it once per epoch. If you leave an iteration early, its batches are released when
    its iterator is freed, or at the end of a ``with DevicePrefetcher(...)`` block. The state of
    the prefetcher, and of a shardio loader inside it, reflects the last batch that you received.

    Args:
        loader: Any iterable of batches. A batch may nest tensors, numpy arrays and objects with a
            method ``to(device, non_blocking=...)`` in tuples, lists, mappings and dataclasses.
            Other values are passed on unchanged.
        device: The device; by default, CUDA if available, else MPS, else the CPU.
        depth: The number of batches in flight on CUDA. With 1, a batch is copied only when the step before it is done,
            so the device waits for each copy.
        normalize: (mean, std) for pixels scaled to [0, 1], each with one value per channel or a single
            value. Images become (x / 255 - mean) / std.
        dtype: The dtype of the images; by default, float32 with ``normalize`` and uint8 without.
            Without ``normalize``, values are cast but not scaled.
        channels_last: Whether images have the channels_last memory format on the device.
        transform: A function that takes and returns a batch, such as :class:`MixUp`, or a list of such functions to
            apply in turn. They are called on the device after normalisation; on CUDA, on the prefetcher's stream. A
            function that has a parameter ``generator`` receives a torch.Generator of the device. With shardio's order,
            the generator is seeded from seed, epoch, position and rank, so a resumed run draws the same numbers. With
            other loaders, it is seeded from torch's global generator.

    On CUDA, each batch can be used on the stream that was current when you requested it; on another stream, wait for
    that one first. With ``persistent_workers=True``, a shardio loader keeps its memory, so it is pinned only once.

    ``normalize``, ``dtype`` and ``channels_last`` apply only to uint8 tensors [N, C, H, W], not to
    labels or ``tv_tensors.Mask``. If ``normalize`` has one value per channel, tensors with a different
    number of channels stay unchanged; a single value applies to all channels.

    Raises:
        ValueError: If an argument is out of range, ``normalize`` is used with an integer
            ``dtype``, or the device is not available.
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
        transform: BatchTransform | Sequence[BatchTransform] | None = None,
    ) -> None:
        self.loader = loader
        self.device = _with_index(choose_device(device))
        self.depth = check_integer("depth", depth, at_least=1)
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
        """Iterate over the loader's next epoch."""
        self._last_received = LastReceived()
        if self._stream is None:
            batches: SynchronousBatches | InFlightBatches = SynchronousBatches(self._copy_and_prepare)
            depth = 1
        else:
            batches = InFlightBatches(self._stream, self._pool, self._copy, self._prepare, self._times)
            depth = self.depth
        is_ahead = self.has_state and not self.counts_when_received
        iterator = PrefetchIterator(
            self.loader, batches, depth, self._last_received, self._times, self._watch, is_ahead=is_ahead
        )
        self._iterator = weakref.ref(iterator)  # Weak, so that an iterator that is left early is released.
        return iterator

    def start_workers(self) -> None:
        """Start the workers of the loader's next epoch now, if it is a shardio loader; see DataLoader.start_workers."""
        if callable(start_workers := getattr(self.loader, "start_workers", None)):
            start_workers()

    def stats(self) -> PrefetchStats:
        """Return how long the program and the device have waited for data so far. This does not wait for the device."""
        return self._times.sum_up()

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch on the loader, or on its samplers and datasets that take one.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If ``epoch`` is negative or not below 2**62.
        """
        set_epoch(self.loader, check_integer("epoch", epoch, at_least=0, below=MAX_EPOCH))

    @property
    def has_state(self) -> bool:
        """Whether the loader has a state."""
        return _has_state(self.loader)

    @property
    def counts_when_received(self) -> bool:
        """Whether the loader counts a batch when the user receives it; see :mod:`shardio.handover`."""
        return counts_when_received(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as of the last batch that you received.

        If the loader has no state, return an empty dict and issue a RuntimeWarning.

        Raises:
            StateError: If the loader counts batches when they are requested, and its ``state_dict`` failed.
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

        If the loader has no state, accept only an empty one and issue a RuntimeWarning.

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        self._pool.clear()

    def _watch(self) -> AbstractContextManager[object]:
        """Return a context in which the loader's epoch begins: CUDA pins the memory of its batches."""
        watch_memory = getattr(self.loader, "watch_memory", None)
        if self._stream is None or not callable(watch_memory):
            return nullcontext()
        # One more than in flight: the memory of a batch is released when the next one is sent.
        context: AbstractContextManager[object] = watch_memory(self._register, num_held=self.depth + 1)
        return context

    def _copy_and_prepare(self, batch: Any, rng_key: int | None) -> Any:
        def copy(value: Any) -> Any:
            return value.to(self.device)

        return self._prepare(map_tensors(batch, copy, copy), rng_key)

    def _copy(self, batch: Any) -> Any:
        def copy(value: Any) -> Any:
            return value.to(self.device, non_blocking=True)

        return map_tensors(batch, copy, copy)

    def _prepare(self, batch: Any, rng_key: int | None) -> Any:
        prepared = map_tensors(batch, self._prepare_images)
        if self._generator is not None:
            if rng_key is None:
                rng_key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            self._generator.manual_seed(rng_key)
        for transform in _as_list(self.transform):
            prepared = call_transform(transform, prepared, self._generator)
        return prepared


def _with_index(device: torch.device) -> torch.device:
    """Return a device; for CUDA without an index, the current one, because that may change later."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _as_list(transform: BatchTransform | Sequence[BatchTransform] | None) -> list[BatchTransform]:
    if transform is None:
        return []
    # A module may be a sequence, too, and is then called as a whole.
    return [transform] if callable(transform) else list(transform)


def _no_iterator() -> None:
    """Return None, like a weak reference to an iterator that no longer exists."""


def _has_state(loader: Any) -> bool:
    """Return whether a loader has a state. shardio's loaders have an attribute for this."""
    return bool(getattr(loader, "has_state", callable(getattr(loader, "state_dict", None))))
