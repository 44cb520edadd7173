"""Indexes next to other tools' tars, and indexes that other tools read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

import shardio
from shardio.errors import FormatError, StaleIndexError
from shardio.reading import SampleReader
from shardio.shards import DatasetSource, ExportFormat, export_index, open_table
from shardio.storage import Location, parse_location
from tests.files import files_of_at_most, read_files
from tests.raising import assert_raises
from tests.tars import change_metadata, index_of, paths_of, read_with_webdataset, write_tar


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    write_tar(folder / "a.tar", [(f"{i}.jpg", bytes([i]) * 100) for i in range(50)])
    return folder / "a.tar"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which does not exist yet."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache"


def forbid_writing_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``os.access`` answer as if the user could not write to the folder, even if the user is root."""
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: (Path(path) != folder or not mode & os.W_OK) and access(path, mode)
    )


def test_the_index_is_created_once_next_to_the_tar(tar: Path, cache: Path) -> None:
    assert paths_of(open_table(tar).indexes) == [index_of(tar)]
    assert sorted(path.name for path in tar.parent.iterdir()) == ["a.tar", "a.tar.idx"]
    made = index_of(tar).stat()
    open_table(tar)
    assert (index_of(tar).stat().st_ino, index_of(tar).stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    assert not cache.exists()


def test_indexes_of_read_only_folders_are_in_the_cache(tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = open_table(tar).indexes[0].read_whole()
    index_of(tar).unlink()
    other = tar.parent.parent / "other" / "a.tar"
    other.parent.mkdir()
    write_tar(other, [("z.jpg", b"")])
    for path in tar, other:
        forbid_writing_in(path.parent, monkeypatch)
    table = open_table(tar)
    (index,) = paths_of(table.indexes)
    assert cache / "shardio" in index.parents
    assert index.read_bytes() == beside
    made = index.stat().st_ino
    sizes = [open_table(path).manifest.num_samples for path in (tar, other, tar)]
    assert (sizes, len([path for path in cache.rglob("*") if path.is_file()])) == ([50, 1, 50], 2)
    assert (open_table(tar).indexes, index.stat().st_ino) == (table.indexes, made)
    assert list(tar.parent.iterdir()) == [tar]


def members(*numbers: int) -> list[tuple[str, bytes]]:
    return [(f"{number}.txt", b"%03d" % number) for number in numbers]


def read_all(tar: Path) -> dict[str, bytes]:
    table = open_table(tar)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["txt"])
    return {sample.key: sample.fields["txt"] for sample in samples}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_tar_that_changed_only_in_the_middle_is_indexed_again(tar: Path, is_replaced: bool) -> None:
    write_tar(tar, members(1, 2, 3, 4))
    assert read_all(tar) == {str(number): b"%03d" % number for number in (1, 2, 3, 4)}
    before = tar.stat()
    if is_replaced:  # The new tar has the old tar's modification time.
        write_tar(tar.with_name("new"), members(1, 3, 2, 4))
        tar.with_name("new").replace(tar)
        os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        write_tar(tar, members(1, 3, 2, 4))
    assert tar.stat().st_size == before.st_size
    assert read_all(tar) == {str(number): b"%03d" % number for number in (1, 3, 2, 4)}


@pytest.mark.parametrize("order", [(1, 3, 2, 4), (1, 2, 5, 4)], ids=["swapped", "another"])
def test_a_change_that_the_file_system_hides_is_found_at_reading(tar: Path, order: tuple[int, ...]) -> None:
    write_tar(tar, [(f"{number}.txt", b"same") for number in (1, 2, 3, 4)])
    open_table(tar)
    before = tar.stat()
    write_tar(tar, [(f"{number}.txt", b"same") for number in order])
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    reader, index = SampleReader(open_table(tar)), 1 if order[1] == 3 else 2
    assert [sample.key for sample in reader.read(np.array([0, 3]), ["txt"])] == ["1", "4"]
    found = f"'txt' of sample {index + 1} is expected in .*a\\.tar at byte {1024 * index + 512}, but the tar holds "
    assert_raises(StaleIndexError, found + rf"{order[index]}\.txt there", reader.read, np.arange(4), ["txt"])


def rewrite_header(index: Path, **values: object) -> None:
    """Rewrite an index as earlier versions of shardio wrote it, in format 1 and without its tar's version."""

    def change(header: dict[str, object]) -> None:
        del header["version"], header["num_scattered"]
        header.update(values, format=1)

    index.write_bytes(change_metadata(index.read_bytes(), change))


@pytest.mark.parametrize("name", ["a.tar", "shard-000000.tar"])
def test_an_index_of_unknown_version_is_created_again(tar: Path, name: str) -> None:
    tar = tar.rename(tar.with_name(name))
    with tarfile.open(tar, "w") as file:
        for member, content in members(1, 2, 3, 4):
            info = tarfile.TarInfo(member)
            info.size, info.mtime = len(content), 1_700_000_000
            file.addfile(info, io.BytesIO(content))
    open_table(tar)
    index = index_of(tar)
    new = index.read_bytes()
    rewrite_header(index)
    assert read_all(tar.parent) == {str(number): b"%03d" % number for number in (1, 2, 3, 4)}
    assert index.read_bytes() == new


def test_an_index_that_records_the_tars_time_and_inode_stays_valid(tar: Path) -> None:
    open_table(tar)
    status = tar.stat()
    rewrite_header(index_of(tar), mtime_ns=status.st_mtime_ns, inode=status.st_ino)
    old = index_of(tar).read_bytes()
    assert (open_table(tar).manifest.num_samples, index_of(tar).read_bytes()) == (50, old)
    os.utime(tar, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert open_table(tar).manifest.num_samples == 50
    assert index_of(tar).read_bytes() != old


@pytest.mark.slow
def test_processes_that_index_a_changed_tar_at_once_agree(tar: Path) -> None:
    program = "import sys; from shardio.shards import open_table; print(open_table(sys.argv[1]).manifest.digest)"
    open_table(tar)
    write_tar(tar, [(f"{i}.jpg", bytes(100)) for i in range(3000)])
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(tar)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    digests = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert digests == {open_table(tar).manifest.digest}
    assert sorted(path.name for path in tar.parent.iterdir()) == ["a.tar", "a.tar.idx"]


def test_an_index_that_cannot_be_written_names_the_file_and_the_remedy(
    tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"File too large: cannot write the index of .*a\.tar\. .*a\.tar\.idx'"
    with files_of_at_most(1000):
        assert_raises(OSError, message, open_table, tar)
    forbid_writing_in(tar.parent, monkeypatch)
    cache.touch()
    assert_raises(OSError, r"cannot write the index of .*a\.tar\. .* or set XDG_CACHE_HOME .*cache/", open_table, tar)
    assert list(tar.parent.iterdir()) == [tar]


TARS = [f"shard-{number:06d}.tar" for number in range(5)]


def export(
    source: DatasetSource, name: ExportFormat, out: Path | None = None, *, split: str = "train", overwrite: bool = False
) -> list[Location]:
    into = None if out is None else parse_location(out)
    return export_index(open_table(source), name, into, split=split, overwrite=overwrite)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A dataset of nine samples in five shards. Some names need extended headers, and some samples lack a field."""
    with shardio.ShardWriter(tmp_path / "out", max_shard_samples=2) as writer:
        for i in range(9):
            key = "d/" * 60 + f"ü{i}" if i % 3 == 0 else f"k{i}"
            writer.write({"__key__": key, "jpg": bytes(500 * i), **({"cls": i} if i % 2 else {}), "json": {"i": i}})
    return tmp_path / "out"


def members_by_sample(tar: Path) -> list[list[tarfile.TarInfo]]:
    samples = dict[str, list[tarfile.TarInfo]]()
    with tarfile.open(tar) as opened:
        for member in opened:
            samples.setdefault(member.name.partition(".")[0], []).append(member)
    return list(samples.values())


def test_dalis_index_locates_each_member(out: Path) -> None:
    """The format is version 1.2, which DALI's tools/wds2idx.py writes."""
    written = export(out, "dali")
    assert [location.name for location in written] == [name.replace(".tar", ".idx") for name in TARS]
    for name in TARS:
        lines = (out / name.replace(".tar", ".idx")).read_text().splitlines()
        samples = members_by_sample(out / name)
        assert lines[0] == f"v1.2 {len(samples)}"
        for line, members in zip(lines[1:], samples, strict=True):
            expected = [(m.name.partition(".")[2], m.offset_data, m.size, m.name) for m in members]
            assert line == " ".join(" ".join(map(str, part)) for part in expected)
    assert shardio.verify(out) == []


def test_dalis_index_of_foreign_tars_is_in_the_order_of_the_members(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", b"12"), ("README", b""), ("x.cls", b"3")])
    export(tmp_path / "a.tar", "dali")
    assert (tmp_path / "a.idx").read_text() == "v1.2 1\njpg 512 2 x.jpg cls 2048 1 x.cls\n"
    write_tar(tmp_path / "b.tar", [("x y.jpg", b"12")])
    assert_raises(FormatError, "white space", export, tmp_path / "b.tar", "dali")


def test_energons_index_separates_the_samples(out: Path, tmp_path: Path) -> None:
    """Megatron-Energon's TarIndexWriter writes the offset of each sample's first header, and the end of the samples."""
    yaml = pytest.importorskip("yaml")
    export(out, "energon", tmp_path / "energon", split="val")
    for name in TARS:
        tar = tmp_path / "energon" / name
        assert tar.samefile(out / name)
        offsets = np.frombuffer((tmp_path / "energon" / f"{name}.idx").read_bytes(), "<u8").tolist()
        samples = members_by_sample(tar)
        assert offsets[:-1] == [members[0].offset for members in samples]
        content = tar.read_bytes()
        assert content[offsets[-1] :] == bytes(1024)
        for start, stop, members in zip(offsets, offsets[1:], samples, strict=False):
            with tarfile.open(fileobj=io.BytesIO(content[start:stop] + bytes(1024))) as part:
                assert part.getnames() == [member.name for member in members]
    files = {path.name: yaml.safe_load(path.read_text()) for path in (tmp_path / "energon" / ".nv-meta").iterdir()}
    assert files == {
        ".info.yaml": {"shard_counts": dict(zip(TARS, [2, 2, 2, 2, 1], strict=True))},
        "split.yaml": {"exclude": [], "split_parts": {"val": TARS}},
        "dataset.yaml": {
            "sample_type": {"__module__": "megatron.energon", "__class__": "ImageClassificationSample"},
            "field_map": {"image": "jpg", "label": "cls"},
        },
    }  # https://nvidia.github.io/Megatron-Energon/data_on_disk.html
    assert shardio.verify(out) == []


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"png": b"", "txt": ""}, "CaptioningSample"),
        ({"webp": b"", "json": 1}, "ImageSample"),
        ({"mp3": b""}, "CrudeWebdataset"),
    ],
)
def test_energons_sample_type_fits_the_fields(tmp_path: Path, fields: dict[str, Any], kind: str) -> None:
    yaml = pytest.importorskip("yaml")
    with shardio.ShardWriter(tmp_path / "out") as writer:
        writer.write({"__key__": "a", **fields})
    export(tmp_path / "out", "energon", tmp_path / "energon")
    found = yaml.safe_load((tmp_path / "energon" / ".nv-meta" / "dataset.yaml").read_text())
    assert found.get("sample_type", found) == {"__module__": "megatron.energon", "__class__": kind}


