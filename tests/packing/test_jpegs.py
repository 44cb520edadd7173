"""How packing stores JPEGs: copied, tiled, or re-encoded; and what it reports."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio.errors import PackError
from shardio.images.jpeg import has_tiles
from shardio.images.tiling import NotTileable, tile_jpeg
from shardio.packing import TILED, FileProblem, JpegTally, PackResult, PackSettings, RunOptions, pack_source
from shardio.sample import Sample
from shardio.shards import write_shard
from shardio.storage import Location
from tests.files import read_files
from tests.images.kernel_machines import _not_built, folder
from tests.images.pictures import exif_of, make_picture, read_by_pillow, save
from tests.tars import read_members

__all__ = ["_not_built", "folder"]

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
    root = tmp_path_factory.mktemp("jpegs")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    return root


def pack_jpegs(source: Path, out: Path, *, num_workers: int = 1, **settings: object) -> PackResult:
    values: dict[str, Any] = {"max_shard_size": 10**9, "max_shard_samples": 3, "check": False, **settings}
    return pack_source(source, out, PackSettings(**values), run=RunOptions(num_workers=num_workers))


def read_images(out: Path) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for path in sorted(out.glob("*.tar")):
        members |= {name: content for name, content in read_members(path) if not name.endswith(".cls")}
    return members


def test_tiling_rewrites_eligible_jpegs_and_stores_the_rest_unchanged(source: Path, tmp_path: Path) -> None:
    result = pack_jpegs(source, tmp_path / "out", jpeg="tile")
    stored = read_images(tmp_path / "out")
    assert stored.keys() == FILES.keys()
    tiled = {"c/plain.jpg", "c/gray.jpeg", "c/tiled.jpg", "d/hidden.png", "d/masked.jpg"}
    for name, content in FILES.items():
        assert stored[name] == (tile_jpeg(content) if name in tiled else content), name
        if name in tiled:
            np.testing.assert_array_equal(read_by_pillow(stored[name]), read_by_pillow(content))
    assert result.jpegs.outcomes == {
        TILED: 5,
        "progressive": 1,
        "4 components": 1,
        "bytes after the end of the image": 1,
        BROKEN: 1,
    }
    jpegs = [name for name in FILES if name not in ("d/real.png", "d/masked.json")]
    assert result.jpegs.num_bytes_before == sum(len(FILES[name]) for name in jpegs)
    assert result.jpegs.num_bytes_after == sum(len(stored[name]) for name in jpegs)
    assert [problem.path for problem in result.jpegs.damaged] == [source / "d/broken.jpg"]
    assert "ends early" in result.jpegs.damaged[0].what
    assert result.manifest.pack["jpeg"] == "tile"
    assert result.manifest.pack["num_tiled"] == 5


def _damage(tiled: bytes) -> bytes:
    """Change a byte inside a restart interval so that its data cannot be decoded to the end."""
    for offset in range(len(tiled) // 2, len(tiled)):
        damaged = tiled[:offset] + bytes([tiled[offset] ^ 0x55]) + tiled[offset + 1 :]
        try:
            tile_jpeg(damaged)
        except NotTileable:
            if has_tiles(damaged):
                return damaged
    raise AssertionError("no changed byte is detected")


def test_copying_keeps_every_byte_and_counts_tiled_jpegs(source: Path, tmp_path: Path) -> None:
    result = pack_jpegs(source, tmp_path / "out")
    assert read_images(tmp_path / "out") == FILES
    assert result.jpegs.outcomes == {TILED: 1, "copied": 8}
    assert result.manifest.pack["num_tiled"] == 1


def test_reencoding_writes_smaller_upright_tiled_jpegs(tmp_path: Path) -> None:
    picture = make_picture(300, 200)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(save(picture, "JPEG", quality=95, exif=exif_of(6)))
    (tmp_path / "in" / "b.jpg").write_bytes(save(picture, "JPEG", quality=95))
    (tmp_path / "in" / "c.png").write_bytes(save(picture, "PNG"))
    result = pack_jpegs(tmp_path / "in", tmp_path / "out", jpeg="reencode", max_side=150, quality=80)
    stored = read_images(tmp_path / "out")
    assert stored["c.png"] == (tmp_path / "in" / "c.png").read_bytes()
    assert read_by_pillow(stored["a.jpg"]).shape == (100, 150, 3)
    assert read_by_pillow(stored["b.jpg"]).shape == (150, 100, 3)
    with Image.open(io.BytesIO(stored["a.jpg"])) as image:
        assert image.getexif().get(274, 1) == 1
    assert has_tiles(stored["a.jpg"])
    assert has_tiles(stored["b.jpg"])
    assert result.jpegs.outcomes == {TILED: 2}
    assert result.jpegs.num_bytes_after < result.jpegs.num_bytes_before
    expected = {"jpeg": "reencode", "max_side": 150, "quality": 80, "num_tiled": 2}
    assert expected.items() <= result.manifest.pack.items()


def test_reencoding_stores_damaged_and_too_large_images_unchanged(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    small = save(make_picture(20, 20), "JPEG")
    (tmp_path / "in" / "broken.jpg").write_bytes(small[:-100])
    (tmp_path / "in" / "large.jpg").write_bytes(PLAIN)
    (tmp_path / "in" / "small.jpg").write_bytes(small)
    result = pack_jpegs(tmp_path / "in", tmp_path / "out", jpeg="reencode", max_pixels=500)
    stored = read_images(tmp_path / "out")
    assert [name for name in stored if has_tiles(stored[name])] == ["small.jpg"]
    assert stored["large.jpg"] == PLAIN
    assert result.jpegs.outcomes == {TILED: 1, "more than max_pixels": 1, "damaged": 1}
    assert [problem.path.name for problem in result.jpegs.damaged] == ["broken.jpg"]


@pytest.mark.parametrize("jpeg", ["tile", "reencode"])
def test_output_does_not_depend_on_the_number_of_workers(source: Path, tmp_path: Path, jpeg: str) -> None:
    results = [pack_jpegs(source, tmp_path / str(n), jpeg=jpeg, num_workers=n) for n in (1, 3)]
    assert read_files(tmp_path / "1") == read_files(tmp_path / "3")
    assert results[0].jpegs == results[1].jpegs


@pytest.mark.parametrize("jpeg", ["copy", "tile", "reencode"])
def test_a_resumed_pack_reports_the_same_as_an_uninterrupted_one(
    source: Path, tmp_path: Path, jpeg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack_jpegs(source, tmp_path / "whole", jpeg=jpeg)
    written = list[str]()

    def fail_at_the_third(path: Location, samples: Iterable[Sample]) -> object:
        if len(written) == 2:
            raise OSError("the disk is full")
        written.append(path.name)
        return write_shard(path, samples)

    with monkeypatch.context() as patch:
        patch.setattr("shardio.packing.shard_job.write_shard", fail_at_the_third)
        with pytest.raises(PackError, match="the disk is full"):
            pack_jpegs(source, tmp_path / "out", jpeg=jpeg)
    resumed = pack_jpegs(source, tmp_path / "out", jpeg=jpeg)
    assert resumed.num_kept > 0
    assert resumed.jpegs == whole.jpegs
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def test_a_tally_round_trips_as_json_and_other_values_are_refused() -> None:
    damaged = [FileProblem(Path("in/a.jpg"), "is damaged")]
    tally = JpegTally(outcomes=Counter(tiled=3), num_bytes_before=5, num_bytes_after=4, damaged=damaged)
    assert JpegTally.load(json.loads(json.dumps(tally.dump()))) == tally
    others: list[Any] = [1, {}, [1, 2], [{}, 1, 2, [3]]]
    for values in others:
        with pytest.raises((ValueError, TypeError)):
            JpegTally.load(values)


def test_a_resumed_pack_reports_damaged_tiled_jpegs_again(tmp_path: Path) -> None:
    """The tile table is right but the data is damaged, which only reading all of it shows."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(_damage(tile_jpeg(save(make_picture(200, 300), "JPEG"))))
    (tmp_path / "in" / "b.jpg").write_bytes(PLAIN)
    whole = pack_jpegs(tmp_path / "in", tmp_path / "whole", jpeg="tile", max_shard_samples=1)
    assert [problem.path.name for problem in whole.jpegs.damaged] == ["a.jpg"]
    settings = PackSettings(max_shard_size=10**9, max_shard_samples=1, jpeg="tile", check=False)
    with pytest.raises(PackError, match="is damaged"):
        pack_source(tmp_path / "in", tmp_path / "out", settings, run=RunOptions(strict=True, num_workers=1))
    resumed = pack_jpegs(tmp_path / "in", tmp_path / "out", jpeg="tile", max_shard_samples=1)
    assert resumed.jpegs == whole.jpegs
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def test_strict_refuses_a_damaged_jpeg_in_a_shard_of_an_earlier_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise OSError("stopped before the end")

    with monkeypatch.context() as patch:
        patch.setattr("shardio.packing.packer.finish", stop)
        with pytest.raises(PackError, match="stopped before the end"):
            pack_jpegs(source, tmp_path / "out", jpeg="tile")
    settings = PackSettings(max_shard_size=10**9, max_shard_samples=3, jpeg="tile", check=False)
    with pytest.raises(PackError, match=r"broken\.jpg is damaged"):
        pack_source(source, tmp_path / "out", settings, run=RunOptions(strict=True))


