"""``shardio index``, ``verify``, ``repair``, ``append``, ``merge``, ``split``, ``reshard`` and ``export-index``."""

from __future__ import annotations

import gzip
import json
import re
import resource
import shutil
import tarfile
from pathlib import Path

import pytest

import shardio
from shardio.shards import open_table
from tests.cli.commands import error_of, run, usage_error
from tests.files import read_files
from tests.raising import assert_raises
from tests.sources import write_images
from tests.tars import index_of, read_members, write_tar

MEMBERS = [("a.jpg", b"1" * 700), ("README", b"x"), ("a.cls", b"0"), ("._b.jpg", b"x"), ("d/b.cls", b"1")]


def compress(tar: Path) -> Path:
    """Compress a tar as ``gzip -k`` does. Return the path of the result."""
    path = tar.with_name(tar.name + ".gz")
    path.write_bytes(gzip.compress(tar.read_bytes()))
    return path


def test_each_tar_is_indexed_and_described(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write_tar(tar, MEMBERS)
    before = tar.read_bytes(), tar.stat().st_mtime_ns
    lines = run("index", tmp_path).stdout.splitlines()
    assert re.fullmatch(rf"{tar}: 2 samples, .*fields: cls \(2\), jpg \(1\)", lines[0])
    assert lines[1] == "  skipped 2 members that have no key or were added by macOS: README, ._b.jpg"
    assert lines[2] == f"  index: {index_of(tar)}"
    assert run("index", tar).stdout.splitlines()[-1] == f"  index: {index_of(tar)} (already current)"
    index = index_of(tar).read_bytes()
    open_table(tar)
    assert (tar.read_bytes(), tar.stat().st_mtime_ns, index_of(tar).read_bytes()) == (*before, index)


def test_keys_that_occur_twice_or_are_not_adjacent_are_named(tmp_path: Path) -> None:
    names = ["a.jpg", "b.jpg", "a.cls", "c.jpg", "a.json"]
    for added, code, text in (
        ([], 0, "  the members of 1 sample, such as a, are not adjacent (tar without --sort=name?): "),
        (["b.jpg"], 1, "  several samples have the key b\n"),
    ):
        write_tar(tmp_path / "a.tar", [(name, b"") for name in (names[:3] if added else names) + added])
        done = run("index", tmp_path / "a.tar", code=code)
        assert "a.tar: 3 samples" in done.stdout
        assert text in done.stdout
        (tar,) = json.loads(run("index", tmp_path / "a.tar", "--json", code=code).stdout)["tars"]
        assert (tar["repeated"], tar["not_adjacent"]) == ([name[0] for name in added], ["a"])


def test_what_cannot_be_indexed_is_named_and_does_not_stop_the_other_tars(packed: Path, tmp_path: Path) -> None:
    for source, error in (
        (packed, "shardio repair"),
        (tmp_path, "holds no *.tar"),
        (tmp_path / "x.tar", "no such tar"),
    ):
        assert error in error_of("index", source)
    for name in "abc":
        write_tar(tmp_path / f"{name}.tar", MEMBERS)
    (tmp_path / "b.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:1000])
    done = run("index", tmp_path, "--json", code=1)
    values = json.loads(done.stdout)
    assert [tar["samples"] for tar in values["tars"]] == [2, 2]
    assert list(values["failures"]) == [str(tmp_path / "b.tar")]
    assert "b.tar" in done.stderr
    assert not index_of(tmp_path / "b.tar").exists()


def test_commands_read_compressed_tars_and_datasets_keep_refusing_them(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    write_tar(tar, MEMBERS)
    path = compress(tar)
    refusals = [str(assert_raises(Exception, "compress", open_table, source)) for source in (path, tmp_path)]
    assert "decompressed" in run("index", tar, path).stdout
    listed = [run("ls", source, "--json").stdout for source in (tar, path)]
    assert listed[0].replace('"a.tar"', '"a.tar.gz"') == listed[1]
    for key, field in (("a", "jpg"), ("a", "cls"), ("d/b", "cls")):
        assert run("cat", path, key, "--field", field).stdout_bytes == dict(read_members(tar))[f"{key}.{field}"]
    run("extract", path, "d/b", "a", tmp_path / "out")
    assert (tmp_path / "out" / "a.jpg").read_bytes() == b"1" * 700
    assert run("verify", path).stdout.startswith("no problems in 1 shard, 2 samples")
    index_of(tar).unlink()
    index = index_of(path).read_bytes()
    assert [str(assert_raises(Exception, "compress", open_table, source)) for source in (path, tmp_path)] == refusals
    assert index_of(path).read_bytes() == index
    write_tar(tar, MEMBERS[:1])
    compress(tar)
    assert "no current index: create one with shardio index" in str(run("ls", path, code=1).exception)
    run("index", path)
    assert run("ls", path).stdout == "a\n"


def test_a_compressed_tar_of_several_gzip_members_is_read_whole(tmp_path: Path) -> None:
    """RFC 1952 allows several members in a file, and tools such as bgzip write such files."""
    tar = tmp_path / "a.tar"
    write_tar(tar, [(f"{i}.bin", bytes([i]) * 5000) for i in range(20)])
    content = tar.read_bytes()
    pieces = [content[start : start + 7000] for start in range(0, len(content), 7000)]
    (tmp_path / "b.tgz").write_bytes(b"".join(map(gzip.compress, pieces)))
    assert "20 samples" in run("index", tmp_path / "b.tgz").stdout
    assert run("cat", tmp_path / "b.tgz", "19").stdout_bytes == bytes([19]) * 5000


def test_a_damaged_compressed_tar_is_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", MEMBERS)
    plain, path = (tmp_path / "a.tar").read_bytes(), compress(tmp_path / "a.tar")
    content = path.read_bytes()
    changed = content[:60] + bytes([content[60] ^ 255]) + content[61:]
    for damaged in (content[:-9], changed, plain, gzip.compress(plain[:900]), content + b"garbage"):
        path.write_bytes(damaged)
        assert "a.tar.gz" in run("index", path, code=1).stderr
        assert not index_of(path).exists()


def test_a_decompression_bomb_needs_little_memory(tmp_path: Path) -> None:
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


@pytest.fixture
def out(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "out"))


def test_problems_are_printed_and_counted(packed: Path, out: Path) -> None:
    done = run("verify", packed, "--deep", "--workers", 1)
    assert re.fullmatch("no problems in 5 shards, 21 samples, .*\n", done.stdout)
    assert done.stderr == ""
    (out / "shard-000002.tar.idx").unlink()
    lines = run("verify", out, code=1).stdout.splitlines()
    assert lines[0].startswith(f"missing: {out / 'shard-000002.tar'}: it has no index")
    assert lines[-1].startswith("1 problem (1 missing) in 5 shards, 16 samples")
    values = json.loads(run("verify", out, "--json", code=1).stdout)
    assert (values["kinds"], values["problems"][0]["where"]) == ({"missing": 1}, str(out / "shard-000002.tar"))
    assert 0 < values["elapsed_s"] < 3600


def test_the_output_is_bounded_unless_it_is_json(tmp_path: Path) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", [(f"{i}.txt", name.encode()) for i in range(30)])
    open_table(tmp_path)
    lines = run("verify", tmp_path, code=1).stdout.splitlines()
    assert (len(lines), lines[20]) == (22, "duplicate: 10 more (--json prints all)")
    assert len(json.loads(run("verify", tmp_path, "--json", code=1).stdout)["problems"]) == 30


def test_lost_classes_are_given_again(out: Path, packed: Path, tmp_path: Path) -> None:
    (out / ".shard-000001.tar.0123abcd.partial").write_bytes(b"x")  # Left by a killed repair.
    assert run("repair", out).stdout.startswith("nothing to repair: 5 shards, 21 samples, ")
    assert read_files(out) == read_files(packed)
    (out / "shardio.json").unlink()
    done = run("repair", out)
    assert "shardio.json: wrote the manifest, which was missing" in done.stdout
    assert f"shardio repair {out} --classes FILE" in done.stderr
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    for source, names in ((tmp_path / "names.txt", ("a", "b", "c")), (packed, open_table(packed).manifest.classes)):
        assert (run("repair", out, "--classes", source).stderr, open_table(out).manifest.classes) == ("", names)


def test_dropped_samples_and_problems_are_printed(out: Path) -> None:
    tar = out / "shard-000001.tar"
    keys = run("ls", out).stdout.splitlines()[5:10]
    tar.write_bytes(tar.read_bytes()[:-2000])
    (out / "shard-000002.tar").write_bytes(b"x" * 5000)
    done = run("repair", out, code=1)
    assert f"  dropped sample {keys[-1]}\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("3 files written: 5 shards, 20 samples")
    assert done.stderr.startswith(f"header: {out / 'shard-000002.tar'}: the tar cannot be read and was not changed")
    values = json.loads(run("repair", out, "--json", code=1).stdout)
    assert [problem["where"] for problem in values["problems"]] == [str(out / "shard-000002.tar")]
    assert values["actions"] == []


def test_datasets_are_appended_to_split_merged_and_resharded(packed: Path, out: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "x"
    write_images(new, classes=2, per_class=1)
    assert "have the key" in str(run("append", out, new, code=1).exception)
    for path in sorted(new.rglob("*.jpg")):
        path.rename(path.with_name(f"new-{path.name}"))
    done = run("append", out, new, "--workers", "1")
    assert done.stdout == f"{out}: added 2 samples; now 23 samples in 6 shards\n"
    with shardio.ShardWriter(tmp_path / "more") as writer:
        writer.write({"__key__": "m", "txt": ""})
    found = json.loads(run("append", out, tmp_path / "more", "--copy", "--json").stdout)
    assert (found["added"], found["samples"], found["fields"]) == (1, 24, ["cls", "jpg", "txt"])

    parts = [tmp_path / "parts" / name for name in "ab"]
    done = run("split", packed, tmp_path / "parts", "--by", "0.5,0.5", "--names", "a,b")
    sizes = [f"{part}: {open_table(part).manifest.num_samples}" for part in parts]
    assert [line.partition(" sample")[0] for line in done.stdout.splitlines()] == sizes
    found = json.loads(run("merge", tmp_path / "merged", *parts, "--max-shard-samples", "7", "--json").stdout)
    assert (found["samples"], found["shards"], found["classes"]) == (21, 3, 3)
    run("reshard", tmp_path / "merged", tmp_path / "again", "--max-shard-size", "1MiB", "--shuffle-seed", "1")
    with shardio.open(packed) as before, shardio.open(tmp_path / "again") as after:
        assert sorted(before) == sorted(after)
    assert "not empty" in str(run("reshard", packed, tmp_path / "again", code=1).exception)
    run("reshard", packed, tmp_path / "again", "--overwrite")
    for wrong in ("--by 0.5,0.6", "--by 1 --names a", "--names a/b,c", "--max-shard-size big"):
        usage_error("split", packed, tmp_path / "refused", *wrong.split())
    assert not (tmp_path / "refused").exists()
    assert "xxh3-64" in run("split", "--help").stdout


def test_export_index_writes_files(packed: Path, tmp_path: Path) -> None:
    export = ("export-index", packed, "--format")
    assert run(*export, "timm", "--out", tmp_path / "timm").stdout == f"wrote 1 file to {tmp_path}/timm\n"
    found = json.loads(run(*export, "energon", "--out", tmp_path / "e", "--json").stdout)
    assert f"{tmp_path}/e/.nv-meta/split.yaml" in found["files"]
    usage_error(*export, "energon")
    usage_error(*export, "zip")
    assert "timm" in error_of(*export, "timm", "--out", tmp_path / "timm")