def test_energons_folder_holds_nothing_else(packed: Path, out: Path, tmp_path: Path) -> None:
    before = read_files(out)
    for folder in None, out, out / ".." / "out":
        assert_raises(ValueError, "also the name of shardio's index", export, out, "energon", folder)
    assert read_files(out) == before
    assert_raises(FileExistsError, "holds a packed dataset", export, out, "energon", packed, overwrite=True)
    export(out, "energon", tmp_path / "energon")
    export(out, "energon", tmp_path / "energon", overwrite=True)
    assert_raises(FileExistsError, "is not a link", export, packed, "energon", tmp_path / "energon", overwrite=True)


def test_the_shard_index_of_wids_has_its_form(out: Path, tmp_path: Path) -> None:
    """wids/wids_specs.py requires the version, and a list of shards with nsamples and a url relative to the file."""
    export(out, "wids")
    found = json.loads((out / "wids.json").read_text())
    assert (found["__kind__"], found["wids_version"]) == ("wids-shard-index-v1", 1)
    shards = [(shard["url"], shard["nsamples"], shard["filesize"]) for shard in found["shardlist"]]
    assert shards == [(name, 1 if name == TARS[-1] else 2, (out / name).stat().st_size) for name in TARS]
    export(out, "wids", tmp_path / "elsewhere")
    shards = json.loads((tmp_path / "elsewhere" / "wids.json").read_text())["shardlist"]
    assert all((tmp_path / "elsewhere" / shard["url"]).samefile(out / shard["url"][7:]) for shard in shards)


