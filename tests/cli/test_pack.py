"""``shardio pack``, ``tile`` and ``untile``, and messages about images that decoders change or warn about."""

from __future__ import annotations

import io
import json
import logging
import shutil
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.cli.options import parse_size_option, read_classes
from shardio.errors import PackError
from shardio.images import decode_image, find_clipped_type, open_image
from shardio.images.jpeg import Box, has_tiles
from shardio.images.tiling import tile_jpeg, untile_jpeg
from shardio.packing import PackOptions, packer
from shardio.packing.packer import PackPlan, make_plan
from shardio.packing.sources.source import SourceTable
from shardio.process import ignore_pillows_warnings
from tests.cli.commands import error_of, run, run_main, usage_error
from tests.files import read_files
from tests.images.pictures import make_picture, read_by_pillow, save
from tests.images.stored_values import chunk, make_values, write_png, write_tiff
from tests.images.test_value_formats import EXACT
from tests.packing.packs import write_files
from tests.raising import assert_raises
from tests.sources import encode, write_images
from tests.tars import read_members


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("--no-shuffle", {"shuffle_seed": None}),
        ("--shuffle-seed 7", {"shuffle_seed": 7}),
        ("--max-shard-size 10KB", {"max_shard_size": 10_000}),
        ("--max-shard-samples 5", {"max_shard_samples": 5}),
        ("", {}),
    ],
)
def test_command_and_function_write_equal_files(
    images: Path, tmp_path: Path, options: str, settings: dict[str, Any]
) -> None:
    done = run("pack", images, tmp_path / "a", *options.split())
    num_shards = len(shardio.pack(images, tmp_path / "b", **settings).shards)
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")
    assert done.stdout.startswith(f"packed 21 samples of 3 classes into {num_shards} shard{'s' * (num_shards > 1)}")
    assert "packing 21 samples" in done.stderr


