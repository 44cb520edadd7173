"""The recipes in DALI, on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loaders.job import Batch, Epochs, Repeated
from benchmarks.recipes.pipelines import BLUR, SIZE, SMALL
from shardio.transforms.recipes import IMAGENET_MEAN


def make_dali(recipe: str, folder: Path, batch_size: int, num_workers: int) -> Epochs:
    """Return the epochs of a DALI CPU pipeline that applies a recipe to the images in class folders."""
    dali: Any = importlib.import_module("nvidia.dali")
    plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
    trivial: Any = importlib.import_module("nvidia.dali.auto_aug.trivial_augment")
    fn, types = dali.fn, dali.types

    def chance(p: float) -> Any:
        return fn.random.coin_flip(probability=p, dtype=types.BOOL)

    def between(low: float, high: float) -> Any:
        return fn.random.uniform(range=[low, high])

    def crop(image: Any, size: int, scale: Any, jitter: Sequence[float], blur: float, solarize: float) -> Any:
        cubic = {"interp_type": types.INTERP_CUBIC}
        image = fn.random_resized_crop(image, size=[size, size], random_area=list(scale), **cubic)
        image = fn.flip(image, horizontal=fn.random.coin_flip())
        if chance(0.8):
            factors = [between(1 - strength, 1 + strength) for strength in jitter[:3]]
            hue = between(-360 * jitter[3], 360 * jitter[3])
            image = fn.color_twist(image, brightness=factors[0], contrast=factors[1], saturation=factors[2], hue=hue)
        if chance(0.2):
            image = fn.hsv(image, saturation=0.0)
        if chance(blur):
            image = fn.gaussian_blur(image, window_size=BLUR[size], sigma=between(0.1, 2.0))
        if chance(solarize):
            is_dark = image < 128
            image = dali.fn.cast(is_dark * image + (1 - is_dark) * (255 - image), dtype=types.UINT8)
        return image

    @dali.pipeline_def(enable_conditionals=True, prefetch_queue_depth=2)  # type: ignore[untyped-decorator]
    def define() -> Any:
        content, label = fn.readers.file(file_root=str(folder), random_shuffle=True, initial_fill=1000, name="reader")
        if recipe == "resnet50":
            image = fn.decoders.image_random_crop(
                content, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], num_attempts=10
            )
            image = fn.resize(image, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
            image = fn.flip(image, horizontal=fn.random.coin_flip())
            image = trivial.trivial_augment_wide(image, max_translate_abs=32)
            if chance(0.1):
                area, aspect = between(0.02, 0.33), dali.math.exp(between(-1.2, 1.2))
                height, width = dali.math.sqrt(area * aspect), dali.math.sqrt(area / aspect)
                anchor = fn.stack(between(0, 1) * (1 - height), between(0, 1) * (1 - width))
                part = fn.stack(height, width)
                image = fn.erase(
                    image, anchor=anchor, shape=part, axis_names="HW", normalized=True, fill_value=list(IMAGENET_MEAN)
                )
            return image, label
        whole = fn.decoders.image(content)
        if recipe == "simclr":
            crops = [crop(whole, SIZE, (0.08, 1.0), (0.8, 0.8, 0.8, 0.2), 0.5, 0.0) for _ in range(2)]
        else:
            jitter = (0.4, 0.4, 0.2, 0.1)
            crops = [crop(whole, SIZE, (0.4, 1.0), jitter, 1.0, 0.0), crop(whole, SIZE, (0.4, 1.0), jitter, 0.1, 0.2)]
            crops += [crop(whole, SMALL, (0.05, 0.4), jitter, 0.5, 0.0) for _ in range(8)]
        return (*crops, label)

    pipeline = define(batch_size=batch_size, num_threads=num_workers, device_id=None, seed=0)
    num_crops = {"resnet50": 1, "simclr": 2, "dino": 10}[recipe]
    names = [f"crop{number}" for number in range(num_crops)]
    iterator = plugin.DALIGenericIterator(
        [pipeline],
        [*names, "label"],
        reader_name="reader",
        last_batch_policy=plugin.LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )

    def iterate() -> Iterator[Batch]:
        for (batch,) in iterator:
            images = [batch[name] for name in names]
            yield (images[0] if num_crops == 1 else images), batch["label"]

    return Repeated(iterate)
