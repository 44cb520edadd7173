"""Loaders with their own formats, which store the JPEGs unchanged: MosaicML Streaming, LitData, Hugging Face."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.loaders.crops import make_batch, use_one_thread, use_opencv
from benchmarks.loaders.job import TARGET, Batch, Crop, Epochs, Job


def make_mosaic(job: Job) -> Epochs:
    """Return MosaicML's StreamingDataset of local shards. Like MosaicML's own datasets, it decodes sample by sample."""
    streaming: Any = import_streaming()
    base: Any = streaming.StreamingDataset

    class Images(base):  # type: ignore[misc]  # without types
        """Samples that are decoded one by one."""

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return _load(sample["image"], job.crop), sample["label"]

    streaming.base.util.clean_stale_shared_memory()
    dataset = Images(local=str(job.data), batch_size=job.batch_size, shuffle=True)
    return streaming.StreamingDataLoader(dataset, **_options(job))  # type: ignore[no-any-return]


def make_small_sequential(job: Job) -> Epochs:
    """Return MosaicML's StreamingDataset of bytes, in sequential order."""
    return _make_small(job, shuffle=False)


def make_small_shuffled(job: Job) -> Epochs:
    """Return MosaicML's StreamingDataset of bytes, in shuffled order."""
    return _make_small(job, shuffle=True)


def make_litdata(job: Job) -> Epochs:
    """Return LitData's StreamingDataset of local chunks. It decodes sample by sample, as LitData's README shows."""
    litdata: Any = importlib.import_module("litdata")

    class Images(litdata.StreamingDataset):  # type: ignore[misc]  # without types
        """Samples that are decoded one by one."""

        def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return _load(sample["image"], job.crop), sample["label"]

    dataset = Images(str(job.data), shuffle=True, drop_last=False)
    return litdata.StreamingDataLoader(dataset, **_options(job))  # type: ignore[no-any-return]


def make_huggingface(job: Job) -> Epochs:
    """Return Hugging Face's streaming dataset over Parquet; each of torch's workers reads some of the files."""
    datasets: Any = importlib.import_module("datasets")
    files = sorted(map(str, job.data.glob("*.parquet")))
    dataset = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    # If the buffer is filled from several files at a time, each epoch ends with a pause of 5 s (datasets 5.2.0).
    dataset = dataset.shuffle(seed=0, buffer_size=1000, max_buffer_input_shards=1)
    return DataLoader(dataset, collate_fn=partial(collate_rows, crop=job.crop), **_options(job))


def collate_rows(rows: Sequence[dict[str, Any]], *, crop: Crop) -> Batch:
    """Make a batch from rows of a table."""
    images = make_batch([row["image"] for row in rows], crop, use_opencv)
    return torch.from_numpy(images), torch.tensor([row["label"] for row in rows])


def collate_small(samples: Sequence[dict[str, bytes]]) -> list[bytes]:
    """Make a batch of bytes objects."""
    return [sample["bin"] for sample in samples]


def import_streaming() -> Any:
    """Import MosaicML Streaming, even if torchvision or transformers is missing or cannot be imported.

    MosaicML Streaming imports both packages for kinds of datasets and for checks that this benchmark does not use, so
    empty classes replace the classes of missing packages.
    """
    for package, modules in _STAND_INS.items():
        if not _loads(package):
            for module, classes in modules.items():
                stand_in = types.ModuleType(module)
                for name in classes:
                    setattr(stand_in, name, type(name, (), {}))
                sys.modules[module] = stand_in
    return importlib.import_module("streaming")


def _loads(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # A build for a different version of torch may raise any error.
        return False
    return True


_STAND_INS: dict[str, dict[str, tuple[str, ...]]] = {
    "torchvision": {
        "torchvision": (),
        "torchvision.datasets": ("VisionDataset",),
        "torchvision.transforms": (),
        "torchvision.transforms.functional": ("to_tensor",),
    },
    "transformers": {
        "transformers": (),
        "transformers.feature_extraction_utils": ("BatchFeature",),
        "transformers.tokenization_utils_base": ("BatchEncoding",),
        "transformers.models": (),
        "transformers.models.auto": (),
        "transformers.models.auto.tokenization_auto": ("AutoTokenizer",),
    },
}


def _make_small(job: Job, *, shuffle: bool) -> Epochs:
    streaming = import_streaming()
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(job.data), batch_size=job.batch_size, shuffle=shuffle)
    return streaming.StreamingDataLoader(dataset, collate_fn=collate_small, **_options(job))  # type: ignore[no-any-return]


def _load(content: bytes, crop: Crop) -> torch.Tensor:
    image = np.empty((TARGET, TARGET, 3), np.uint8)
    use_opencv(content, crop, image)
    return torch.from_numpy(image)


def _options(job: Job) -> dict[str, Any]:
    return {
        "batch_size": job.batch_size,
        "num_workers": job.num_workers,
        "worker_init_fn": use_one_thread,
        "persistent_workers": job.is_persistent,
        "prefetch_factor": 4,
    }