def test_a_file_of_classes_has_one_name_per_line(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    for text in ("\ufeffa\r\nb\u2028c\r\n", "a\nb\u2028c\n \n\n"):
        names.write_bytes(text.encode())
        assert read_classes(names) == ("a", "b\u2028c")
    names.write_text("a\n \nb\n")
    assert "line 2 of" in usage_error("pack", tmp_path, tmp_path / "out", "--classes", names)
    names.write_bytes(b"\xff")
    assert_raises(ValueError, r"names\.txt is not a UTF-8 text file", read_classes, names)


def test_classes_define_the_labels(tmp_path: Path) -> None:
    whole, out = tmp_path / "train", tmp_path / "out"
    for name in ("train", "val"):
        write_images(tmp_path / name, classes=3, per_class=1)
    shutil.rmtree(tmp_path / "val" / "class-1")
    train = shardio.pack(whole, tmp_path / "packed")
    (tmp_path / "names.txt").write_text("class-0\nclass-1\nclass-2\n")
    shardio.pack(tmp_path / "val", tmp_path / "expected", classes=train)
    for i, source in enumerate(["names.txt", "train", "packed", "packed/shardio.json"]):
        run("pack", tmp_path / "val", tmp_path / f"out{i}", "--classes", tmp_path / source)
        assert read_files(tmp_path / f"out{i}") == read_files(tmp_path / "expected")
    dataset = shardio.ShardMapDataset(tmp_path / "out0", fields=("key", "label"))
    assert dataset.classes == ["class-0", "class-1", "class-2"]
    assert sorted(dataset[index] for index in range(2)) == [("class-0/name-000", 0), ("class-2/name-000", 2)]
    message = r"has classes that are not among the given ones \(class-0, class-2\): class-1"
    assert_raises(PackError, message, shardio.pack, whole, out, classes=["class-0", "class-2"])
    assert_raises(PackError, "is packed without class folders", shardio.pack, whole, out, classes=train, layout="flat")
    assert not out.exists()


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A source with two classes, a broken image, an image with the wrong suffix, and a text file."""
    write_images(tmp_path / "in", classes=2, per_class=3)
    files = {"class-0/odd.jpg": encode(1, suffix="png"), "class-0/broken.jpg": b"no image", "notes.txt": b""}
    return write_files(tmp_path / "in", files)


def test_json_contains_the_whole_summary_and_quiet_prints_nothing(odd: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("pack", odd, out, "--json", "--max-shard-samples", 4)
    assert done.stderr == ""
    summary = json.loads(done.stdout)
    assert summary.pop("seconds") > 0
    size, packed = (
        sum(path.stat().st_size for path in found) for found in (odd.rglob("name-*.jpg"), out.glob("*.tar"))
    )
    digest = shardio.ShardDataset(out).table.manifest.digest
    jpegs = {"outcomes": {"copied": 6}, "bytes_before": size, "bytes_after": size, "damaged": []}
    numbers = {"samples": 7, "kept": 0, "classes": 2, "shards": 2, "bytes": packed, "converted": {}, "clipped": {}}
    mislabelled = [{"path": f"{odd}/class-0/odd.jpg", "what": "has the suffix .jpg but is in PNG format"}]
    rejected = [{"key": "class-0/broken", "file": "class-0/broken.jpg", "reason": "is not an image"}]
    files = {"mislabelled": mislabelled, "rejected": rejected, "ignored": [str(odd / "notes.txt")]}
    files |= {"suffixed": [], "packed_again": [], "changed": []}
    assert summary == {"out": str(out), "fields": ["cls", "jpg"], "digest": digest, "jpegs": jpegs, **numbers, **files}
    assert run_main("pack", odd, tmp_path / "quiet", "--quiet", "--max-shard-samples", 4) == (0, "", "")
    assert read_files(tmp_path / "quiet") == read_files(out)


def test_the_summary_lists_changed_files(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = odd / "class-0" / "name-001.jpg"

    def make_plan_and_remove(samples: SourceTable, classes: Sequence[str], settings: PackOptions) -> PackPlan:
        missing.unlink()
        return make_plan(samples, classes, settings)

    monkeypatch.setattr(packer, "make_plan", make_plan_and_remove)
    summary = json.loads(run("pack", odd, tmp_path / "out", "--on-changed", "skip", "--json").stdout)
    assert (summary["samples"], summary["changed"]) == (6, [{"path": str(missing), "what": "is missing"}])


def test_standard_error_names_files_that_are_not_packed(odd: Path, tmp_path: Path) -> None:
    (odd / "class-0" / "broken.jpg").unlink()
    write_files(odd / "class-0", {f"broken-{i:02d}.jpg": b"no image" for i in range(12)})
    errors = run("pack", odd, tmp_path / "out").stderr
    for line in ("12 files left out", "broken-09.jpg is not an image", "and 2 more (--json lists all of them)"):
        assert line in errors
    assert "odd.jpg has the suffix .jpg but is in PNG format" in errors
    assert "notes.txt" in errors
    assert "broken-10.jpg" not in errors


def test_standard_error_says_how_to_store_uncompressed_and_unread_images(tmp_path: Path) -> None:
    for i, suffix in enumerate(("bmp", "jpg")):
        write_images(tmp_path / "in", classes=1, per_class=1 + i, suffix=suffix)
        (tmp_path / "in" / "class-0" / "name-000.jpg").unlink(missing_ok=True)
        done = run("pack", tmp_path / "in", tmp_path / f"out-{suffix}")
        others = " and also convert all other images\n" if i else "\n"
        assert f".bmp images are uncompressed: --convert-to png would store them in less space{others}" in done.stderr
    (tmp_path / "in" / "class-0" / "x.gif").write_bytes(b"x")
    done = run("pack", tmp_path / "in", tmp_path / "out", "--convert-to", "png")
    assert "uncompressed" not in done.stderr
    done = run("pack", tmp_path / "in", tmp_path / "out-too")
    assert "left out images in other formats (1 .gif)" in done.stderr


def test_samples_larger_than_the_maximum_shard_size_are_reported(images: Path, tmp_path: Path) -> None:
    errors = run("pack", images, tmp_path / "out", "--max-shard-size", "1kB").stderr
    assert "21 shards exceed --max-shard-size 1000 B because samples are never split" in errors
    assert "--max-shard-size" not in run("pack", images, tmp_path / "roomy", "--max-shard-size", "10kB").stderr


def test_what_cannot_be_packed_is_an_error_of_one_line(odd: Path, packed: Path, tmp_path: Path) -> None:
    out, missing = tmp_path / "out", tmp_path / "nothing"
    assert error_of("pack", missing, out) == f"error: the source {missing} does not exist\n"
    assert f"error: {packed} already holds a packed dataset" in run_main("pack", odd, packed).stderr
    (odd / "class-0" / "odd.jpg").unlink()
    assert "broken.jpg is not an image" in run_main("pack", odd, out, "--strict").stderr
    assert not out.exists()
    (odd / "class-0" / "a.b.jpg").write_bytes(encode(5))
    refused = run_main("pack", odd, out)
    assert (refused.code, "--rename-dots" in refused.stderr) == (1, True)
    run("pack", odd, out, "--rename-dots")


WRONG = [
    *("", "in", "in out more", "in out --no-such-option", "in out --max-shard-size many", "in out --max-shard-size 0"),
    *("in out --max-shard-size -5", "in out --max-shard-samples 0", "in out --max-shard-samples some"),
    *("in out --num-workers 0", "in out --shuffle-seed -1", f"in out --shuffle-seed {2**63}"),
    *("in out --max-side 100", "in out --jpeg tile --quality 50"),
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_writes_nothing(tmp_path: Path, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1)
    monkeypatch.chdir(tmp_path)
    error = usage_error("pack", *arguments.split())
    assert ("applies only with --jpeg reencode" in error) == ("--max-side" in arguments or "--quality" in arguments)
    assert not (tmp_path / "out").exists()


def test_sizes_may_have_units(tmp_path: Path) -> None:
    sizes = {"1": 1, "512": 512, "1B": 1, "10KB": 10_000, "10kb": 10_000, "10KiB": 10_240, "1GB": 10**9}
    sizes |= {"256MiB": 2**28, "256 MiB": 2**28, "1.5GiB": 3 * 2**29, "2TiB": 2**41}
    assert {text: parse_size_option(text) for text in sizes} == sizes
    for text in ("", "MiB", "1XB", "one", "1 2", "-1", "1MiB2", "nan", "inf"):
        assert "must be a size such as" in usage_error("pack", tmp_path, tmp_path / "out", "--max-shard-size", text)
    assert not (tmp_path / "out").exists()


PLAIN = save(make_picture(70, 130), "JPEG")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(PLAIN)
    return path


def test_without_out_tile_only_reports(photo: Path) -> None:
    done = run("tile", photo)
    assert f"{photo}: 130×70, no restart markers → 130×70, 15 tiles of 3 MCUs" in done.stdout
    assert "nothing was written" in done.stderr
    assert read_files(photo.parent) == {"photo.jpg": PLAIN}
    photo.write_bytes(save(make_picture(70, 130), "JPEG", restart_marker_blocks=7))
    assert "restart markers every 7 MCUs → " in run("tile", photo).stdout


def test_tile_and_untile_write_the_files_to_out(photo: Path, tmp_path: Path) -> None:
    run("tile", photo, "--out", tmp_path / "tiled")
    tiled = tmp_path / "tiled" / "photo.jpg"
    assert tiled.read_bytes() == tile_jpeg(PLAIN)
    done = run("untile", tiled, "--out", tmp_path / "plain")
    assert "15 tiles of 3 MCUs → 130×70, no restart markers" in done.stdout
    plain = (tmp_path / "plain" / "photo.jpg").read_bytes()
    assert (plain, has_tiles(plain)) == (untile_jpeg(PLAIN), False)
    photo.write_bytes(save(make_picture(70, 130), "JPEG", progressive=True))
    done = run("tile", photo, "--out", tmp_path / "tiled")
    assert "130×70, progressive → 130×70, 15 tiles of 3 MCUs" in done.stdout
    assert tiled.read_bytes() == tile_jpeg(PLAIN), "it is the same baseline file"


def test_files_that_cannot_be_tiled_are_reported_and_the_others_are_written(
    photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"long.jpg": PLAIN + b"trailing", "a.webp": save(make_picture(70, 130), "WEBP")}
    write_files(tmp_path, files)
    done = run("tile", tmp_path / "long.jpg", tmp_path / "a.webp", photo, "--out", tmp_path / "out", code=1)
    assert f"{tmp_path}/long.jpg: not rewritten: bytes after the end of the image" in done.stderr
    assert f"{tmp_path}/a.webp: not rewritten: not a JPEG" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["photo.jpg"]
    monkeypatch.setattr("shardio.kernel.load_functions", lambda: (None, "the kernel cannot be loaded"))
    assert "install a wheel that has it" in error_of("tile", photo)


def test_originals_and_files_of_one_name_are_not_overwritten(photo: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "other", {"photo.jpg": PLAIN})
    (tmp_path / "link").symlink_to(tmp_path)
    error = usage_error("tile", photo, tmp_path / "other" / "photo.jpg", "--out", tmp_path / "out")
    assert "two files are named photo.jpg" in error
    assert not (tmp_path / "out").exists()
    for command in ("tile", "untile"):
        for out in (tmp_path, tmp_path / "link"):
            assert "would be overwritten" in usage_error(command, photo, "--out", out)
    assert photo.read_bytes() == PLAIN


def test_pack_reports_how_many_jpegs_are_tiled_and_why_others_are_not(tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", {f"{i}.jpg": PLAIN for i in range(3)})
    progressive = save(make_picture(70, 130), "JPEG", progressive=True)
    write_files(source, {"p.jpg": progressive, "b.jpg": PLAIN[:-100], "h.jpg": PLAIN[:60]})
    done = run("pack", source, tmp_path / "out", "--jpeg", "tile", "--no-check")
    assert "JPEGs: 4 tiled (1 formerly progressive); " in done.stdout
    assert "JPEGs stored unchanged: 2 (1 × " in done.stdout
    assert f"{source / 'b.jpg'} is damaged" in done.stderr
    assert f"{source / 'h.jpg'} has a damaged header (" in done.stderr
    assert "tiled    4 of 6 samples" in run("info", tmp_path / "out").stdout
    options = ["--jpeg", "reencode", "--max-side", "100", "--quality", "50", "--no-check"]
    assert "JPEGs: 4 re-encoded and tiled" in run("pack", source, tmp_path / "smaller", *options).stdout
    stored = dict(read_members(tmp_path / "smaller" / "shard-000000.tar"))["0.jpg"]
    with Image.open(io.BytesIO(stored)) as image:
        assert image.size == (100, 54)


GRAY = np.linspace(2000, 60000, 32 * 24).reshape(32, 24).astype(np.uint16)

FILES = {
    "a.png": (write_png(GRAY), "uint16"),
    "b.tif": (write_tiff(GRAY), "uint16"),
    "c.tif": (write_tiff((GRAY / 65535).astype(np.float32)), "float32"),
    "d.tif": (write_tiff(make_values("int8", 32, 24)), "int8"),
}

UNCLIPPED = {"e.png": write_png(make_values("uint16", 32, 24, 3)), "f.tif": write_tiff(make_values("uint8", 32, 24))}


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gray images whose values are clipped to uint8 as in torchvision, and two images that are not clipped."""
    files = {name: content for name, (content, _) in FILES.items()} | UNCLIPPED
    return write_files(tmp_path_factory.mktemp("images"), {f"class/{name}": content for name, content in files.items()})


def test_pack_and_info_count_clipped_images(clipped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = "4 gray images store values other than uint8 (2 × uint16, 1 × float32, 1 × int8): as images, they are"
    packed = run("pack", clipped, tmp_path / "out")
    assert packed.stderr.count(said) == 1
    assert "fields=('png', 'label')" in packed.stderr
    again = json.loads(run("pack", clipped, tmp_path / "again", "--no-check", "--json").stdout)
    assert again["clipped"] == {"float32": 1, "int8": 1, "uint16": 2}
    assert f"clipped  {said}" in run("info", tmp_path / "out").stdout
    assert json.loads(run("info", tmp_path / "out", "--json").stdout)["decoded"]["clipped"] == again["clipped"]
    with caplog.at_level(logging.WARNING, "shardio"):
        shardio.pack(clipped, tmp_path / "called")
    assert "4 gray images store values other than uint8" in caplog.text
    plain = write_files(tmp_path / "in", {f"class/{name}": content for name, content in UNCLIPPED.items()})
    shardio.pack(clipped, tmp_path / "png", fields=["png", "cls"])
    for dataset in (ImageFolder(plain), ShardDataset(tmp_path / "png", fields=("png",))):  # They cause no warning.
        assert list(DataLoader(dataset, batch_size=1, num_workers=0))


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("folder", 0), ("shards", 0), pytest.param("shards", 1, marks=pytest.mark.slow)]
)
def test_the_loader_says_it_once_an_epoch(clipped: Path, tmp_path: Path, kind: str, num_workers: int) -> None:
    dataset: Any = ImageFolder(clipped)
    if kind == "shards":
        shardio.pack(clipped, tmp_path / "out")
        dataset = ShardDataset(tmp_path / "out")
    loader = DataLoader(dataset, batch_size=2, num_workers=num_workers)
    with pytest.warns(UserWarning, match=r"values other than uint8: as images, they are converted") as caught:
        list(loader)
    assert len(caught) == 1
    assert {name: number for name, number in loader.stats().num_images_by_decoder.items() if number} == {"pillow": 6}


