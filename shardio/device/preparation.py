"""Prepare images on the device: decode their tiles, normalize and cast them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from shardio.device.streams import Check
from shardio.device.tiles import Colors, TiledImages, can_decode_to
from shardio.errors import SampleError

Normalize = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, for pixels scaled to [0, 1]."""


class ImagePreparation:
    """A function that prepares images: uint8 tensors [N, C, H, W].

    The function returns masks and all other tensors unchanged.

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
        self._affine_on_cpu = None if normalize is None else _as_affine(normalize)
        self._affine = None
        if self._affine_on_cpu is not None:
            scale, shift = self._affine_on_cpu
            self._affine = scale.to(device), shift.to(device)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.uint8 or tensor.ndim != 4 or _is_mask(tensor):
            return tensor
        if self._affine is not None and len(self._affine[0]) not in (1, tensor.shape[1]):
            return tensor  # The number of channels differs, as in a label image.
        if self._affine is None:
            return tensor.to(self._dtype or tensor.dtype).contiguous(memory_format=self._memory_format)
        dtype, layout = self._dtype or torch.float32, self._memory_format
        return normalize(tensor, *self._affine, dtype, layout, in_one_kernel=tensor.is_cuda)

    def decode(self, tiles: TiledImages, checks: list[Check], *, is_final: bool) -> torch.Tensor | list[torch.Tensor]:
        """Decode images on the device where their tiles are, and prepare them.

        Args:
            tiles: The images.
            checks: A function is added that decodes the images on the CPU that the device could not decode, and raises
                SampleError if they are damaged. It can be called when the stream has decoded the batch.
            is_final: Whether nothing else changes the images before the function is called.

        Returns:
            The images [N, C, H, W], or those of each crop of a MultiCrop.
        """
        dtype, scale, shift = self._dtype or torch.uint8, None, None
        is_fused = can_decode_to(dtype) and dtype != torch.uint8
        if self._affine_on_cpu is not None:
            is_fused &= len(self._affine_on_cpu[0]) in (1, 3)
            scale, shift = (each.reshape(-1) for each in self._affine_on_cpu)
        if not is_fused:
            dtype, scale, shift = torch.uint8, None, None
        decoded = tiles.decode(Colors(dtype, scale, shift, self._memory_format))
        flags = decoded.is_damaged
        if flags.is_cuda:
            flags = torch.empty_like(flags, device="cpu", pin_memory=True).copy_(flags, non_blocking=True)

        crops = decoded.crops if is_fused else [self(crop) for crop in decoded.crops]

        def check() -> None:
            for index in torch.nonzero(flags).flatten().tolist():
                redone = tiles.redo(index)
                if not is_final:
                    what = (
                        f"image {index} of a batch cannot be decoded on the device, and its batch has been transformed"
                    )
                    raise SampleError(f"{what}: use decode='workers'", row=index, stage="decode")
                for crop, pixels in zip(crops, redone, strict=True):
                    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
                    crop[index] = self(image.to(crop.device))[0]

        checks.append(check)
        return crops if tiles.is_multiple else crops[0]


def normalize(
    images: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    *,
    in_one_kernel: bool,
) -> torch.Tensor:
    """Return images * scale + shift, computed in float32, in the given dtype and memory format.

    Args:
        images: uint8 [N, C, H, W].
        scale: float32 [C, 1, 1].
        shift: float32 [C, 1, 1].
        dtype: The dtype of the result.
        memory_format: The memory format of the result.
        in_one_kernel: Whether to use a single torch operation, for which a GPU needs only one kernel. On a CPU, torch
            makes copies for this operation, so it is slower for large batches than several operations
            (benchmarks/results/device.md). The results are the same either way, except for float32's rounding.
    """
    if in_one_kernel:
        result = torch.empty(images.shape, dtype=dtype, device=images.device, memory_format=memory_format)
        return torch.addcmul(shift, images, scale, out=result)
    floats = images.to(torch.float32, memory_format=memory_format).mul_(scale).add_(shift)
    return floats.to(dtype).contiguous(memory_format=memory_format)


def _is_mask(tensor: torch.Tensor) -> bool:
    tv_tensors = sys.modules.get("torchvision.tv_tensors")
    return tv_tensors is not None and isinstance(tensor, tv_tensors.Mask)


def _as_affine(normalize: Normalize) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x / 255 - mean) / std as x * scale + shift, both float32 [C, 1, 1]."""
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1) for values in normalize)
    if not (std > 0).all():
        raise ValueError(f"std must be positive, got {list(normalize[1])}")
    return (1 / (255 * std)).float(), (-mean / std).float()
