"""A pack that is divided into parts: ``pack_parts``, ``shardio pack --split``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash
from typer.testing import CliRunner

import shardio
from shardio import PackError
from shardio.cli.main import app
from shardio.packing import PackSettings, RunOptions, make_parts, pack_parts, pack_source
from shardio.progress import WorkProgress
from shardio.shards import UNFINISHED_NAME
from tests.files import read_parts
from tests.sources import write_images
from tests.tars import by_key

SETTINGS = PackSettings(max_shard_size=1 << 30, max_shard_samples=7)
PARTS = make_parts(["0.7", "0.2", "0.1"], ["train", "val", "test"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "in", classes=3, per_class=40)
    return tmp_path / "in"


def samples_of(folder: Path) -> dict[str, dict[str, bytes]]:
    return by_key(*sorted(folder.glob("*.tar")))


def test_parts_together_are_the_dataset_and_the_hash_of_the_key_decides(source: Path, tmp_path: Path) -> None:
    pack_source(source, tmp_path / "whole", SETTINGS)
    results = pack_parts(source, tmp_path / "out", PARTS, SETTINGS)
    assert list(results) == ["train", "val", "test"]
    found = {name: samples_of(tmp_path / "out" / name) for name in results}
    assert found["train"] | found["val"] | found["test"] == samples_of(tmp_path / "whole")
    assert sum(map(len, found.values())) == 120
    for name, low, high in (("train", 0.0, 0.7), ("val", 0.7, 0.9), ("test", 0.9, 1.0)):
        assert all(low <= xxhash.xxh3_64_intdigest(key.encode()) / 2**64 < high for key in found[name])
        assert results[name].manifest.classes == ("class-0", "class-1", "class-2")


def test_a_pack_and_a_split_of_the_packed_dataset_have_the_same_parts(source: Path, tmp_path: Path) -> None:
    pack_parts(source, tmp_path / "out", PARTS, SETTINGS)
    pack_source(source, tmp_path / "whole", SETTINGS)
    shardio.split(tmp_path / "whole", tmp_path / "parts", by=[0.7, 0.2, 0.1], names=PARTS.names)
    for name in PARTS.names:
        assert samples_of(tmp_path / "out" / name) == samples_of(tmp_path / "parts" / name)


def test_samples_stay_in_their_parts_when_others_are_added(source: Path, tmp_path: Path) -> None:
    pack_parts(source, tmp_path / "before", PARTS, SETTINGS)
    write_images(source, classes=4, per_class=50)
    pack_parts(source, tmp_path / "after", PARTS, SETTINGS)
    for name in PARTS.names:
        assert set(samples_of(tmp_path / "before" / name)) < set(samples_of(tmp_path / "after" / name))


class _Interrupt(WorkProgress):
    def __init__(self, after: int) -> None:
        self._left = after

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        self._left -= num_done
        if self._left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [20, 85, 105, 119])
def test_an_interrupted_pack_resumes_in_all_parts(source: Path, tmp_path: Path, after: int) -> None:
    pack_parts(source, tmp_path / "whole", PARTS, SETTINGS)
    run = RunOptions(num_workers=1)
    with pytest.raises(KeyboardInterrupt):
        pack_parts(source, tmp_path / "out", PARTS, SETTINGS, run=run, progress=_Interrupt(after))
    for name in PARTS.names:
        with pytest.raises((shardio.FormatError, FileNotFoundError)):
            shardio.open(tmp_path / "out" / name)
    results = pack_parts(source, tmp_path / "out", PARTS, SETTINGS)
    assert sum(result.num_kept for result in results.values()) > after - 3 * 7
    assert read_parts(tmp_path / "out") == read_parts(tmp_path / "whole")


@pytest.mark.parametrize("num_unmarked", [1, 2])
def test_a_pack_that_was_killed_at_its_very_end_is_ended(
    source: Path, tmp_path: Path, num_unmarked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_parts(source, tmp_path / "whole", PARTS, SETTINGS)
    unlink, marks = Path.unlink, list[Path]()

    def unlink_some(path: Path, missing_ok: bool = False) -> None:
        if path.name == UNFINISHED_NAME:
            marks.append(path)
            if len(marks) > num_unmarked:
                raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_some)
        with pytest.raises(KeyboardInterrupt):
            pack_parts(source, tmp_path / "out", PARTS, SETTINGS)
    with pytest.raises(PackError, match="different images or with different settings"):
        pack_parts(source, tmp_path / "out", PARTS, PackSettings(max_shard_size=1 << 20))
    pack_parts(source, tmp_path / "out", PARTS, SETTINGS)
    assert read_parts(tmp_path / "out") == read_parts(tmp_path / "whole")
    with pytest.raises(PackError, match="already holds a packed dataset"):
        pack_parts(source, tmp_path / "out", PARTS, SETTINGS)


def test_a_part_without_samples_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    parts = make_parts(["0.9999", "0.0001"], ["train", "val"])
    with pytest.raises(PackError, match=r"none of the 120 samples of .*in would be in val: choose larger fractions"):
        pack_parts(source, tmp_path / "out", parts, SETTINGS)
    assert not (tmp_path / "out").exists()


def test_the_command_divides_with_usual_names(source: Path, tmp_path: Path) -> None:
    command = ["pack", str(source), str(tmp_path / "out"), "--split"]
    found = CliRunner().invoke(app, [*command, "0.8,0.2", "--json"])
    assert found.exit_code == 0, found.output
    train, val = json.loads(found.stdout)
    assert (train["out"], val["out"]) == (str(tmp_path / "out" / "train"), str(tmp_path / "out" / "val"))
    assert train["samples"] + val["samples"] == 120
    command[2] = str(tmp_path / "other")
    found = CliRunner().invoke(app, [*command, "0.8,0.3"])
    assert found.exit_code == 2
    assert "must be positive and sum to 1" in " ".join(found.stderr.replace("│", " ").split())
    assert not (tmp_path / "other").exists()
