"""DevicePrefetcher: the next batches cross to the device while the last one is computed on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, cast

import torch

from shardio.device.batches import map_tensors
from shardio.device.choice import choose_device
from shardio.device.iteration import Iteration, Received
from shardio.device.pinned import PinnedPool, register
from shardio.device.preparing import Normalize, Preparation
from shardio.device.streams import CudaStream, SideStream
from shardio.device.window import Here, Window
from shardio.epochs import tell_epoch
from shardio.handover import counts_when_received
from shardio.torch_modes import own_tensors
from shardio.values import check_integer

_NO_STATE = (
    "{} has no state: its saved state is empty, so a resumed run restarts the epoch. Wrap a "
    "shardio.DataLoader with shardio's order instead"
)


class DevicePrefetcher:
    """Wrap a loader so that its batches arrive on a device, normalised.

    On CUDA, batches are copied from pinned memory on a stream of their own, ``depth`` ahead, and images are
    cast and normalised there, after uint8 crossed the bus. On other devices the same is done without streams.

    >>> normalize = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    >>> for images, labels in DevicePrefetcher(loader, "cuda", normalize=normalize): ...  # doctest: +SKIP

    It can be iterated over again, epoch by epoch. If you leave an iteration early, its batches are released
    with its iterator, or at the end of a ``with`` block. The state of the prefetcher, and that of a loader of
    shardio's, is as of the last batch that was handed out.

    Args:
        loader: Any iterable of batches: tensors and numpy arrays, nested in tuples, lists, mappings and dataclasses,
            and whatever has a method ``to(device, non_blocking=...)``. All else is handed on as it is.
        device: Where to; by default CUDA if there is one, else MPS, else the CPU.
        depth: How many batches are under way at a time, on CUDA.
        normalize: (mean, std) of each channel, in units of [0, 1]: images become (x / 255 - mean) / std.
        dtype: Of the images; float32 with ``normalize``. Alone it casts without scaling.
        channels_last: Whether images lie in channels_last memory on the device.
        transform: Takes and returns a whole batch, on the device, after that; on CUDA on the prefetcher's stream.

    ``normalize``, ``dtype`` and ``channels_last`` touch uint8 tensors [N, C, H, W] alone, never labels nor
    ``tv_tensors.Mask``. ``normalize`` leaves those alone, too, that have another number of channels than it.

    Raises:
        ValueError: If an argument is out of range, ``normalize`` meets a ``dtype`` without fractions, or the device is
            CUDA and there is none.
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
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.loader = loader
        self.device = choose_device(device)
        self.depth = check_integer("depth", depth, at_least=1)
        self.transform = transform
        with own_tensors():
            self._prepare_images = Preparation(self.device, normalize, dtype, channels_last=channels_last)
        self._side: SideStream | None = None
        self._pool = PinnedPool()
        if self.device.type == "cuda":
            self._side = CudaStream(self.device)
            if callable(watch := getattr(loader, "watch_memory", None)):
                watch(register)
        self._running: Callable[[], Iteration | None] = _nothing
        self._received = Received()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it should

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the loader's next epoch."""
        self._received = Received()
        if self._side is None:
            running = Iteration(self.loader, Here(self._prepare_here), 1, self._received, is_ahead=False)
        else:
            window = Window(self._side, self._pool, self._copy, self._prepare)
            is_ahead = self.has_state and not self.counts_when_received
            running = Iteration(self.loader, window, self.depth, self._received, is_ahead=is_ahead)
        self._running = weakref.ref(running)  # Not more: who leaves it early lets go of it.
        return running

    def set_epoch(self, epoch: int) -> None:
        """Name the loader's next epoch: to the loader, or else to its samplers and datasets that take it.

        Raises:
            TypeError: If ``epoch`` is no integer.
            ValueError: If it is negative, or not below 2**62.
        """
        tell_epoch(self.loader, check_integer("epoch", epoch, at_least=0, below=2**62))

    @property
    def has_state(self) -> bool:
        """Whether the loader can say where it is."""
        return _has_state(self.loader)

    @property
    def counts_when_received(self) -> bool:
        """Whether the loader counts a batch when the user receives it: see :mod:`shardio.handover`."""
        return counts_when_received(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as of the last batch that was handed out.

        It is empty, and a RuntimeWarning says so, if the loader has none.
        """
        if self._received.state is not None:
            return self._received.state
        if callable(state_dict := getattr(self.loader, "state_dict", None)):
            return cast(dict[str, Any], state_dict())
        warnings.warn(_NO_STATE.format(type(self.loader).__name__), RuntimeWarning, stacklevel=2)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the loader. An empty one changes nothing where the loader has none, and says so.

        Raises:
            TypeError: If the loader has no state, and this one is not empty.
        """
        self.close()
        self._received = Received()
        if callable(load_state_dict := getattr(self.loader, "load_state_dict", None)):
            load_state_dict(state)
            return
        if state:
            raise TypeError(f"{type(self.loader).__name__} has no load_state_dict: wrap a shardio.DataLoader instead")
        warnings.warn(_NO_STATE.format(type(self.loader).__name__), RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """End the iteration that is going on, if one is, and let go of what is under way."""
        if (running := self._running()) is not None:
            running.close()
        self._running = _nothing

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        self._pool.clear()

    def _prepare_here(self, batch: Any) -> Any:
        return self._prepare(map_tensors(batch, self._to_device, self._to_device))

    def _to_device(self, value: Any) -> Any:
        return value.to(self.device)

    def _copy(self, batch: Any) -> Any:
        return map_tensors(batch, self._cross, self._cross)

    def _cross(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True)

    def _prepare(self, batch: Any) -> Any:
        prepared = map_tensors(batch, self._prepare_images)
        return prepared if self.transform is None else self.transform(prepared)


def _nothing() -> None:
    """Stand for the reference to an iteration before there is one."""


def _has_state(loader: Any) -> bool:
    """Return whether a loader can say where it is. shardio's own have the methods in any case."""
    return bool(getattr(loader, "has_state", callable(getattr(loader, "state_dict", None))))
