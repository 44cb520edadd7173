"""Loaders with their own C++ decoders: DALI on the CPU, FFCV and turboloader."""

from __future__ import annotations

import importlib
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.loaders.job import RATIO, SCALE, SHORTER_SIDE, TARGET, Batch, Epochs, Job, Repeated


def make_dali(job: Job) -> Epochs:
    """Return the epochs of a DALI CPU pipeline that decodes only the crop and resizes it without antialiasing."""
    dali: Any = importlib.import_module("nvidia.dali")
    plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
    fn, types = dali.fn, dali.types
    pipeline = dali.Pipeline(
        batch_size=job.batch_size, num_threads=job.num_workers, device_id=None, prefetch_queue_depth=2, seed=0
    )
    resize = {"interp_type": types.INTERP_LINEAR, "antialias": False}
    with pipeline:
        # The buffer has the same size as those of the other loaders.
        content, label = fn.readers.file(
            file_root=str(job.data), random_shuffle=True, initial_fill=1000, name="reader", prefetch_queue_depth=2
        )
        if job.crop == "train":
            image = fn.decoders.image_random_crop(
                content, random_area=list(SCALE), random_aspect_ratio=list(RATIO), num_attempts=10
            )
            image = fn.resize(image, size=[TARGET, TARGET], **resize)
            image = fn.flip(image, horizontal=fn.random.coin_flip())
        else:
            image = fn.decoders.image(content)
            image = fn.resize(image, resize_shorter=SHORTER_SIDE, **resize)
            image = fn.crop(image, crop=(TARGET, TARGET))
        pipeline.set_outputs(image, label)
    iterator = plugin.DALIClassificationIterator(
        pipeline, reader_name="reader", last_batch_policy=plugin.LastBatchPolicy.PARTIAL, auto_reset=True
    )

    def iterate() -> Iterator[Batch]:
        for (batch,) in iterator:
            yield batch["data"], batch["label"]

    return Repeated(iterate)


def make_ffcv(job: Job) -> Epochs:
    """Return FFCV's loader, which always resizes by area averaging."""
    loader: Any = importlib.import_module("ffcv.loader")
    images: Any = importlib.import_module("ffcv.fields.rgb_image")
    basics: Any = importlib.import_module("ffcv.fields.basics")
    transforms: Any = importlib.import_module("ffcv.transforms")
    if job.crop == "train":
        steps = [
            images.RandomResizedCropRGBImageDecoder((TARGET, TARGET), scale=SCALE, ratio=RATIO),
            transforms.RandomHorizontalFlip(),
        ]
    else:
        steps = [images.CenterCropRGBImageDecoder((TARGET, TARGET), ratio=TARGET / SHORTER_SIDE)]
    return loader.Loader(  # type: ignore[no-any-return]
        str(job.data / "images.beton"),
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        order=loader.OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [*steps, transforms.ToTensor()],
            "label": [basics.IntDecoder(), transforms.ToTensor(), transforms.Squeeze()],
        },
    )


def make_turboloader(job: Job) -> Epochs:
    """Return turboloader's loader, which decodes only the crop, and always delivers float32 pixels from 0 to 1.

    turboloader's threads use all processors, and their number cannot be set.
    """
    turboloader: Any = importlib.import_module("turboloader")
    (path,) = job.data.glob("*.tar")
    with tarfile.open(path) as tar:
        contents = [tar.extractfile(member) for member in tar if member.name.endswith(".cls")]
        labels = np.array([int(content.read()) for content in contents if content is not None])
    loader = turboloader.DataLoader(
        str(path), batch_size=job.batch_size, image_size=TARGET, output_format="pytorch", shuffle=True, train_aug=True
    )

    def iterate() -> Iterator[Batch]:
        for images, meta in loader:
            yield images, labels[meta["indices"]]

    return Repeated(iterate)


def make_turboloader_raw(job: Job) -> Epochs:
    """Return turboloader's loader for memory-mapped pixels, which always delivers floating-point pixels."""
    turboloader: Any = importlib.import_module("turboloader")
    labels = np.load(job.data / "labels.npy")
    path, options = str(job.data / "images.tbl"), {"mean": None, "std": None, "hflip_prob": 0.5, "train_aug": True}
    loader = turboloader.TblRawImageLoader(path, job.batch_size, image_size=TARGET, **options)

    def iterate() -> Iterator[Batch]:
        for images, meta in loader:
            yield images, labels[meta["indices"]]

    return Repeated(iterate)
