"""Packing images in another format, and fields that are not images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio import PackError
from shardio.images.converting import convert_image
from shardio.images.jpeg import has_tiles
from shardio.packing import PackSettings, RunOptions, SourceOptions, pack_source
from shardio.progress import WorkProgress
from tests.files import read_files
from tests.sources import encode
from tests.tars import by_key

JPEG = encode(1)


def save(seed: int, image_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(encode(seed, suffix="png"))).save(file, image_format, **options)
    return file.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Images of six formats, one of them with a companion, and one that cannot be a JPEG."""
    files = {
        "a/jpeg.jpg": JPEG,
        "a/png.png": encode(2, suffix="png"),
        "a/webp.webp": encode(3, suffix="webp"),
        "b/bmp.bmp": save(4, "BMP"),
        "b/gif.gif": save(5, "GIF"),
        "b/gif.json": b'{"a": 1}',
        "b/really-a-jpeg.png": JPEG,
        "b/transparent.png": save_transparent(),
    }
    for name, content in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    return tmp_path / "in"


def save_transparent() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 4), 100, np.uint8)).save(file, "PNG")
    return file.getvalue()


def pack(source: Path, out: Path, **values: Any) -> Any:
    settings = PackSettings(**{"max_shard_size": 1 << 30, "max_shard_samples": 2, **values})
    options = SourceOptions(converts=settings.convert_to is not None)
    return pack_source(source, out, settings, options, RunOptions(num_workers=1))


def samples_of(out: Path) -> dict[str, dict[str, bytes]]:
    return by_key(*sorted(out.glob("*.tar")))


@pytest.mark.parametrize("check", [True, False])
def test_images_in_other_formats_are_converted_and_those_of_the_format_are_copied(
    source: Path, tmp_path: Path, check: bool
) -> None:
    result = pack(source, tmp_path / "out", convert_to="jpeg", check=check)
    found = samples_of(tmp_path / "out")
    assert set(found) == {"a/jpeg", "a/png", "a/webp", "b/bmp", "b/gif", "b/really-a-jpeg"}
    assert found["a/jpeg"]["jpg"] == found["b/really-a-jpeg"]["jpg"] == JPEG
    for key, suffix in (("a/png", "png"), ("a/webp", "webp"), ("b/bmp", "bmp"), ("b/gif", "gif")):
        assert found[key]["jpg"] == convert_image((source / f"{key}.{suffix}").read_bytes(), "jpeg", quality=90)
    assert found["b/gif"]["json"] == b'{"a": 1}'
    assert result.converted == {"PNG": 1, "WEBP": 1, "BMP": 1, "GIF": 1}
    assert result.manifest.fields == ("cls", "jpg", "json")
    assert result.manifest.pack["convert_to"] == "jpeg"
    (rejected,) = result.rejected
    assert rejected.file == "b/transparent.png"
    assert rejected.reason.startswith("cannot be converted to JPEG: has transparent pixels")
    assert result.mislabelled == []


@pytest.mark.parametrize("jpeg", ["tile", "reencode"])
def test_converted_jpegs_are_tiled_and_lose_quality_only_once(source: Path, tmp_path: Path, jpeg: str) -> None:
    pack(source, tmp_path / "out", convert_to="jpeg", jpeg=jpeg, max_side=24, quality=80)
    found = samples_of(tmp_path / "out")
    plain = convert_image((source / "a" / "png.png").read_bytes(), "jpeg", quality=80, max_side=24)
    expected = np.asarray(Image.open(io.BytesIO(plain)))
    assert expected.shape == (16, 24, 3)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(found["a/png"]["jpg"]))), expected)
    assert has_tiles(found["a/png"]["jpg"])


def test_png_is_lossless_and_webp_keeps_transparency(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "png", convert_to="png")
    found = samples_of(tmp_path / "png")
    assert len(found) == 7
    for key, suffix in (("a/jpeg", "jpg"), ("b/bmp", "bmp"), ("b/gif", "gif")):
        was = Image.open(io.BytesIO((source / f"{key}.{suffix}").read_bytes())).convert("RGB")
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(found[key]["png"])).convert("RGB")), np.asarray(was))
    pack(source, tmp_path / "webp", convert_to="webp", quality=50)
    assert Image.open(io.BytesIO(samples_of(tmp_path / "webp")["b/transparent"]["webp"])).mode == "RGBA"


