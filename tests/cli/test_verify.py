from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner, Result

from shardio.cli.main import app
from shardio.shards import open_table
from tests.tars import write_tar


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_an_intact_dataset_succeeds(packed: Path) -> None:
    done = verify(packed, "--deep", "--workers", 1)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("no problems in 5 shards, 21 samples, ")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_problems_are_printed_and_counted(packed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(packed, tmp_path / "out")
    (out / "shard-000002.tar.idx").unlink()
    done = verify(out)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"missing: {out / 'shard-000002.tar'}: it has no index")
    assert lines[-1].startswith("1 problem (1 missing) in 5 shards, 16 samples")
    values = json.loads(verify(out, "--json").stdout)
    assert values["kinds"] == {"missing": 1}
    assert values["problems"][0]["where"] == str(out / "shard-000002.tar")


def test_the_output_is_bounded_unless_it_is_json(tmp_path: Path) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", [(f"{i}.txt", name.encode()) for i in range(30)])
    open_table(tmp_path)
    done = verify(tmp_path)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert len(lines) == 22
    assert lines[20] == "duplicate: 10 more (--json prints all)"
    done = verify(tmp_path, "--json")
    assert done.exit_code == 1
    assert len(json.loads(done.stdout)["problems"]) == 30