def test_an_unfinished_pack_is_not_resumed_in_another_mode(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(PLAIN)
    (tmp_path / "in" / "broken.jpg").write_bytes(FILES["d/broken.jpg"])
    one_by_one = {"shuffle_seed": None, "max_shard_samples": 1}
    with pytest.raises(PackError, match=r"broken\.jpg is damaged"):
        shardio.pack(tmp_path / "in", tmp_path / "out", jpeg="tile", strict=True, check=False, **one_by_one)  # type: ignore[arg-type]
    with pytest.raises(PackError, match="different images or with different settings"):
        shardio.pack(tmp_path / "in", tmp_path / "out")


def test_strict_refuses_a_damaged_jpeg(tmp_path: Path) -> None:
    (tmp_path / "in" / "d").mkdir(parents=True)
    (tmp_path / "in" / "d" / "broken.jpg").write_bytes(FILES["d/broken.jpg"])
    with pytest.raises(PackError, match=r"d/broken\.jpg is damaged: the data ends early"):
        shardio.pack(tmp_path / "in", tmp_path / "out", jpeg="tile", strict=True, check=False)
    shardio.pack(tmp_path / "in", tmp_path / "copied", strict=True, check=False)


def test_a_warning_names_a_damaged_jpeg(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shardio.pack(source, tmp_path / "out", jpeg="tile", check=False)
    assert any("broken.jpg is damaged" in message for message in caplog.messages)


@pytest.mark.usefixtures("folder", "_not_built")
@pytest.mark.parametrize("jpeg", ["tile", "reencode"])
def test_without_compiled_functions_and_numba_the_error_says_what_to_install_and_nothing_is_written(
    source: Path, tmp_path: Path, jpeg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(PackError, match=r"built without them for this processor.*pip install numba"):
        pack_jpegs(source, tmp_path / "out", jpeg=jpeg)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jpeg": "shrink"}, "jpeg must be one of 'copy', 'tile', 'reencode'"),
        ({"jpeg": "reencode", "max_side": 0}, "max_side must be at least 1"),
        ({"jpeg": "reencode", "quality": 101}, "quality must be at least 1 and below 101"),
        ({"jpeg": "tile", "max_side": 400}, r"\(max_side\) applies only with .*\(jpeg='reencode'\)"),
        ({"quality": 90}, r"\(quality\) applies only with .*\(jpeg='reencode'\)"),
        ({"jpeg": "tile", "check": False, "max_pixels": 100}, r"\(max_pixels\) does not apply with .*\(check=False\)"),
        ({"jpeg": "reencode", "max_pixels": 0}, "max_pixels must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackSettings(max_shard_size=1000, **settings)  # type: ignore[arg-type]
