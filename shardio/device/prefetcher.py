"""DevicePrefetcher: the next batches cross to the device while the last one is computed on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any

import torch

from shardio.device.batches import map_tensors
from shardio.device.pinned import PinnedPool, register
from shardio.device.preparing import Normalize, Preparation
from shardio.device.streams import CudaStream, SideStream
from shardio.device.window import Window


class DevicePrefetcher:
    """Wrap a loader so that its batches arrive on a device, normalised.

    On CUDA, batches are copied from pinned memory on a stream of their own, ``depth`` ahead, and images are
    cast and normalised there, after uint8 crossed the bus. On other devices the same is done without streams.

    >>> normalize = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    >>> for images, labels in DevicePrefetcher(loader, "cuda", normalize=normalize): ...  # doctest: +SKIP

    It can be iterated over again, epoch by epoch. What an iteration that is left early holds is let go of when its
    iterator is, and at the end of a ``with`` block.

    Args:
        loader: Any iterable of batches: tensors and numpy arrays, nested in tuples, lists, mappings and dataclasses,
            and whatever has a method ``to(device, non_blocking=...)``. All else is handed on as it is.
        device: Where to; by default CUDA if there is one, else MPS, else the CPU.
        depth: How many batches are under way at a time, on CUDA.
        normalize: (mean, std) of each channel, in units of [0, 1]: images become (x / 255 - mean) / std.
        dtype: Of the images; float32 with ``normalize``. Alone it casts without scaling.
        channels_last: Whether images lie in channels_last memory on the device.
        transform: Takes and returns a whole batch, on the device, after that; on CUDA on the prefetcher's stream.

    ``normalize``, ``dtype`` and ``channels_last`` touch uint8 tensors [N, C, H, W] alone, never labels.

    Raises:
        ValueError: If an argument is out of range, or the device is CUDA and there is none.
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
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.loader = loader
        self.device = torch.device(device) if device is not None else _pick_device()
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device={str(device)!r} was asked for, and torch sees no CUDA device: name 'cpu', or leave it out "
                "for the best there is"
            )
        self.depth = depth
        self.transform = transform
        self._prepare_images = Preparation(self.device, normalize, dtype, channels_last=channels_last)
        self._side: SideStream | None = None
        self._pool = PinnedPool()
        if self.device.type == "cuda":
            self._side = CudaStream(self.device)
            if callable(watch := getattr(loader, "watch_memory", None)):
                watch(register)
        self._state: dict[str, Any] | None = None
        self._running: weakref.ref[Generator[Any]] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it should

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the loader's next epoch."""
        self._state = None
        running = self._pass_on() if self._side is None else self._prefetch(self._side)
        self._running = weakref.ref(running)  # Not more: who leaves it early lets go of it.
        return running

    def set_epoch(self, epoch: int) -> None:
        """Name the loader's next epoch, where the loader can, or else its sampler or its dataset, as in torch's."""
        for owner in (
            self.loader,
            *(getattr(self.loader, name, None) for name in ("sampler", "batch_sampler", "dataset")),
        ):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)
                return

    @property
    def has_state(self) -> bool:
        """Whether the loader can say where it is."""
        return _has_state(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as of the last batch that was handed out."""
        return self._state if self._state is not None else self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the loader."""
        self.close()
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]  # as state_dict

    def close(self) -> None:
        """End the iteration that is going on, if one is, and let go of what is under way."""
        self._state = None
        if self._running is not None and (running := self._running()) is not None:
            running.close()

    def __enter__(self) -> DevicePrefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        self._pool.clear()

    def _pass_on(self) -> Generator[Any]:
        for batch in self.loader:
            yield self._prepare(map_tensors(batch, self._to_device, self._to_device))

    def _prefetch(self, side: SideStream) -> Generator[Any]:
        end: Exception | None = None
        window = Window(side, self._pool, self._copy, self._prepare)
        with closing(window), closing(self._batches()) as batches:
            while True:
                while end is None and window.num_under_way < self.depth:
                    end = self._send_next(batches, window)
                if not window.num_under_way:
                    break
                yield self._received(window)
                window.follow(self.depth)
            self._state = None  # The loader is through, and says so itself.
        if end is not None and not isinstance(end, StopIteration):
            raise end

    def _send_next(self, batches: Iterator[tuple[Any, dict[str, Any] | None]], window: Window) -> Exception | None:
        """Send a batch; or return by what the loader ended, since what came before it is handed out before it."""
        try:
            window.send(*next(batches))
        except Exception as error:  # StopIteration, or anything.
            return error
        return None

    def _batches(self) -> Generator[tuple[Any, dict[str, Any] | None]]:
        """Yield the loader's batches, each with its state after it."""
        has_state = self.has_state
        for batch in self.loader:
            yield batch, self.loader.state_dict() if has_state else None  # type: ignore[attr-defined]  # as seen

    def _received(self, window: Window) -> Any:
        batch, self._state = window.receive()
        return batch

    def _to_device(self, value: Any) -> Any:
        return value.to(self.device)

    def _copy(self, batch: Any) -> Any:
        return map_tensors(batch, self._cross, self._cross)

    def _cross(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True)

    def _prepare(self, batch: Any) -> Any:
        prepared = map_tensors(batch, self._prepare_images)
        return prepared if self.transform is None else self.transform(prepared)


def _has_state(loader: Any) -> bool:
    """Return whether a loader can say where it is. shardio's own raises TypeError where it has nobody's order."""
    try:
        loader.state_dict()
    except (AttributeError, TypeError):
        return False
    return True


def _pick_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
