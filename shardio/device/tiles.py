"""Prepare images on the device that their batch was copied to: decode tiles, and normalize and cast the images.

kernel/stages.h describes the stages. On CUDA, they run on the current stream; on the CPU, the kernel runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.device.streams import Check
from shardio.errors import SampleError
from shardio.images.tiled import COUNTED, TiledChunk, TiledLayout, divide_images, lay_out, locate
from shardio.kernel import require_functions
from shardio.kernel.functions import CHUNK_ALIGNMENT
from shardio.kernel.records import BATCH, BFLOAT16, FLOAT16, FLOAT32, TARGET, TILED_IMAGE, UINT8

MAX_SCRATCH = 512 << 20
"""The maximum size, in bytes, of the memory for the stages' intermediate results, unless one image needs more."""

SCRATCH_STEP = 32 << 20
"""Memory for intermediate results, if at least this many bytes, is rounded up to a multiple of this number."""

ALIGNMENT = 256
"""The alignment of arrays on a device, in bytes."""

_DTYPES = {torch.uint8: UINT8, torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}

Normalize = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, for pixels scaled to [0, 1]."""


class Colors(NamedTuple):
    """The conversion of colors: each color becomes color * scale + shift, in a dtype.

    Attributes:
        dtype: The dtype of the images.
        scale: float32 [3], for red, green and blue; None for 1.
        shift: float32 [3]; None for 0.
        memory_format: The memory format of the images.
    """

    dtype: torch.dtype
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    memory_format: torch.memory_format


class Decoded(NamedTuple):
    """Decoded images.

    Attributes:
        crops: The images of each crop, [N, 3, height, width].
        is_damaged: int32 [N], on the device: not 0 for images whose pixels are arbitrary.
    """

    crops: list[torch.Tensor]
    is_damaged: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledImages:
    """The images of a batch as tiles, which a device decodes.

    Attributes:
        chunks: The memory of each chunk, uint8 [bytes].
        images: TILED_IMAGE [N] without the fields that only the stages need: a copy on the CPU.
        num_images: The number of images in each chunk.
        sizes: The height and width of each crop.
        is_multiple: Whether the images have several crops, those of a MultiCrop.
        redo: A function that decodes an image on the CPU, given its index. It returns the image's crops, uint8
            [height, width, 3], or raises a SampleError that names the image.
    """

    chunks: Sequence[torch.Tensor]
    images: NDArray[np.void]
    num_images: Sequence[int]
    sizes: tuple[tuple[int, int], ...]
    is_multiple: bool
    redo: Callable[[int], list[NDArray[np.uint8]]]

    @classmethod
    def join(
        cls,
        chunks: Sequence[TiledChunk],
        memory: Sequence[torch.Tensor],
        redo: Callable[[int], list[NDArray[np.uint8]]],
        *,
        is_multiple: bool,
    ) -> TiledImages:
        """Join the chunks of a batch, which have the same crop sizes, given the memory of each, uint8 [bytes]."""
        used = [each[: chunk.num_bytes] for each, chunk in zip(memory, chunks, strict=True)]
        # A chunk that was received in a message may begin at an unaligned address.
        used = [each if each.data_ptr() % CHUNK_ALIGNMENT == 0 else each.clone() for each in used]
        records = [
            each.numpy()[: chunk.num_images * TILED_IMAGE.itemsize].view(TILED_IMAGE)[COUNTED]
            for each, chunk in zip(used, chunks, strict=True)
        ]
        return cls(
            chunks=used,
            images=np.concatenate(records),
            num_images=[chunk.num_images for chunk in chunks],
            sizes=chunks[0].sizes,
            is_multiple=is_multiple,
            redo=redo,
        )

    def __len__(self) -> int:
        return sum(self.num_images)

    def pin_memory(self) -> TiledImages:
        """Return the images in pinned memory."""
        return replace(self, chunks=[each if each.is_pinned() else each.pin_memory() for each in self.chunks])

    def to(self, device: torch.device, *, non_blocking: bool = False) -> TiledImages:
        """Copy the tiles to a device."""
        if device.type == "cpu":
            return self
        stops = list(accumulate(_round_up(len(each), ALIGNMENT) for each in self.chunks))
        memory = torch.empty(stops[-1], dtype=torch.uint8, device=device)
        copies = [memory[start : start + len(each)] for start, each in zip([0, *stops], self.chunks, strict=False)]
        for copied, each in zip(copies, self.chunks, strict=True):
            copied.copy_(each, non_blocking=non_blocking)
        return replace(self, chunks=copies)

    def decode(self, colors: Colors) -> Decoded:
        """Decode the images on the device where the tiles are; on CUDA, on the current stream.

        Args:
            colors: The conversion of colors, to uint8, float32, float16 or bfloat16.
        """
        device = self.chunks[0].device
        form: dict[str, Any] = {"dtype": colors.dtype, "memory_format": colors.memory_format, "device": device}
        # The stages run in the current context, and on a stream of the current device.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            crops = [torch.empty((len(self), 3, *size), **form) for size in self.sizes]
            is_damaged = torch.zeros(len(self), dtype=torch.int32, device=device)
            locations = locate(
                [(each.data_ptr(), len(each), count) for each, count in zip(self.chunks, self.num_images, strict=True)]
            )
            for group in divide_images(self.images, MAX_SCRATCH):
                layout = lay_out(self.images[group], locations[group], self.sizes)
                self._decode_group(layout, [crop[group] for crop in crops], is_damaged[group], colors)
        return Decoded(crops, is_damaged)

    def _decode_group(
        self, layout: TiledLayout, crops: Sequence[torch.Tensor], is_damaged: torch.Tensor, colors: Colors
    ) -> None:
        device, num_images = is_damaged.device, len(is_damaged)
        control = _Control(layout.locations, _describe_targets(crops, colors), device)
        control.batch["num_images"], control.batch["num_crops"] = num_images, len(crops)
        control.batch["is_damaged"] = is_damaged.data_ptr()
        starts = [0, *accumulate(_round_up(length, ALIGNMENT) for length in layout.lengths.values())]
        # Sizes that differ little from batch to batch would fragment the allocator's memory.
        num_bytes = starts[-1] if starts[-1] < SCRATCH_STEP else _round_up(starts[-1], SCRATCH_STEP)
        scratch = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for (name, length), start in zip(layout.lengths.items(), starts, strict=False):
            control.batch[name] = scratch.data_ptr() + start
            if name == "coefficients":
                scratch[start : start + length].zero_()
        _find_stages(device).run(control.send(), layout.most, self.sizes, num_images)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _describe_targets(crops: Sequence[torch.Tensor], colors: Colors) -> NDArray[np.void]:
    targets = np.zeros(len(crops), TARGET)
    for target, images in zip(targets, crops, strict=True):
        target["pixels"], (target["height"], target["width"]) = images.data_ptr(), images.shape[2:]
        strides = zip(("image_stride", "color_stride", "row_stride", "column_stride"), images.stride(), strict=True)
        for name, stride in strides:
            target[name] = stride
    targets["dtype"] = _DTYPES[colors.dtype]
    targets["scale"] = 1 if colors.scale is None else colors.scale.numpy()
    targets["shift"] = 0 if colors.shift is None else colors.shift.numpy()
    return targets


class _Control:
    """The records of a batch, which are copied to the device together."""

    def __init__(self, locations: NDArray[np.void], targets: NDArray[np.void], device: torch.device) -> None:
        parts = (np.zeros(1, BATCH), locations, targets)
        starts = [0, *accumulate(part.nbytes for part in parts)]
        # The allocator of pinned memory reuses this memory only after the copy.
        self._records = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self._device = self._records if device.type == "cpu" else torch.empty_like(self._records, device=device)
        memory = self._records.numpy()
        for start, part in zip(starts, parts, strict=False):
            memory[start : start + part.nbytes] = part.view(np.uint8)
        self.batch = memory[: BATCH.itemsize].view(BATCH)
        self.batch["locations"], self.batch["targets"] = (self._device.data_ptr() + start for start in starts[1:3])

    def send(self) -> torch.Tensor:
        """Copy the records to the device."""
        return self._device if self._device is self._records else self._device.copy_(self._records, non_blocking=True)


class _ProcessorStages:
    """The stages on the processor."""

    def run(self, batch: torch.Tensor, most: Sequence[int], sizes: Sequence[tuple[int, int]], num_images: int) -> None:
        """Run all stages.

        Args:
            batch: A BATCH on the device.
            most: The maximum number of threads for an image in each stage except the last.
            sizes: The height and width of each crop.
            num_images: The number of images.
        """
        require_functions().decode_tiles(batch.data_ptr())


class _CudaStages:
    """The stages on a CUDA device.

    Args:
        device: The device, with an index.

    Raises:
        ImportError: If shardio was built without the stages for this device, or the package cuda-core is missing.
    """

    NAMES = ("make_lookup", "find_weights", "decode_tile", "transform_block", "make_color")
    THREADS = 128
    """The number of threads in a block."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
        except ImportError as error:
            raise ImportError(
                f"decode='device' needs the packages cuda-core and cuda-bindings ({error}): pip install "
                "'shardio-loader[cuda]' and, with torch before 2.10, cuda-bindings"
            ) from error
        from shardio.kernel.targets import find_cubin

        cubin = find_cubin(torch.cuda.get_device_capability(device))
        with torch.cuda.device(device):
            Device(device.index).set_current()  # This initializes cuda-core. torch restores its own current device.
            code = ObjectCode.from_cubin(cubin)
            self._stages = [code.get_kernel(f"shardio_{name}") for name in (*self.NAMES, "render_pixel")]
        self._launch, self._config, self._stream, self._device = launch, LaunchConfig, Stream, device

    def run(self, batch: torch.Tensor, most: Sequence[int], sizes: Sequence[tuple[int, int]], num_images: int) -> None:
        stream = self._stream.from_handle(torch.cuda.current_stream(self._device).cuda_stream)
        grids = [(count, num_images, 1) for count in most] + [(max(map(prod, sizes)), num_images, len(sizes))]
        for stage, (count, *others) in zip(self._stages, grids, strict=True):
            if count:
                grid = (-(-count // self.THREADS), *others)
                self._launch(stream, self._config(grid=grid, block=self.THREADS), stage, batch.data_ptr())


@cache
def _find_stages(device: torch.device) -> _CudaStages | _ProcessorStages:
    return _CudaStages(device) if device.type == "cuda" else _ProcessorStages()


def check_device(device: torch.device) -> None:
    """Check that the images of batches can be decoded on a device.

    Raises:
        ImportError: If shardio was built without the code for this device, or the package cuda-core is missing.
        ValueError: If the device is neither a CUDA device nor the CPU.
    """
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.cuda is None):
        raise ValueError(f"decode='device' needs a CUDA device, got {str(device)!r}: omit decode")
    if device.type == "cpu":
        require_functions()
    _find_stages(device)


class ImagePreparation:
    """A function that prepares images, which are uint8 tensors [N, C, H, W].

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
            checks: The list to add a function to. The function decodes on the CPU the images that the device could not
                decode, and raises SampleError if they are damaged. Call it after the stream has decoded the batch.
            is_final: Whether nothing else changes the images before the function is called.

        Returns:
            The images [N, C, H, W], or those of each crop of a MultiCrop.
        """
        dtype, scale, shift = self._dtype or torch.uint8, None, None
        is_fused = dtype in _DTYPES and dtype != torch.uint8
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
                    what = f"image {index} of a batch cannot be decoded on the device"
                    message = f"{what}, and its batch has been transformed: use decode='workers'"
                    raise SampleError(message, row=index, stage="decode")
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
            makes copies for this operation, so for large batches this operation is slower than several separate ones
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
    """Return (x / 255 - mean) / std as x * scale + shift, where scale and shift are float32 [C, 1, 1]."""
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1) for values in normalize)
    if not (std > 0).all():
        raise ValueError(f"std must be positive, got {list(normalize[1])}")
    return (1 / (255 * std)).float(), (-mean / std).float()
