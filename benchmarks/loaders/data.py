"""Create the data in every candidate's format, once in each work directory.

``python -m benchmarks.loaders.data WORK STORAGE NUM_SMALL`` creates one format from ``WORK/folder``. Each format is
created in its own process, which keeps the libraries apart.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loaders.files import list_files

NUM_SHARDS = 16
"""The number of shards: enough for loaders that distribute whole shards to eight workers."""

NUM_TINY = 256
"""The number of samples in the dataset that is read for many epochs."""

SMALL_SIZE = 1024
"""The size of a small sample in bytes."""


def copy_images(images: Path, work: Path, num_samples: int) -> None:
    """Copy class folders to ``work/folder``, repeatedly and with new names, until there are enough samples.

    A comment in each JPEG holds its number, so no two files have equal contents, and a cache must hold all of them.
    """
    done = work / "source.json"
    source = {"images": str(images.resolve()), "num_samples": num_samples, "numbered": True}
    if done.exists():
        if json.loads(done.read_text()) != source:
            raise SystemExit(f"{work} contains different data, {done.read_text()}: pass another --work, or delete it")
        return
    paths = [path for path in sorted(images.glob("*/**/*")) if path.suffix.lower() in {".jpg", ".jpeg"}]
    if not paths:
        raise SystemExit(f"{images} has no class folders with JPEGs")
    if num_samples < len({path.relative_to(images).parts[0] for path in paths}):
        raise SystemExit(f"--samples must be at least the number of classes, got {num_samples}")
    shutil.rmtree(work / "folder", ignore_errors=True)
    for number in range(num_samples):
        # Samples are spread evenly over all images, so even a few samples contain every class.
        path = paths[number * len(paths) // num_samples if num_samples < len(paths) else number % len(paths)]
        folder = work / "folder" / path.relative_to(images).parts[0]
        folder.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        comment = b"\xff\xfe\0\x08" + f"{number:06d}".encode()
        (folder / f"{number:06d}.jpg").write_bytes(content[:2] + comment + content[2:])
    done.write_text(json.dumps(source))


def prepare(work: Path, storage: str, num_small: int) -> Path:
    """Write the data in a format unless it exists, and return its directory."""
    target, done = work / storage, work / f"{storage}.done"
    if storage == "folder":
        return target
    note = str(num_small) if storage.startswith("small") else "made"
    if not done.exists() or done.read_text() != note:
        if storage in _NEEDS:
            prepare(work, _NEEDS[storage], num_small)
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.loaders.data", str(work), storage, str(num_small)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"creating {storage} failed:\n{made.stderr[-3000:]}")
        done.write_text(note)
    return target


def small_samples(number: int) -> Iterator[bytes]:
    """Yield 1 KiB samples of random bytes, the same on every call."""
    generator = np.random.default_rng(0)
    for start in range(0, number, 1000):
        block = generator.bytes(min(1000, number - start) * SMALL_SIZE)
        yield from (block[at : at + SMALL_SIZE] for at in range(0, len(block), SMALL_SIZE))


def fingerprint(content: bytes) -> int:
    """Return a number that identifies a sample."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _pack(num_shards: int = NUM_SHARDS, **settings: Any) -> Callable[[Path, Path, int], None]:
    def make(work: Path, target: Path, _: int) -> None:
        import shardio

        num_samples = len(list_files(work / "folder"))
        shardio.pack(work / "folder", target, max_shard_samples=-(-num_samples // num_shards), **settings)

    return make


def _make_tiny(work: Path, target: Path, _: int) -> None:
    import shardio

    folder = work / "tiny-folder"
    for path, label in list_files(work / "folder")[:NUM_TINY]:
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / str(label))
    shardio.pack(folder, target, jpeg="tile", max_shard_samples=NUM_TINY // 4)


def _unpack(storage: str) -> Callable[[Path, Path, int], None]:
    def make(work: Path, target: Path, _: int) -> None:
        for shard in sorted((work / storage).glob("*.tar")):
            with tarfile.open(shard) as tar:
                for member in tar:
                    if member.name.endswith(".jpg"):
                        content = tar.extractfile(member)
                        assert content is not None, "a file"
                        path = target / member.name
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(content.read())

    return make


def _make_raw(work: Path, target: Path, _: int) -> None:
    """Store the pixels of all re-encoded images, one after another, as an array that can be mapped into memory."""
    import simplejpeg

    target.mkdir(parents=True)
    files, start, places = list_files(work / "folder-256"), 0, []
    for path, label in files:
        height, width, _, _ = simplejpeg.decode_jpeg_header(Path(path).read_bytes())
        places.append((start, height, width, label))
        start += 3 * height * width
    pixels = np.lib.format.open_memmap(target / "pixels.npy", mode="w+", dtype=np.uint8, shape=(start,))
    for (path, _), (start, height, width, _) in zip(files, places, strict=True):
        image = simplejpeg.decode_jpeg(Path(path).read_bytes())
        pixels[start : start + 3 * height * width] = image.reshape(-1)
    pixels.flush()
    np.save(target / "places.npy", np.array(places))


def _make_small(_: Path, target: Path, num_small: int) -> None:
    target.mkdir(parents=True)
    samples = small_samples(num_small)
    per_shard = -(-num_small // NUM_SHARDS)
    for shard in range(NUM_SHARDS):
        with tarfile.open(target / f"small-{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * per_shard, min((shard + 1) * per_shard, num_small)):
                member = tarfile.TarInfo(f"{number:09d}.bin")
                member.size = SMALL_SIZE
                tar.addfile(member, io.BytesIO(next(samples)))
    import shardio

    shardio.ShardDataset(target, fields="bin")  # Opening a dataset for the first time writes the indexes.


def _make_small_mds(_: Path, target: Path, num_small: int) -> None:
    _write_mds(target, {"bin": "bytes"}, ({"bin": content} for content in small_samples(num_small)))


def _make_mds(work: Path, target: Path, _: int) -> None:
    samples = ({"image": Path(path).read_bytes(), "label": label} for path, label in _shuffled(work))
    _write_mds(target, {"image": "bytes", "label": "int"}, samples)


def _write_mds(target: Path, columns: dict[str, str], samples: Iterator[dict[str, Any]]) -> None:
    from benchmarks.loaders.peers_streaming import import_streaming

    with import_streaming().MDSWriter(out=str(target), columns=columns, size_limit="64mb") as writer:
        for sample in samples:
            writer.write(sample)


def _make_litdata(work: Path, target: Path, _: int) -> None:
    litdata: Any = importlib.import_module("litdata")
    litdata.optimize(
        fn=read_sample, inputs=_shuffled(work), output_dir=str(target), num_workers=1, chunk_bytes="64MB", verbose=False
    )


def read_sample(file: tuple[str, int]) -> dict[str, Any]:
    """Return a file's bytes and its label."""
    return {"image": Path(file[0]).read_bytes(), "label": file[1]}


def _make_parquet(work: Path, target: Path, _: int) -> None:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    target.mkdir(parents=True)
    files = _shuffled(work)
    for shard in range(NUM_SHARDS):
        samples = [read_sample(file) for file in files[shard::NUM_SHARDS]]
        # Hugging Face's guide to datasets recommends small row groups for images, so that a reader needs little memory.
        parquet.write_table(arrow.Table.from_pylist(samples), target / f"{shard:03d}.parquet", row_group_size=100)


def _make_energon(work: Path, target: Path, num_small: int) -> None:
    webdataset: Any = importlib.import_module("megatron.energon.flavors.webdataset.base_webdataset")
    target.mkdir(parents=True)
    shards = sorted((work / "shards").glob("*.tar"))
    for shard in shards:
        shutil.copy(shard, target / shard.name)
    prepare_dataset = webdataset.BaseWebdatasetFactory.prepare_dataset
    prepare_dataset(target, [shard.name for shard in shards], split_parts_ratio=[("train", 1.0)], workers=2)
    (target / ".nv-meta" / "dataset.yaml").write_text(
        "sample_type:\n  __module__: megatron.energon\n  __class__: ImageClassificationSample\n"
        "field_map:\n  image: jpg\n  label: cls\n"
    )


def _make_ffcv(**settings: Any) -> Callable[[Path, Path, int], None]:
    def make(work: Path, target: Path, _: int) -> None:
        writer: Any = importlib.import_module("ffcv.writer")
        fields: Any = importlib.import_module("ffcv.fields")
        target.mkdir(parents=True)
        columns = {"image": fields.RGBImageField(**settings), "label": fields.IntField()}
        written = writer.DatasetWriter(str(target / "images.beton"), columns, num_workers=2)
        written.from_indexed_dataset(_Decoded(_shuffled(work)))

    return make


class _Decoded:
    def __init__(self, files: list[tuple[str, int]]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import PIL.Image

        path, label = self._files[index]
        return np.asarray(PIL.Image.open(path).convert("RGB")), label


def _make_turboloader(work: Path, target: Path, _: int) -> None:
    """Store the pixels of all images in turboloader's format, all at the same size."""
    turboloader: Any = importlib.import_module("turboloader")

    target.mkdir(parents=True)
    (path,) = (work / "tar").glob("*.tar")
    turboloader.preprocess_to_tbl(str(path), str(target / "images.tbl"), image_size=(192, 256), num_workers=2)
    with tarfile.open(path) as tar:
        contents = [tar.extractfile(member) for member in tar if member.name.endswith(".cls")]
        np.save(target / "labels.npy", [int(content.read()) for content in contents if content is not None])


def _shuffled(work: Path) -> list[tuple[str, int]]:
    files = list_files(work / "folder")
    return [files[number] for number in np.random.default_rng(0).permutation(len(files)).tolist()]


_MAKERS: dict[str, Callable[[Path, Path, int], None]] = {
    "shards": _pack(),
    "tar": _pack(num_shards=1, max_shard_size="1TB"),
    "tiled": _pack(jpeg="tile"),
    "tiled-400": _pack(jpeg="reencode", max_side=400, quality=90),
    "tiled-256": _pack(jpeg="reencode", max_side=256, quality=90),
    "ppm-256": _pack(convert_to="ppm", max_side=256),
    "turboloader-256": _make_turboloader,
    "tiny": _make_tiny,
    "folder-400": _unpack("tiled-400"),
    "folder-256": _unpack("tiled-256"),
    "raw-256": _make_raw,
    "small": _make_small,
    "small-mds": _make_small_mds,
    "mds": _make_mds,
    "litdata": _make_litdata,
    "parquet": _make_parquet,
    "energon": _make_energon,
    "ffcv-400": _make_ffcv(write_mode="jpg", max_resolution=400, jpeg_quality=90),
    "ffcv-256": _make_ffcv(write_mode="raw", max_resolution=256),
}
_NEEDS = {
    "folder-400": "tiled-400",
    "folder-256": "tiled-256",
    "raw-256": "folder-256",
    "energon": "shards",
    "turboloader-256": "tar",
}

if __name__ == "__main__":
    _MAKERS[sys.argv[2]](Path(sys.argv[1]), Path(sys.argv[1]) / sys.argv[2], int(sys.argv[3]))
