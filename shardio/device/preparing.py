"""The preparation of images on the device: casting, normalisation and memory format."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

Normalize = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, for pixels scaled to [0, 1]."""


class ImagePreparation:
    """A function that prepares images: uint8 tensors [N, C, H, W].

    It returns masks and all other tensors unchanged.

    Args:
        device: The device of the images.
        normalize: See :class:`DevicePrefetcher`.
        dtype: See :class:`DevicePrefetcher`.
        channels_last: See :class:`DevicePrefetcher`.
    """

    def __init__(
        self, device: torch.device, normalize: Normalize | None, dtype: torch.dtype | None, *, channels_last: bool
    ) -> None:
        if normalize is not None and dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"normalize yields fractions, which dtype={dtype} cannot hold: use a floating-point dtype")
        self._dtype = dtype if dtype is not None or normalize is None else torch.float32
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._affine = None if normalize is None else _as_affine(normalize, device)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.uint8 or tensor.ndim != 4 or _is_mask(tensor):
            return tensor
        if self._affine is not None and len(self._affine[0]) not in (1, tensor.shape[1]):
            return tensor  # The number of channels differs, as in a label image.
        if self._affine is None:
            return tensor.to(self._dtype or tensor.dtype).contiguous(memory_format=self._memory_format)
        normalise = normalise_in_one_kernel if tensor.is_cuda else normalise_in_steps
        return normalise(tensor, *self._affine, self._dtype or torch.float32, self._memory_format)


def normalise_in_one_kernel(
    images: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """Return images * scale + shift, computed in float32, in the given dtype and memory format.

    On a GPU, one kernel reads uint8 and writes the result. On a CPU, torch makes copies, which take longer than
    :func:`normalise_in_steps` for large batches (benchmarks/results/device.md).

    Args:
        images: uint8 [N, C, H, W].
        scale: float32 [C, 1, 1].
        shift: float32 [C, 1, 1].
        dtype: The dtype of the result.
        memory_format: Its memory format.
    """
    result = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=memory_format)
    return torch.addcmul(shift, images, scale, out=result)


def normalise_in_steps(
    images: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """Return what :func:`normalise_in_one_kernel` returns, by several operations; float32 may differ by rounding."""
    floats = images.to(torch.float32, memory_format=memory_format).mul_(scale).add_(shift)
    return floats.to(dtype).contiguous(memory_format=memory_format)


def _is_mask(tensor: torch.Tensor) -> bool:
    tv_tensors = sys.modules.get("torchvision.tv_tensors")
    return tv_tensors is not None and isinstance(tensor, tv_tensors.Mask)


def _as_affine(normalize: Normalize, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / 255 - mean) / std as x * scale + shift, both float32 [C, 1, 1]."""
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1) for values in normalize)
    if not (std > 0).all():
        raise ValueError(f"std must be positive, got {list(normalize[1])}")
    return (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)
