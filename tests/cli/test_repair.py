from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardio.cli.main import app
from shardio.shards import open_table
from tests.files import read_files


@pytest.fixture
def out(packed: Path, tmp_path: Path) -> Path:
    """A copy of the packed directory to damage and repair."""
    return Path(shutil.copytree(packed, tmp_path / "out"))


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["repair", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def test_an_intact_dataset_needs_no_repair(out: Path) -> None:
    assert run(out).stdout.startswith("nothing to repair: 5 shards, 21 samples, ")


def test_lost_classes_are_given_again(out: Path, packed: Path, tmp_path: Path) -> None:
    (out / "shardio.json").unlink()
    done = run(out)
    assert "shardio.json: wrote the manifest, which was missing" in done.stdout
    assert f"shardio repair {out} --classes FILE" in done.stderr
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    for source, names in ((tmp_path / "names.txt", ("a", "b", "c")), (packed, open_table(packed).manifest.classes)):
        assert run(out, "--classes", source).stderr == ""
        assert open_table(out).manifest.classes == names


def test_dropped_samples_and_problems_are_printed(out: Path) -> None:
    tar = out / "shard-000001.tar"
    keys = CliRunner().invoke(app, ["ls", str(out)]).stdout.splitlines()[5:10]
    tar.write_bytes(tar.read_bytes()[:-2000])
    (out / "shard-000002.tar").write_bytes(b"x" * 5000)
    done = run(out, code=1)
    assert f"  dropped sample {keys[-1]}\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("3 files written: 5 shards, 20 samples")
    assert done.stderr.startswith(f"header: {out / 'shard-000002.tar'}: the tar cannot be read and was not changed")
    values = json.loads(run(out, "--json", code=1).stdout)
    assert [problem["where"] for problem in values["problems"]] == [str(out / "shard-000002.tar")]
    assert values["actions"] == []


def test_remains_of_a_killed_repair_are_removed(out: Path, packed: Path) -> None:
    (out / ".shard-000001.tar.0123abcd.partial").write_bytes(b"x")
    run(out)
    assert read_files(out) == read_files(packed)
