"""DevicePrefetcher: the next batches cross to the device while the last one is computed on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from shardio.device.batches import map_tensors

Normalize = tuple[Sequence[float], Sequence[float]]


class DevicePrefetcher:
    """Wrap a loader so that its batches arrive on a device, normalised.

    On CUDA, batches are copied from pinned memory on a stream of their own, ``depth`` ahead, and images are
    cast and normalised there, after uint8 crossed the bus. On other devices the same is done without streams.

    >>> normalize = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    >>> for images, labels in DevicePrefetcher(loader, "cuda", normalize=normalize): ...  # doctest: +SKIP

    Args:
        loader: Any iterable of batches: tensors, nested in tuples, lists and dicts.
        device: Where to; by default CUDA if there is one, else MPS, else the CPU.
        depth: How many batches are under way at a time, on CUDA.
        normalize: (mean, std) of each channel, in units of [0, 1]: images become (x / 255 - mean) / std.
        dtype: Of the images; float32 with ``normalize``. Alone it casts without scaling.
        channels_last: Whether images lie in channels_last memory on the device.

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
        self.dtype = dtype if dtype is not None or normalize is None else torch.float32
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._affine = None if normalize is None else _as_affine(normalize, self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it should

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the loader's next epoch."""
        self._state = None
        return self._pass_on() if self._stream is None else self._prefetch(self._stream)

    def set_epoch(self, epoch: int) -> None:
        """Name the loader's next epoch, where the loader can."""
        self._state = None
        if callable(set_epoch := getattr(self.loader, "set_epoch", None)):
            set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state as of the last batch that was handed out."""
        return self._state if self._state is not None else self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the loader."""
        self._state = None
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]  # as state_dict

    def _pass_on(self) -> Iterator[Any]:
        for batch in self.loader:
            yield map_tensors(batch, lambda tensor: self._prepare(tensor.to(self.device)))

    def _prefetch(self, stream: torch.cuda.Stream) -> Iterator[Any]:
        batches = iter(self.loader)
        under_way: deque[tuple[Any, torch.cuda.Event, dict[str, Any] | None]] = deque()
        is_exhausted = False
        while True:
            while not is_exhausted and len(under_way) < self.depth:
                try:
                    batch = next(batches)
                except StopIteration:
                    is_exhausted = True
                    break
                state = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
                under_way.append((*self._send(batch, stream), state))
            if not under_way:
                self._state = None  # The loader is through, and says so itself.
                return
            batch, arrived, self._state = under_way.popleft()
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_event(arrived)
            map_tensors(batch, partial(_record, stream=consumer))
            yield batch

    def _send(self, batch: Any, stream: torch.cuda.Stream) -> tuple[Any, torch.cuda.Event]:
        """Start the copy of a batch; return where it will be, and the event after which it is there."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            # Torch's pinned allocator does not hand the memory out again before the copy is done.
            pinned = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
            return self._prepare(pinned.to(self.device, non_blocking=True))

        with torch.cuda.stream(stream):
            on_device = map_tensors(batch, copy)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return on_device, arrived

    def _prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.uint8 or tensor.ndim != 4:
            return tensor
        if self._affine is not None:
            scale, shift = self._affine
            tensor = tensor.to(torch.float32, memory_format=self.memory_format).mul_(scale).add_(shift)
        return tensor.to(self.dtype or tensor.dtype).contiguous(memory_format=self.memory_format)


def _as_affine(normalize: Normalize, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / 255 - mean) / std as x * scale + shift, both float32 [C, 1, 1]."""
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1) for values in normalize)
    if (std <= 0).any():
        raise ValueError(f"std must be positive, got {list(normalize[1])}")
    return (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)


def _record(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor


def _pick_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