@pytest.mark.parametrize("name", EXACT)
def test_the_head_tells_what_pillow_clips(name: str) -> None:
    content, values = EXACT[name]
    picture, refused = None, ""
    try:
        picture = open_image(content)
    except ValueError as error:
        refused = str(error)
    if picture is None:
        assert "cannot be converted to RGB" in refused
        return  # Pillow does not open this file, so nothing is clipped.
    is_clipped = find_clipped_type(content) is not None
    assert is_clipped == (picture.decoder_name == "pillow, clipped")
    is_proportional = True
    if values.ndim == 2:
        gray = picture.read(Box(0, 0, *picture.size))[..., 0].astype(np.float64)
        is_proportional = gray.std() > 0 and np.corrcoef(gray.ravel(), values.ravel().astype(float))[0, 1] > 0.99
    assert is_clipped != is_proportional


PICTURE = make_picture(20, 30)


def palette(transparency: int | bytes) -> bytes:
    return save(Image.fromarray(PICTURE).quantize(16), "PNG", transparency=transparency)


def with_chunk(name: bytes, data: bytes) -> bytes:
    content = save(PICTURE, "PNG")
    return content[:33] + chunk(name, data) + content[33:]


NOISY = {
    "bytes.png": palette(bytes(range(16))),
    "index.png": palette(3),
    "profile.png": with_chunk(b"iCCP", b"x\0\0no profile"),
    "chromaticity.png": with_chunk(b"cHRM", struct.pack(">8I", *range(1, 9))),
    "photo.jpg": save(PICTURE, "JPEG").replace(b"\xff\xdb", b"\xff\xe2\0\x14ICC_PROFILE\0\1\2ab\0\0\xff\xdb", 1),
    "exif.jpg": save(PICTURE, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0bad"),
}


"""Images for which libraries print messages without a file name."""


def test_nothing_of_the_libraries_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noisy = write_files(tmp_path / "in", {f"class/{name}": content for name, content in NOISY.items()})
    assert run_main("pack", noisy, tmp_path / "out", "--quiet") == (0, "", "")
    done = run_main("verify", "--deep", tmp_path / "out")
    assert (done.code, done.stderr) == (0, "")
    batches = list(DataLoader(ImageFolder(noisy, orientation="apply"), batch_size=2, num_workers=1))
    assert (sum(len(labels) for _, labels in batches), capfd.readouterr().err) == (len(NOISY), "")


@pytest.mark.parametrize("transparency", [3, bytes(range(16)), bytes(3)], ids=str)
def test_a_transparent_palette_becomes_rgb_without_a_warning(transparency: int | bytes) -> None:
    content = palette(transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = read_by_pillow(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(decode_image(content), expected)


def test_the_users_own_filters_take_precedence() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        decode_image(NOISY["exif.jpg"], orientation="apply")
        assert len(caught) == 1, "this file has a warning to ignore"
        ignore_pillows_warnings()
        decode_image(NOISY["exif.jpg"], orientation="apply")
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Corrupt EXIF")
        ignore_pillows_warnings()
        assert_raises(ValueError, "Corrupt EXIF data", decode_image, NOISY["exif.jpg"], orientation="apply")
