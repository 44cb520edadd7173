"""``shardio ls``, ``cat`` and ``extract``."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardio.cli.main import app
from tests.files import read_files
from tests.tars import read_members, write_tar


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "a.tar"
    path.parent.mkdir()
    write_tar(path, [("a/1.jpg", b"\xff\x00\n"), ("a/1.cls", b"7"), ("a/2.txt", b"two"), ("b.seg.png", b"")])
    return path


def test_ls_prints_the_keys_in_the_order_of_the_tars(packed: Path) -> None:
    members = [name for path in sorted(packed.glob("*.tar")) for name, _ in read_members(path)]
    keys = list(dict.fromkeys(name.partition(".")[0] for name in members))
    assert run("ls", packed).stdout.splitlines() == keys
    assert run("ls", packed, "--limit", 7).stdout.splitlines() == keys[:7]
    assert run("ls", packed, "--limit", 0).stdout == ""


def test_ls_prints_fields_with_sizes(tar: Path) -> None:
    assert run("ls", tar, "--fields").stdout == "a/1\tcls 1\tjpg 3\na/2\ttxt 3\nb\tseg.png 0\n"
    lines = [json.loads(line) for line in run("ls", tar, "--json").stdout.splitlines()]
    with tarfile.open(tar) as opened:
        offsets = {member.name: member.offset_data for member in opened}
    assert [line["key"] for line in lines] == ["a/1", "a/2", "b"]
    assert {line["shard"] for line in lines} == {"a.tar"}
    found = {f"{line['key']}.{field}": at["offset"] for line in lines for field, at in line["fields"].items()}
    assert found == offsets


def test_ls_escapes_control_characters(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a\x1b[2J\n.txt", b"")])
    assert run("ls", tmp_path).stdout == "a\\x1b[2J\\n\n"


def test_cat_writes_the_bytes_of_a_field(tar: Path) -> None:
    assert run("cat", tar, "a/1", "--field", "jpg").stdout_bytes == b"\xff\x00\n"
    assert run("cat", tar, "a/2").stdout_bytes == b"two"
    assert run("cat", tar, "b").stdout_bytes == b""


def test_cat_names_the_fields_to_choose_from(tar: Path) -> None:
    assert "sample a/1 has several fields: choose one with --field: cls, jpg" in run("cat", tar, "a/1", code=1).stderr
    assert (
        "has no field 'png': choose one with --field: cls, jpg"
        in run("cat", tar, "a/1", "--field", "png", code=1).stderr
    )
    assert "no sample has the key 'x'" in run("cat", tar, "x", code=1).stderr


def test_extract_writes_what_tarfile_extracts(tar: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "wrote 4 files, 7 B" in run("extract", tar, "a/1", "a/2", "b", "b", out).stdout
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert found == dict(read_members(tar))


def test_existing_files_are_refused_unless_wanted(tar: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "b.seg.png").write_bytes(b"mine")
    done = run("extract", tar, "a/1", "b", out, code=1)
    assert "b.seg.png exists: pass --overwrite" in done.stderr
    assert read_files(out) == {"b.seg.png": b"mine"}
    run("extract", tar, "b", out, "--overwrite")
    assert read_files(out) == {"b.seg.png": b""}


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("/etc/x", "is an absolute path"),
        ("\\\\server\\x", "is an absolute path"),
        ("../x", "contains '..'"),
        ("a/../../x", "contains '..'"),
        ("a\\..\\x", "contains '..'"),
        ("C:x", "starts with a drive"),
        ("c:/x", "starts with a drive"),
    ],
)
def test_keys_that_lead_outside_are_refused(tmp_path: Path, key: str, why: str) -> None:
    """WebDataset reads such a tar, too: what a key contains matters only when files are named after it."""
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "a.tar", [(f"{key}.txt", b"")])
    out = tmp_path / "deep" / "out"
    keys = run("ls", tmp_path / "in").stdout.splitlines()
    done = run("extract", tmp_path / "in", "--", key, out, code=1)
    assert why in done.stderr or not keys  # A key of dots alone has no base name.
    assert not out.parent.exists()


@pytest.mark.parametrize("at", ["a", "a/1.jpg"])
def test_symbolic_links_on_the_way_are_refused(tar: Path, tmp_path: Path, at: str) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (out / at).parent.mkdir(parents=True)
    (out / at).symlink_to(elsewhere if at == "a" else elsewhere / "1.jpg")
    done = run("extract", tar, "a/1", out, "--overwrite", code=1)
    assert f"{out / at} is a symbolic link" in done.stderr
    assert not list(elsewhere.iterdir())


def test_files_in_the_way_of_directories_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x.txt", b""), ("x.txt/y.txt", b"")])
    out = tmp_path / "out"
    out.mkdir()
    (out / "x.txt").write_bytes(b"")
    done = run("extract", tmp_path / "a.tar", "x.txt/y", out, code=1)
    assert "is a file, but sample 'x.txt/y' needs a directory there" in done.stderr


def test_a_file_that_another_sample_needs_as_a_directory_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x.txt", b""), ("x.txt/y.txt", b"")])
    done = run("extract", tmp_path / "a.tar", "x.txt/y", "x", tmp_path / "out", code=1)
    assert "would be the file of sample 'x' and a directory" in done.stderr
    assert not (tmp_path / "out").exists()


def test_two_samples_of_one_file_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a//b.txt", b"1"), ("a/b.txt", b"2")])
    done = run("extract", tmp_path / "a.tar", "a//b", "a/b", tmp_path / "out", code=1)
    assert "would be written to the same file" in done.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_keys_leave_no_files(tar: Path, tmp_path: Path) -> None:
    done = run("extract", tar, "b", "x", tmp_path / "out", code=1)
    assert "no sample has the key 'x'" in done.stderr
    assert not (tmp_path / "out").exists()
