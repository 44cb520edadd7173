"""Other libraries that make the same crops, each used as in typical code."""

from __future__ import annotations

import importlib
import importlib.util
import io
from typing import Any

import cv2
import numpy as np
import PIL.Image
import simplejpeg

from benchmarks.photographs import TARGET, Chunk, Load, Task
from shardio.images import Pixels


def load_with_opencv(chunk: Chunk, rows: Pixels) -> None:
    """Decode whole images with OpenCV, and resize part of each one."""
    for content, task, row in zip(chunk.contents, chunk.tasks, rows, strict=True):
        pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
        _resize_with_opencv(pixels, task, row)  # type: ignore[arg-type]  # uint8, as the flag says


def load_with_simplejpeg(chunk: Chunk, rows: Pixels) -> None:
    """Decode whole images with simplejpeg, and resize part of each one with OpenCV."""
    for content, task, row in zip(chunk.contents, chunk.tasks, rows, strict=True):
        _resize_with_opencv(simplejpeg.decode_jpeg(content), task, row)


def load_with_pillow(chunk: Chunk, rows: Pixels) -> None:
    """Decode with Pillow, at a smaller size if ``draft`` allows it, and resize with antialiasing."""
    for content, task, row in zip(chunk.contents, chunk.tasks, rows, strict=True):
        (top, left, height, width), (new_height, new_width), window = task
        with PIL.Image.open(io.BytesIO(content)) as file:
            before = file.width, file.height
            file.draft("RGB", (-(-before[0] * new_width // width), -(-before[1] * new_height // height)))
            across, down = file.width / before[0], file.height / before[1]
            image = file.convert("RGB")
        corners = round(left * across), round(top * down), round((left + width) * across), round((top + height) * down)
        image = image.crop(corners).resize((new_width, new_height), PIL.Image.Resampling.BILINEAR)
        if task.is_windowed:
            image = image.crop((window[1], window[0], window[1] + window[3], window[0] + window[2]))
        row[...] = np.asarray(image)


def _resize_with_opencv(pixels: Pixels, task: Task, row: Pixels) -> None:
    (top, left, height, width), (new_height, new_width), window = task
    part = pixels[top : top + height, left : left + width]
    if not task.is_windowed:
        cv2.resize(part, (new_width, new_height), dst=row, interpolation=cv2.INTER_LINEAR)
        return
    resized = cv2.resize(part, (new_width, new_height), interpolation=cv2.INTER_LINEAR)
    row[...] = resized[window[0] : window[0] + window[2], window[1] : window[1] + window[3]]


def make_torchvision() -> Load:
    """Return torchvision's decoder, with torchvision's resize for tensors, which antialiases by default."""
    import torch

    torch.set_num_threads(1)
    decode_jpeg: Any = importlib.import_module("torchvision.io").decode_jpeg
    functional: Any = importlib.import_module("torchvision.transforms.v2.functional")

    def load(chunk: Chunk, rows: Pixels) -> None:
        for content, task, row in zip(chunk.contents, chunk.tasks, rows, strict=True):
            (top, left, height, width), size, window = task
            image = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            image = functional.resized_crop(image, top, left, height, width, list(size), antialias=True)
            image = functional.crop(image, *window)
            row[...] = image.permute(1, 2, 0).numpy()

    return load


def make_dali() -> Load:
    """Return DALI's region decoder on one CPU thread, with linear interpolation and no antialiasing."""
    dali: Any = importlib.import_module("nvidia.dali")
    pipelines: dict[int, Any] = {}

    def build(batch_size: int) -> Any:
        pipeline = dali.Pipeline(
            batch_size, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False
        )
        with pipeline:
            names = ("content", "corner", "shape", "size", "window")
            content, corner, shape, size, window = (dali.fn.external_source(name=name) for name in names)
            image = dali.fn.decoders.image_slice(content, corner, shape, axes=[0, 1])
            image = dali.fn.resize(image, size=size, interp_type=dali.types.INTERP_LINEAR, antialias=False)
            pipeline.set_outputs(dali.fn.slice(image, window, [TARGET, TARGET], axes=[0, 1]))
        pipeline.build()
        return pipeline

    def load(chunk: Chunk, rows: Pixels) -> None:
        if (pipeline := pipelines.get(len(rows))) is None:
            pipeline = pipelines[len(rows)] = build(len(rows))
        boxes = np.array([task.box for task in chunk.tasks], np.int32)
        pipeline.feed_input("content", [np.frombuffer(content, np.uint8) for content in chunk.contents])
        pipeline.feed_input("corner", list(boxes[:, :2]))
        pipeline.feed_input("shape", list(boxes[:, 2:]))
        pipeline.feed_input("size", list(np.array([task.size for task in chunk.tasks], np.float32)))
        pipeline.feed_input("window", list(np.array([task.window[:2] for task in chunk.tasks], np.int32)))
        (images,) = pipeline.run()
        for index, row in enumerate(rows):
            row[...] = images.at(index)

    return load


OPTIONAL = {"torchvision": ("torchvision", make_torchvision), "DALI, CPU": ("nvidia.dali", make_dali)}
"""The optional peers, by name: for each, the module that it needs and the function that creates it."""


def find_peers() -> tuple[dict[str, Load], list[str]]:
    """Return the peers that can run, and the names of those that are not installed or cannot be imported."""
    peers: dict[str, Load] = {
        "OpenCV": load_with_opencv,
        "Pillow, antialiased": load_with_pillow,
        "simplejpeg": load_with_simplejpeg,
    }
    missing = []
    for name, (module, make) in OPTIONAL.items():
        if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
            missing.append(name)
            continue
        try:
            peers[name] = make()
        except (ImportError, OSError, RuntimeError) as error:  # A peer may be built for a different version of torch.
            missing.append(f"{name} ({error})")
    return peers, missing
