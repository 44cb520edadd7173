from __future__ import annotations

import gzip
import json
import resource
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardio.cli.main import app
from shardio.shards import open_table
from tests.tars import index_of, read_members, write_tar

MEMBERS = [("a.jpg", b"1" * 700), ("README", b"x"), ("a.cls", b"0"), ("._b.jpg", b"x"), ("d/b.cls", b"1")]


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done


def compress(tar: Path) -> Path:
    """Compress a tar as ``gzip -k`` does; return the path of the result."""
    path = tar.with_name(tar.name + ".gz")
    path.write_bytes(gzip.compress(tar.read_bytes()))
    return path


def test_each_tar_is_indexed_and_described(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write_tar(tar, MEMBERS)
    before = tar.read_bytes(), tar.stat().st_mtime_ns
    done = run("index", tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{tar}: 2 samples, ")
    assert lines[0].endswith("fields: cls (2), jpg (1)")
    assert lines[1] == "  skipped 2 members without a key, or added by macOS: README, ._b.jpg"
    assert lines[2] == f"  index: {index_of(tar)}"
    assert run("index", tar).stdout.splitlines()[-1] == f"  index: {index_of(tar)} (already current)"
    assert (tar.read_bytes(), tar.stat().st_mtime_ns) == before
    index = index_of(tar).read_bytes()
    open_table(tar)
    assert index_of(tar).read_bytes() == index


def test_samples_whose_members_are_not_adjacent_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.jpg", b""), ("b.jpg", b""), ("a.cls", b""), ("c.jpg", b""), ("a.json", b"")])
    done = run("index", tmp_path / "a.tar")
    assert "a.tar: 3 samples" in done.stdout
    assert "  the members of 1 sample are not adjacent (tar without --sort=name?), such as those of a: " in done.stdout
    values = json.loads(run("index", tmp_path / "a.tar", "--json").stdout)
    assert (values["tars"][0]["not_adjacent"], values["tars"][0]["repeated"]) == (["a"], [])


def test_keys_of_several_samples_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.jpg", b""), ("b.jpg", b""), ("a.jpg", b"")])
    done = run("index", tmp_path / "a.tar", code=1)
    assert "a.tar: 3 samples" in done.stdout
    assert "  several samples have the key a\n" in done.stdout
    values = json.loads(run("index", tmp_path / "a.tar", "--json", code=1).stdout)
    assert (values["tars"][0]["not_adjacent"], values["tars"][0]["repeated"]) == ([], ["a"])


def test_a_tar_that_cannot_be_indexed_does_not_stop_the_others(tmp_path: Path) -> None:
    for name in "abc":
        write_tar(tmp_path / f"{name}.tar", MEMBERS)
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:1000])
    done = run("index", tmp_path, "--json", code=1)
    values = json.loads(done.stdout)
    assert [tar["samples"] for tar in values["tars"]] == [2, 2]
    assert list(values["failures"]) == [str(tmp_path / "b.tar")]
    assert "b.tar" in done.stderr
    assert not index_of(tmp_path / "b.tar").exists()


def test_packed_and_missing_sources_are_refused(packed: Path, tmp_path: Path) -> None:
    def refuse(source: Path) -> str:
        return str(CliRunner().invoke(app, ["index", str(source)]).exception)

    assert "shardio repair" in refuse(packed)
    assert "holds no *.tar" in refuse(tmp_path)
    assert "no such tar" in refuse(tmp_path / "x.tar")


def test_a_compressed_tar_has_the_index_of_the_tar(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write_tar(tar, MEMBERS)
    path = compress(tar)
    done = run("index", tar, path)
    assert "decompressed" in done.stdout
    listed = [run("ls", source, "--json").stdout for source in (tar, path)]
    assert listed[0].replace('"a.tar"', '"a.tar.gz"') == listed[1]
    for key, field in (("a", "jpg"), ("a", "cls"), ("d/b", "cls")):
        expected = dict(read_members(tar))[f"{key}.{field}"]
        assert run("cat", path, key, "--field", field).stdout_bytes == expected
    run("extract", path, "d/b", "a", tmp_path / "out")
    assert (tmp_path / "out" / "a.jpg").read_bytes() == b"1" * 700
    assert run("verify", path).stdout.startswith("no problems in 1 shard, 2 samples")


def test_a_compressed_tar_of_several_gzip_members_is_read_whole(tmp_path: Path) -> None:
    """RFC 1952 allows them; pigz and bgzip write them."""
    tar = tmp_path / "a.tar"
    write_tar(tar, [(f"{i}.bin", bytes([i]) * 5000) for i in range(20)])
    content = tar.read_bytes()
    (tmp_path / "b.tgz").write_bytes(
        b"".join(gzip.compress(content[i : i + 7000]) for i in range(0, len(content), 7000))
    )
    assert "20 samples" in run("index", tmp_path / "b.tgz").stdout
    assert run("cat", tmp_path / "b.tgz", "19").stdout_bytes == bytes([19]) * 5000


def test_datasets_keep_refusing_compressed_tars(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", MEMBERS)
    path = compress(tmp_path / "a.tar")

    def refusal(source: Path) -> str:
        with pytest.raises(Exception, match="compress") as caught:
            open_table(source)
        return str(caught.value)

    before = refusal(path), refusal(tmp_path)
    run("index", path)
    index = index_of(path).read_bytes()
    assert (refusal(path), refusal(tmp_path)) == before
    assert index_of(path).read_bytes() == index


@pytest.mark.parametrize("damage", ["truncated", "changed", "no gzip", "tar truncated", "trailing"])
def test_a_damaged_compressed_tar_is_an_error(tmp_path: Path, damage: str) -> None:
    write_tar(tmp_path / "a.tar", MEMBERS)
    path = compress(tmp_path / "a.tar")
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[:-9],
            "changed": content[:60] + bytes([content[60] ^ 255]) + content[61:],
            "no gzip": (tmp_path / "a.tar").read_bytes(),
            "tar truncated": gzip.compress((tmp_path / "a.tar").read_bytes()[:900]),
            "trailing": content + b"garbage",
        }[damage]
    )
    done = run("index", path, code=1)
    assert "a.tar.gz" in done.stderr
    assert not index_of(path).exists()


def test_a_compressed_tar_that_changed_needs_a_new_index(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", MEMBERS)
    path = compress(tmp_path / "a.tar")
    run("index", path)
    write_tar(tmp_path / "a.tar", MEMBERS[:1])
    compress(tmp_path / "a.tar")
    found = CliRunner().invoke(app, ["ls", str(path)])
    assert "no current index: create one with shardio index" in str(found.exception)
    run("index", path)
    assert run("ls", path).stdout == "a\n"


def test_a_decompression_bomb_needs_little_memory(tmp_path: Path) -> None:
    """A member of 100 MiB in 0.5 MB. Its content is neither kept nor read at once."""
    path = tmp_path / "a.tgz"
    info = tarfile.TarInfo("a.bin")
    info.size = 100 * 2**20
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(info.tobuf())
        for _ in range(100):
            file.write(bytes(2**20))
        file.write(bytes(1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "1 sample, 100 MiB decompressed" in run("index", path).stdout
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 2**10  # KiB