def test_masks_are_never_converted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    mask = encode(7, suffix="png", mode="L")
    (tmp_path / "in" / "a.bmp").write_bytes(save(1, "BMP"))
    (tmp_path / "in" / "a.mask.png").write_bytes(mask)
    shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs", convert_to="webp")
    (sample,) = samples_of(tmp_path / "out").values()
    assert sample["mask.png"] == mask
    assert set(sample) == {"webp", "mask.png"}


def test_options_of_encoding_need_something_to_encode() -> None:
    for name, value in (("max_side", 8), ("quality", 50), ("to_srgb", True)):
        with pytest.raises(ValueError, match=r"applies only with --jpeg reencode .* or --convert-to"):
            PackSettings(max_shard_size=1, **{name: value})  # type: ignore[arg-type]


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    for name in ("en/a.wav", "en/a.txt", "en/a.json", "en/b.wav", "fr/c.wav", "fr/c.txt", "fr/d.txt", "fr/c.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    return tmp_path / "in"


def test_samples_are_the_files_with_the_first_field(sounds: Path, tmp_path: Path) -> None:
    settings = PackSettings(max_shard_size=1 << 20)
    result = pack_source(sounds, tmp_path / "out", settings, SourceOptions(fields=("wav", "txt")))
    assert samples_of(tmp_path / "out") == {
        "en/a": {"wav": b"en/a.wav", "txt": b"en/a.txt", "cls": b"0"},
        "en/b": {"wav": b"en/b.wav", "cls": b"0"},
        "fr/c": {"wav": b"fr/c.wav", "txt": b"fr/c.txt", "cls": b"1"},
    }
    ignored = [str(path.relative_to(sounds)) for path in result.ignored]
    assert sorted(ignored) == ["en/a.json", "fr/c.jpg", "fr/d.txt"]


def test_two_images_of_one_sample_are_fields_if_both_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(JPEG)
    (tmp_path / "in" / "a.png").write_bytes(encode(2, suffix="png"))
    with pytest.raises(PackError, match="have the same stem"):
        shardio.pack(tmp_path / "in", tmp_path / "out")
    shardio.pack(tmp_path / "in", tmp_path / "out", fields=[".JPG", "png"])
    (sample,) = samples_of(tmp_path / "out").values()
    assert set(sample) == {"jpg", "png"}


def test_a_directory_without_the_field_is_refused(sounds: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"holds no \.flac files, which --fields \(fields\) names first"):
        shardio.pack(sounds, tmp_path / "out", fields=["flac"])
    with pytest.raises(PackError, match=r"fr holds no \.json files, which --fields \(fields\) names first: add"):
        shardio.pack(sounds, tmp_path / "out", fields=["json"])
    with pytest.raises(TypeError, match="fields must be a list of suffixes"):
        shardio.pack(sounds, tmp_path / "out", fields="wav")
    with pytest.raises(ValueError, match="must be suffixes such as wav and txt"):
        shardio.pack(sounds, tmp_path / "out", fields=[])
    assert not (tmp_path / "out").exists()


def test_splits_of_other_files_than_images_are_recognised(sounds: Path, tmp_path: Path) -> None:
    (sounds / "en").rename(sounds / "train")
    (sounds / "fr").rename(sounds / "test")
    with pytest.raises(PackError, match="these look like the splits of a dataset"):
        shardio.pack(sounds, tmp_path / "out", fields=["wav"])


def test_an_interrupted_conversion_resumes(source: Path, tmp_path: Path) -> None:
    whole = pack(source, tmp_path / "whole", convert_to="webp", jpeg="tile")

    class Interrupt(WorkProgress):
        def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
            if (tmp_path / "out" / "shard-000001.tar").exists():
                raise KeyboardInterrupt

    settings = PackSettings(max_shard_size=1 << 30, max_shard_samples=2, convert_to="webp", jpeg="tile")
    options, run = SourceOptions(converts=True), RunOptions(num_workers=1)
    with pytest.raises(KeyboardInterrupt):
        pack_source(source, tmp_path / "out", settings, options, run, Interrupt())
    resumed = pack_source(source, tmp_path / "out", settings, options, run)
    assert resumed.num_kept > 0
    assert resumed.converted == whole.converted
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")
