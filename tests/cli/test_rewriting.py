"""``shardio append``, ``merge``, ``split``, ``reshard`` and ``export-index``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import shardio
from shardio.cli.main import app
from shardio.shards import open_table
from tests.sources import write_images


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done


def test_append_packs_images_and_says_how_many(packed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(packed, tmp_path / "out")
    write_images(tmp_path / "new" / "x", classes=2, per_class=1)
    done = run("append", out, tmp_path / "new" / "x", code=1)
    assert "same key" in str(done.exception) or "have the key" in str(done.exception)
    for path in sorted((tmp_path / "new" / "x").rglob("*.jpg")):
        path.rename(path.with_name(f"new-{path.name}"))
    done = run("append", out, tmp_path / "new" / "x", "--workers", "1")
    assert done.stdout == f"{out}: added 2 samples; now 23 samples in 6 shards\n"
    with shardio.ShardWriter(tmp_path / "more") as writer:
        writer.write({"__key__": "m", "txt": ""})
    found = json.loads(run("append", out, tmp_path / "more", "--copy", "--json").stdout)
    assert (found["added"], found["samples"], found["fields"]) == (1, 24, ["cls", "jpg", "txt"])


def test_merge_split_and_reshard_write_new_datasets(packed: Path, tmp_path: Path) -> None:
    done = run("split", packed, tmp_path / "parts", "--by", "0.5,0.5", "--names", "a,b")
    sizes = [open_table(tmp_path / "parts" / name).manifest.num_samples for name in "ab"]
    assert [line.partition(" sample")[0] for line in done.stdout.splitlines()] == [
        f"{tmp_path}/parts/{name}: {size}" for name, size in zip("ab", sizes, strict=True)
    ]
    parts = tmp_path / "parts" / "a", tmp_path / "parts" / "b"
    found = json.loads(run("merge", tmp_path / "merged", *parts, "--max-shard-samples", "7", "--json").stdout)
    assert (found["samples"], found["shards"], found["classes"]) == (21, 3, 3)
    run("reshard", tmp_path / "merged", tmp_path / "new", "--max-shard-size", "1MiB", "--shuffle-seed", "1")
    with shardio.open(packed) as before, shardio.open(tmp_path / "new") as after:
        assert sorted(before) == sorted(after)
    assert "not empty" in str(run("reshard", packed, tmp_path / "new", code=1).exception)
    run("reshard", packed, tmp_path / "new", "--overwrite")


@pytest.mark.parametrize(
    "arguments",
    [["--by", "0.5,0.6"], ["--by", "1", "--names", "a"], ["--names", "a/b,c"], ["--max-shard-size", "big"]],
    ids=" ".join,
)
def test_wrong_parts_are_usage_errors(packed: Path, tmp_path: Path, arguments: list[str]) -> None:
    run("split", packed, tmp_path / "out", *arguments, code=2)
    assert not (tmp_path / "out").exists()


def test_split_names_its_hash() -> None:
    assert "xxh3-64" in run("split", "--help").stdout


def test_export_index_writes_files(packed: Path, tmp_path: Path) -> None:
    done = run("export-index", packed, "--format", "timm", "--out", tmp_path / "timm")
    assert done.stdout == f"wrote 1 file to {tmp_path}/timm\n"
    found = json.loads(run("export-index", packed, "--format", "energon", "--out", tmp_path / "e", "--json").stdout)
    assert f"{tmp_path}/e/.nv-meta/split.yaml" in found["files"]
    run("export-index", packed, "--format", "energon", code=2)
    run("export-index", packed, "--format", "zip", code=2)
    assert isinstance(
        run("export-index", packed, "--format", "timm", "--out", tmp_path / "timm", code=1).exception, OSError
    )
