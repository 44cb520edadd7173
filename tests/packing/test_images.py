"""Packing stores images unchanged, tiled, re-encoded or converted, and lists those that cannot be decoded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio.errors import PackError
from shardio.images.converting import convert_image
from shardio.images.jpeg import has_tiles
from shardio.images.tiling import tile_jpeg
from shardio.packing import REJECTED_NAME, TILED, TILED_PROGRESSIVE, PackResult, packer
from shardio.process import WorkProgress
from tests.files import read_files
from tests.images.pictures import exif_of, make_picture, read_by_pillow, save
from tests.packing.packs import Interrupt, assert_refused, pack, read_packed, write_files
from tests.raising import assert_raises
from tests.sources import encode
from tests.tars import read_members

PLAIN = save(make_picture(70, 90), "JPEG")

FILES = {
    "c/plain.jpg": PLAIN,
    "c/gray.jpeg": save(Image.fromarray(make_picture(70, 90)).convert("L"), "JPEG"),
    "c/tiled.jpg": tile_jpeg(PLAIN),
    "c/progressive.jpg": save(make_picture(70, 90), "JPEG", progressive=True),
    "c/cmyk.jpg": save(Image.fromarray(make_picture(70, 90)).convert("CMYK"), "JPEG"),
    "c/long.jpg": PLAIN + b"trailing",
    "d/broken.jpg": PLAIN[: len(PLAIN) // 2],
    "d/hidden.png": save(make_picture(70, 90), "JPEG"),
    "d/real.png": save(make_picture(70, 90), "PNG"),
    "d/masked.jpg": save(make_picture(71, 91), "JPEG"),
    "d/masked.json": b'{"mask": 1}',
}

BROKEN = "damaged: the data ends early or contains an unknown code"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("jpegs"), FILES)


def pack_jpegs(source: Path, out: Path, **options: Any) -> PackResult:
    return pack(source, out, **{"max_shard_samples": 3, "check": False} | options)


def read_images(out: Path) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for path in sorted(out.glob("*.tar")):
        members |= {name: content for name, content in read_members(path) if not name.endswith(".cls")}
    return members


def test_tiling_rewrites_eligible_jpegs(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = pack_jpegs(source, tmp_path / "out", jpeg="tile")
    stored = read_images(tmp_path / "out")
    assert stored.keys() == FILES.keys()
    tiled = {"c/plain.jpg", "c/gray.jpeg", "c/tiled.jpg", "c/progressive.jpg", "d/hidden.png", "d/masked.jpg"}
    for name, content in FILES.items():
        assert stored[name] == (tile_jpeg(content) if name in tiled else content), name
        if name in tiled:
            np.testing.assert_array_equal(read_by_pillow(stored[name]), read_by_pillow(content))
    others = ("4 components", "bytes after the end of the image", BROKEN)
    assert result.jpegs.outcomes == {TILED: 5, TILED_PROGRESSIVE: 1} | dict.fromkeys(others, 1)
    jpegs = [name for name in FILES if name not in ("d/real.png", "d/masked.json")]
    assert result.jpegs.num_bytes_before == sum(len(FILES[name]) for name in jpegs)
    assert result.jpegs.num_bytes_after == sum(len(stored[name]) for name in jpegs)
    assert [problem.path for problem in result.jpegs.damaged] == [source / "d/broken.jpg"]
    assert "ends early" in result.jpegs.damaged[0].what
    result.warn("")
    assert any("broken.jpg is damaged" in message for message in caplog.messages)
    assert (result.manifest.pack["jpeg"], result.manifest.pack["num_tiled"]) == ("tile", 6)
    copied = pack_jpegs(source, tmp_path / "copied")
    assert (read_images(tmp_path / "copied"), copied.jpegs.outcomes) == (FILES, {TILED: 1, "copied": 8})
    assert copied.manifest.pack["num_tiled"] == 1


def test_reencoding_writes_smaller_upright_tiled_jpegs(tmp_path: Path) -> None:
    picture = make_picture(300, 200)
    rotated = save(picture, "JPEG", quality=95, exif=exif_of(6))
    files = {"a.jpg": rotated, "b.jpg": save(picture, "JPEG", quality=95), "c.png": save(picture, "PNG")}
    source, options = write_files(tmp_path / "in", files), {"jpeg": "reencode", "max_side": 150, "quality": 80}
    result = pack_jpegs(source, tmp_path / "out", **options)
    stored = read_images(tmp_path / "out")
    assert (stored["c.png"], read_by_pillow(stored["a.jpg"]).shape) == (files["c.png"], (100, 150, 3))
    assert read_by_pillow(stored["b.jpg"]).shape == (150, 100, 3)
    with Image.open(io.BytesIO(stored["a.jpg"])) as image:
        assert image.getexif().get(274, 1) == 1
    assert all(has_tiles(stored[name]) for name in ("a.jpg", "b.jpg"))
    assert result.jpegs.outcomes == {TILED: 2}
    assert result.jpegs.num_bytes_after < result.jpegs.num_bytes_before
    assert (options | {"num_tiled": 2}).items() <= result.manifest.pack.items()


def test_reencoding_stores_damaged_and_too_large_images_unchanged(tmp_path: Path) -> None:
    small = save(make_picture(20, 20), "JPEG")
    files = {"broken.jpg": small[:-100], "large.jpg": PLAIN, "small.jpg": small}
    result = pack_jpegs(write_files(tmp_path / "in", files), tmp_path / "out", jpeg="reencode", max_pixels=500)
    stored = read_images(tmp_path / "out")
    assert ([name for name in stored if has_tiles(stored[name])], stored["large.jpg"]) == (["small.jpg"], PLAIN)
    assert result.jpegs.outcomes == {TILED: 1, "more than max_pixels": 1, "damaged": 1}
    assert [problem.path.name for problem in result.jpegs.damaged] == ["broken.jpg"]


MODES: list[dict[str, Any]] = [{"jpeg": jpeg, "check": False} for jpeg in ("copy", "tile", "reencode")]


@pytest.mark.parametrize("settings", [*MODES, {"convert_to": "webp", "jpeg": "tile"}], ids=str)
def test_a_resumed_pack_reports_the_same_as_a_whole_one(source: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {"max_shard_samples": 3 if "check" in settings else 2, **settings}
    whole = pack(source, tmp_path / "whole", **settings)
    assert len(whole.manifest.shards) > 3
    assert_raises(KeyboardInterrupt, None, pack, source, tmp_path / "out", Interrupt(7), **settings)
    other, message = settings | {"jpeg": "copy" if settings["jpeg"] == "tile" else "tile"}, "images or with different"
    assert_raises(PackError, message, pack, source, tmp_path / "out", **other)
    resumed = pack(source, tmp_path / "out", **settings)
    assert resumed.num_kept > 0
    assert (resumed.jpegs, resumed.converted) == (whole.jpegs, whole.converted)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def test_strict_refuses_a_damaged_jpeg(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise OSError("stopped before the end")

    with monkeypatch.context() as patch:
        patch.setattr(packer, "finish", stop)
        assert_raises(PackError, "stopped before the end", pack_jpegs, source, tmp_path / "out", jpeg="tile")
    message = r"d/broken\.jpg is damaged: the data ends early"
    for out in ("out", "new"):
        assert_raises(PackError, message, pack_jpegs, source, tmp_path / out, jpeg="tile", strict=True)
    resumed = pack_jpegs(source, tmp_path / "out", jpeg="tile")
    assert resumed.num_kept
    assert [problem.path for problem in resumed.jpegs.damaged] == [source / "d/broken.jpg"]
    broken = write_files(tmp_path / "in", {"broken.jpg": FILES["d/broken.jpg"]})
    assert pack_jpegs(broken, tmp_path / "copied", strict=True).manifest.num_samples == 1


@pytest.mark.parametrize("jpeg", ["tile", "reencode"])
def test_rewriting_jpegs_needs_the_kernel(source: Path, jpeg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.kernel.load_functions", lambda: (None, "the kernel cannot be loaded"))
    assert_refused("kernel: the kernel cannot be loaded: install a wheel that has it", source, jpeg=jpeg, check=False)


SIZES = ("max_shard_size", "max_shard_samples", "num_workers")
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"jpeg": "shrink"}, "jpeg must be one of 'copy', 'tile', 'reencode'"),
    *(({name: "no"}, f"{name} must be one of .*, got 'no'") for name in ("layout", "on_changed", "source_kind")),
    *(({name: 0}, f"{name} must be at least 1") for name in SIZES),
    *(({name: 0.5}, f"{name} must be an integer, got 0.5") for name in (*SIZES, "shuffle_seed", "max_pixels")),
    ({"check": None}, "check must be True or False, got None"),
    ({"shuffle_seed": -1}, "shuffle_seed must be at least 0"),
    *(({name: 3}, f"{name} must be a string, got 3") for name in ("source_split", "key_column", "ray_address")),
    ({"jpeg": "reencode", "max_side": 0}, "max_side must be at least 1"),
    ({"jpeg": "reencode", "quality": 101}, "quality must be at least 1 and below 101"),
    ({"jpeg": "tile", "max_side": 400}, r"\(max_side\) applies only with .*\(jpeg='reencode'\)"),
    ({"jpeg": "tile", "check": False, "max_pixels": 100}, r"\(max_pixels\) does not apply with .*\(check=False\)"),
    ({"jpeg": "reencode", "max_pixels": 0}, "max_pixels must be at least 1"),
    *(({name: 8}, r"applies only with --jpeg reencode .* or --convert-to") for name in ("max_side", "quality")),
    ({"to_srgb": True}, r"applies only with --jpeg reencode .* or --convert-to"),
]


@pytest.mark.parametrize(("settings", "message"), INVALID)
def test_invalid_options_are_refused(source: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    assert_raises((TypeError, ValueError), message, shardio.pack, source, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def encode_as(seed: int, image_format: str) -> bytes:
    return save(Image.open(io.BytesIO(encode(seed, suffix="png"))), image_format)


JPEG = encode(1)
MIXED = {
    "a/jpeg.jpg": JPEG,
    "a/png.png": encode(2, suffix="png"),
    "a/webp.webp": encode(3, suffix="webp"),
    "b/bmp.bmp": encode_as(4, "BMP"),
    "b/gif.gif": encode_as(5, "GIF"),
    "b/gif.json": b'{"a": 1}',
    "b/really-a-jpeg.png": JPEG,
    "b/transparent.png": save(np.full((8, 8, 4), 100, np.uint8), "PNG"),
}
"""Images in six formats, one with a companion, and an image that cannot become a JPEG."""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write_files(tmp_path / "in", MIXED)


def convert(source: Path, out: Path, progress: WorkProgress | None = None, **settings: Any) -> PackResult:
    return pack(source, out, progress, max_shard_samples=2, **settings)


@pytest.mark.parametrize("check", [True, False])
def test_images_are_converted_unless_they_have_the_format(mixed: Path, tmp_path: Path, check: bool) -> None:
    result = convert(mixed, tmp_path / "out", convert_to="jpeg", check=check)
    found = read_packed(tmp_path / "out")
    assert set(found) == {"a/jpeg", "a/png", "a/webp", "b/bmp", "b/gif", "b/really-a-jpeg"}
    assert found["a/jpeg"]["jpg"] == found["b/really-a-jpeg"]["jpg"] == JPEG
    for name in ("a/png.png", "a/webp.webp", "b/bmp.bmp", "b/gif.gif"):
        assert found[name.partition(".")[0]]["jpg"] == convert_image(MIXED[name], "jpeg", quality=90)
    assert found["b/gif"]["json"] == b'{"a": 1}'
    assert result.converted == {"PNG": 1, "WEBP": 1, "BMP": 1, "GIF": 1}
    assert (result.manifest.fields, result.manifest.pack["convert_to"]) == (("cls", "jpg", "json"), "jpeg")
    (rejected,) = result.rejected
    assert rejected.file == "b/transparent.png"
    assert rejected.reason.startswith("cannot be converted to JPEG: has transparent pixels")
    assert result.mislabelled == []


@pytest.mark.parametrize("jpeg", ["tile", "reencode"])
def test_converted_jpegs_are_tiled_and_lose_quality_only_once(mixed: Path, tmp_path: Path, jpeg: str) -> None:
    convert(mixed, tmp_path / "out", convert_to="jpeg", jpeg=jpeg, max_side=24, quality=80)
    found = read_packed(tmp_path / "out")["a/png"]["jpg"]
    expected = read_by_pillow(convert_image(MIXED["a/png.png"], "jpeg", quality=80, max_side=24))
    assert expected.shape == (16, 24, 3)
    np.testing.assert_array_equal(read_by_pillow(found), expected)
    assert has_tiles(found)


def test_png_is_lossless_and_webp_keeps_transparency(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "png", convert_to="png")
    found = read_packed(tmp_path / "png")
    assert len(found) == 7
    for name in ("a/jpeg.jpg", "b/bmp.bmp", "b/gif.gif"):
        np.testing.assert_array_equal(read_by_pillow(found[name.partition(".")[0]]["png"]), read_by_pillow(MIXED[name]))
    convert(mixed, tmp_path / "webp", convert_to="webp", quality=50)
    assert Image.open(io.BytesIO(read_packed(tmp_path / "webp")["b/transparent"]["webp"])).mode == "RGBA"


def test_masks_are_never_converted(tmp_path: Path) -> None:
    mask = encode(7, suffix="png", mode="L")
    source = write_files(tmp_path / "in", {"a.bmp": encode_as(1, "BMP"), "a.mask.png": mask})
    shardio.pack(source, tmp_path / "out", layout="pairs", convert_to="webp")
    (sample,) = read_packed(tmp_path / "out").values()
    assert (sample["mask.png"], set(sample)) == (mask, {"webp", "mask.png"})


def test_samples_are_the_files_with_the_first_field(tmp_path: Path) -> None:
    names = ("en/a.wav", "en/a.txt", "en/a.json", "en/b.wav", "fr/c.wav", "fr/c.txt", "fr/d.txt", "fr/c.jpg")
    sounds = write_files(tmp_path / "in", {name: name.encode() for name in names})
    result = pack(sounds, tmp_path / "out", fields=("wav", "txt"))
    assert read_packed(tmp_path / "out") == {
        "en/a": {"wav": b"en/a.wav", "txt": b"en/a.txt", "cls": b"0"},
        "en/b": {"wav": b"en/b.wav", "cls": b"0"},
        "fr/c": {"wav": b"fr/c.wav", "txt": b"fr/c.txt", "cls": b"1"},
    }
    ignored = [str(path.relative_to(sounds)) for path in result.ignored]
    assert sorted(ignored) == ["en/a.json", "fr/c.jpg", "fr/d.txt"]
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (["flac"], PackError, r"holds no \.flac files, which --fields \(fields\) names first"),
        (["json"], PackError, r"fr holds no \.json files, which --fields \(fields\) names first: add"),
        ("wav", TypeError, "fields must be a list of suffixes"),
        ([], ValueError, "must be suffixes such as wav and txt"),
    ]
    for fields, kind, message in mistakes:
        assert_raises(kind, message, shardio.pack, sounds, tmp_path / "none", fields=fields)
    assert not (tmp_path / "none").exists()
    (sounds / "en").rename(sounds / "train")
    (sounds / "fr").rename(sounds / "test")
    assert_refused("these look like the splits of a dataset", sounds, fields=["wav"])
    flat = write_files(tmp_path / "flat", {f"{number}.wav": b"RIFF" for number in range(3)})
    assert_refused(r"To pack other files, .*: --fields wav \(fields=\['wav'\]\)$", flat)


def test_two_images_of_one_sample_are_fields_if_both_are_named(tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", {"a.jpg": JPEG, "a.png": encode(2, suffix="png")})
    assert_refused("have the same stem", source)
    shardio.pack(source, tmp_path / "out", fields=[".JPG", "png"])
    (sample,) = read_packed(tmp_path / "out").values()
    assert set(sample) == {"jpg", "png"}


SOUND = save(make_picture(40, 30), "JPEG")
UNDECODABLE = {
    "c/cut.jpg": (SOUND[: len(SOUND) // 2], "cannot be decoded: "),
    "c/empty.jpg": (b"", "is not an image"),
    "d/cut.png": (save(make_picture(40, 30), "PNG")[:-40], "cannot be decoded: "),
    "d/html.webp": (b"<html>404</html>", "is not an image"),
    "d/large.jpg": (save(make_picture(41, 30), "JPEG"), "is too large: "),
}
CHECKED: dict[str, Any] = {"max_shard_samples": 4, "max_pixels": 40 * 30}


@pytest.fixture
def unsound(tmp_path: Path) -> Path:
    sound = {f"{name}/{i}.jpg": SOUND for name in "cd" for i in range(4)}
    files = sound | {name: content for name, (content, _) in UNDECODABLE.items()} | {"c/cut.json": b"{}"}
    return write_files(tmp_path / "in", files)


def test_undecodable_images_are_left_out_and_listed_unless_they_are_not_checked(unsound: Path, tmp_path: Path) -> None:
    result = pack(unsound, tmp_path / "out", **CHECKED)
    assert sorted(read_packed(tmp_path / "out")) == sorted(f"{folder}/{i}" for folder in "cd" for i in range(4))
    assert result.manifest.num_samples == 8
    rejected = [json.loads(line) for line in (tmp_path / "out" / REJECTED_NAME).read_text().splitlines()]
    assert [each["file"] for each in rejected] == sorted(UNDECODABLE)
    for each in rejected:
        assert each["key"] == each["file"].partition(".")[0]
        assert each["reason"].startswith(UNDECODABLE[each["file"]][1])
    assert [sample._asdict() for sample in result.rejected] == rejected
    assert pack(unsound, tmp_path / "unchecked", check=False).rejected == []
    assert not (tmp_path / "unchecked" / REJECTED_NAME).exists()
    stored = read_packed(tmp_path / "unchecked")
    for name, (content, _) in UNDECODABLE.items():
        key, _, field = name.partition(".")
        assert stored[key][field] == content
    moved = unsound.rename(tmp_path / "elsewhere")
    pack(moved, tmp_path / "moved", **CHECKED)
    assert read_files(tmp_path / "moved") == read_files(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("jpeg", ["copy", "tile", "reencode"])
def test_worker_processes_report_the_same(source: Path, unsound: Path, tmp_path: Path, jpeg: str) -> None:
    for images in (source, unsound):
        found = [
            pack(images, tmp_path / f"{images.name}-{n}", num_workers=n, max_shard_samples=3, jpeg=jpeg) for n in (1, 3)
        ]
        assert found[0] == found[1]
        assert read_files(tmp_path / f"{images.name}-1") == read_files(tmp_path / f"{images.name}-3")


def test_strict_or_without_a_sound_image_a_pack_leaves_nothing(unsound: Path, tmp_path: Path) -> None:
    message = r"in/[cd]/\w+\.\w+ (is|cannot) .*: rename, repair or remove the file"
    assert_refused(message, unsound, strict=True, max_pixels=40 * 30)
    source = write_files(tmp_path / "none", {"a.jpg": b"no image", "b.jpg": b"no image"})
    message = r"no images that can be packed: .*none/\w\.jpg is not an image \(there are 2"
    assert_refused(message, source, max_shard_samples=1)


def test_masks_that_have_no_rgb_values_are_sound(tmp_path: Path) -> None:
    files = {f"images/{i}.jpg": encode(i) for i in range(5)} | {"masks/4.png": b"no image"}
    for i, mode in enumerate(("I;16", "P", "1", "L")):
        files[f"masks/{i}.png"] = save(make_picture(8, 8)[..., 0], "PNG", mode=mode)
    result = pack(write_files(tmp_path / "in", files), tmp_path / "out", layout="pairs")
    assert (result.rejected, result.manifest.num_samples) == ([("4", "masks/4.png", "is not an image")], 4)


def test_tiling_leaves_out_the_same_images_as_copying(tmp_path: Path) -> None:
    """Tiling replaces the check that decodes a JPEG, and must find the same damage."""
    random = np.random.default_rng(0)
    files = dict[str, bytes]()
    for number in range(150):
        content = bytearray(encode(number % 7, width=64, height=48, quality=int(random.integers(30, 95))))
        if number % 5:
            offset = int(random.integers(2, len(content)))
            content[offset] ^= 1 << int(random.integers(8))
        if number % 11 == 3:
            del content[int(random.integers(2, len(content))) :]
        files[f"{number:03d}.jpg"] = bytes(content)
    source = write_files(tmp_path / "in", files)
    copied, tiled = (pack(source, tmp_path / jpeg, jpeg=jpeg) for jpeg in ("copy", "tile"))
    assert tiled.rejected == copied.rejected
    assert 30 < len(copied.rejected) < 130
    assert tiled.jpegs.outcomes[TILED] > 20