# Run timm in its own process, because it leaves the tars open.
TIMM = """
import sys
from shardio.libraries import import_library

import_library("timm")
from timm.data.readers.reader_wds import ReaderWds

reader = ReaderWds(root=sys.argv[1], name="", split="validation", is_training=False, batch_size=1)
print(reader.num_samples, *(target for _, target in reader))
"""


def test_timm_reads_its_info(packed: Path, tmp_path: Path) -> None:
    (location,) = export(packed, "timm", tmp_path, split="validation")
    found = json.loads((tmp_path / "_info.json").read_text())["splits"]["validation"]
    assert (location.name, found["name"]) == ("_info.json", "validation")
    assert found["shard_lengths"] == [len(read_with_webdataset(tmp_path / name)) for name in found["filenames"]]
    done = subprocess.run([sys.executable, "-c", TIMM, tmp_path], capture_output=True, text=True, check=False)
    if "cannot be imported" in done.stderr or "is not installed" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    labels = [int(fields["cls"]) for _, fields in read_with_webdataset(*sorted(packed.glob("*.tar")))]
    assert done.stdout.split() == [str(found["num_samples"]), *map(str, labels)]


@pytest.mark.parametrize("name", ["wids", "dali", "timm", "webdataset-sizes"])
def test_existing_files_are_not_replaced_unasked(out: Path, name: ExportFormat) -> None:
    export(out, name)
    before = read_files(out)
    assert_raises(FileExistsError, "--overwrite", export, out, name)
    export(out, name, overwrite=True)
    assert read_files(out) == before
    if name == "webdataset-sizes":  # open_clip finds the sizes by the base names of the shards.
        sizes = json.loads((out / "sizes.json").read_text())
        assert sizes == {name: len(read_with_webdataset(out / name)) for name in TARS}


def test_wrong_arguments_are_refused(out: Path, tmp_path: Path) -> None:
    assert_raises(ValueError, "format must be one of", export, out, "zip")
    assert_raises(ValueError, "split must be a name", export, out, "timm", split="a.tar")
    (tmp_path / "other").mkdir()
    for folder in "out", "other":
        write_tar(tmp_path / folder / "a.tar", [(f"{folder}.txt", b"")])
    assert_raises(ValueError, "several directories", export, [out / "a.tar", tmp_path / "other" / "a.tar"], "wids")
    for name in "b.x.tar", "b.y.tar":
        write_tar(tmp_path / "other" / name, [(f"{name[2]}.txt", b"")])
    assert_raises(FormatError, "same name", export, tmp_path / "other", "dali")
