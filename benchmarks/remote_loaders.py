"""The loaders that bench_remote compares: each reads photographs from a local folder or from an object store."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import shardio
from shardio.libraries import import_library
from shardio.storage import walk_files

BATCH_SIZE = 64
NUM_WORKERS = 2

Loader = Callable[[str, Path, dict[str, str]], Callable[[int], Iterable[Any]]]
"""A function that returns a second function, which returns the batches of an epoch, given the epoch's number.

The arguments of the first function are the data's location, an empty folder for a cache, and options: the store's
options, and ``local``, the path of the local copy of the data.
"""


def load_shardio(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read packed shards."""
    from shardio.transforms import RandomResizedCrop

    dataset = shardio.ShardDataset(
        source, shuffle=True, transform=RandomResizedCrop(224), storage_options=options, cache=cache
    )
    loader = shardio.DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)

    def epoch(number: int) -> Iterable[Any]:
        loader.set_epoch(number)
        return loader

    return epoch


def load_shardio_raw(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read class folders of images."""
    from shardio.transforms import RandomResizedCrop

    folder = shardio.ImageFolder(source, RandomResizedCrop(224), storage_options=options, cache=cache)
    loader = shardio.DataLoader(
        folder, BATCH_SIZE, num_workers=NUM_WORKERS, sampler=shardio.EpochSampler(folder, batch_size=BATCH_SIZE)
    )

    def epoch(number: int) -> Iterable[Any]:
        loader.set_epoch(number)
        return loader

    return epoch


def load_webdataset(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read shardio's shards with WebDataset and a shuffle buffer of 1,000 samples. curl fetches remote shards."""
    wds: Any = importlib.import_module("webdataset")
    import torch

    transform = _usual_transform()
    names = sorted(path.name for path in Path(options["local"]).glob("*.tar"))
    cache_dir = str(cache) if "://" in source else None
    dataset = (
        wds.WebDataset([f"{source}/{name}" for name in names], shardshuffle=100, cache_dir=cache_dir, nodesplitter=None)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, lambda label: label)
    )
    loader: Iterable[Any] = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    return lambda number: loader


def load_mosaic(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read MDS shards with StreamingDataset."""
    import torch
    from PIL import Image

    import_library("torchvision")  # streaming imports it.
    streaming: Any = importlib.import_module("streaming")
    transform = _usual_transform()

    class Dataset(streaming.StreamingDataset):  # type: ignore[misc]  # without types
        def __getitem__(self, index: int) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return transform(Image.open(io.BytesIO(sample["jpg"])).convert("RGB")), sample["cls"]

    is_remote = "://" in source
    dataset = Dataset(
        remote=source if is_remote else None,
        local=str(cache / "mds") if is_remote else source,
        shuffle=True,
        batch_size=BATCH_SIZE,
    )
    loader: Iterable[Any] = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    return lambda number: loader


def _usual_transform() -> Callable[[Any], Any]:
    import_library("torchvision")
    transforms: Any = importlib.import_module("torchvision.transforms.v2")
    found: Callable[[Any], Any] = transforms.Compose(
        [transforms.RandomResizedCrop(224, antialias=True), transforms.PILToTensor()]
    )
    return found


def read_for_litdata(path: str) -> dict[str, Any]:
    """Return a sample. LitData calls this function in its workers.

    The content is an array, because LitData decodes JPEGs in bytes objects with torchvision's own decoder, which some
    builds of torchvision lack.
    """
    return {"jpg": np.fromfile(path, np.uint8), "cls": 0}


def write_litdata(source: Path, out: Path) -> None:
    """Write LitData's chunks, with two workers."""
    _import_litdata().optimize(
        fn=read_for_litdata,
        inputs=list(map(str, walk_files(source))),
        output_dir=str(out),
        chunk_bytes=64 * 2**20,
        num_workers=2,
        verbose=False,
    )


def load_litdata(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read LitData's chunks with StreamingDataset."""
    from PIL import Image

    litdata: Any = _import_litdata()
    transform = _usual_transform()

    class Dataset(litdata.StreamingDataset):  # type: ignore[misc]  # without types
        def __getitem__(self, index: Any) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return transform(Image.open(io.BytesIO(sample["jpg"].tobytes())).convert("RGB")), sample["cls"]

    dataset = Dataset(source, cache_dir=str(cache), shuffle=True, storage_options=_name_for_boto(options))
    loader: Iterable[Any] = litdata.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
    return lambda number: loader


def load_litdata_raw(source: str, cache: Path, options: dict[str, str]) -> Callable[[int], Iterable[Any]]:
    """Read images with StreamingRawDataset, which keeps them in its cache. The local copy provides the file names."""
    import torch
    from PIL import Image

    litdata = _import_litdata()
    files: Any = importlib.import_module("litdata.raw.indexer")
    transform = _usual_transform()
    local = Path(options["local"])

    class Listed(files.BaseIndexer):  # type: ignore[misc]  # without types
        """An indexer that lists the files of the local copy: LitData's own indexer needs one more S3 client."""

        def discover_files(self, input_dir: str, storage_options: Any) -> Any:
            raise NotImplementedError  # Only LitData's build_or_load_index, overridden below, calls this.

        def build_or_load_index(self, *arguments: Any, **more: Any) -> list[Any]:
            return [
                files.FileMetadata(path=f"{source}/{path.relative_to(local)}", size=path.stat().st_size)
                for path in sorted(local.rglob("*.jpg"))
            ]

    dataset = litdata.StreamingRawDataset(
        source,
        cache_dir=str(cache),
        cache_files=True,
        indexer=Listed(),
        storage_options=_name_for_boto(options),
        transform=lambda content: transform(Image.open(io.BytesIO(content)).convert("RGB")),
    )
    loader: Iterable[Any] = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, shuffle=True
    )
    return lambda number: loader


def _import_litdata() -> Any:
    import_library("torchvision")  # litdata imports it.
    downloader: Any = importlib.import_module("litdata.streaming.downloader")
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # By default, obstore refuses a store without TLS.
    return importlib.import_module("litdata")


def _name_for_boto(options: dict[str, str]) -> dict[str, str]:
    names = {
        "endpoint": "endpoint_url",
        "region": "region_name",
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
    }
    return {name: options[ours] for ours, name in names.items()}


PACKED: dict[str, tuple[str, Loader]] = {
    "shardio": ("shards", load_shardio),
    "webdataset": ("shards", load_webdataset),
    "mosaic": ("mds", load_mosaic),
    "litdata": ("litdata", load_litdata),
}
"""The format that each candidate reads, and its loader."""

RAW: dict[str, tuple[str, Loader]] = {
    "shardio raw": ("images", load_shardio_raw),
    "litdata raw": ("images", load_litdata_raw),
}
"""The format and the loader of each candidate that reads single images."""
