"""Indexes beside tars of other tools, and indexes that other tools read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
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
    """Make ``os.access`` answer as for a user who may not write in the folder, even for root."""
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
    forbid_writing_in(tar.parent, monkeypatch)
    table = open_table(tar)
    assert list(tar.parent.iterdir()) == [tar]
    (index,) = paths_of(table.indexes)
    assert cache / "shardio" in index.parents
    assert (index.read_bytes(), table.manifest.num_samples) == (beside, 50)
    made = index.stat().st_ino
    again = open_table(tar)
    assert (again.indexes, index.stat().st_ino) == (table.indexes, made)


def test_tars_of_one_name_have_indexes_of_their_own(tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tar.parent.parent / "other" / "a.tar"
    other.parent.mkdir()
    write_tar(other, [("z.jpg", b"")])
    for path in tar, other:
        forbid_writing_in(path.parent, monkeypatch)
    sizes = [open_table(path).manifest.num_samples for path in (tar, other, tar)]
    assert (sizes, len([path for path in cache.rglob("*") if path.is_file()])) == ([50, 1, 50], 2)


def members(*numbers: int) -> list[tuple[str, bytes]]:
    return [(f"{number}.txt", b"%03d" % number) for number in numbers]


def read_all(tar: Path) -> dict[str, bytes]:
    table = open_table(tar)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["txt"])
    return {sample.key: sample.fields["txt"] for sample in samples}


@pytest.mark.parametrize("how", ["in place", "by rename, with the time of the old one"])
def test_a_tar_that_changed_only_in_the_middle_is_indexed_again(tar: Path, how: str) -> None:
    write_tar(tar, members(1, 2, 3, 4))
    assert read_all(tar) == {str(number): b"%03d" % number for number in (1, 2, 3, 4)}
    before = tar.stat()
    if how == "in place":
        write_tar(tar, members(1, 3, 2, 4))
    else:
        write_tar(tar.with_name("new"), members(1, 3, 2, 4))
        tar.with_name("new").replace(tar)
        os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
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


def test_an_index_on_a_full_disk_names_the_file_and_the_remedy(tar: Path) -> None:
    with (
        files_of_at_most(1000),
        pytest.raises(OSError, match=r"File too large: cannot write the index of .*a\.tar\. .*a\.tar\.idx'"),
    ):
        open_table(tar)
    assert (list(tar.parent.iterdir()), open_table(tar).manifest.num_samples) == ([tar], 50)


def test_a_cache_folder_that_is_a_file_is_named(tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A dataset of 9 samples in five shards. Some names need extended headers, and some samples lack a field."""
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


# Run DALI in its own process, because it loads libraries of 500 MB.
DALI = """
import sys
from pathlib import Path

import numpy as np
from nvidia.dali import fn, pipeline_def

tars = sorted(map(str, Path(sys.argv[1]).glob("*.tar")))


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def read():
    indexes = [tar.replace(".tar", ".idx") for tar in tars]
    contents = fn.readers.webdataset(
        paths=tars, index_paths=indexes, ext=["jpg", "json"], missing_component_behavior="error", name="tars"
    )
    return tuple(contents)


pipeline = read()
pipeline.build()
for _ in range(pipeline.reader_meta()["tars"]["epoch_size"]):
    print(*(bytes(np.asarray(output[0])).hex() for output in pipeline.run()))
"""


@pytest.mark.slow
def test_dali_reads_by_its_index(out: Path) -> None:
    if find_spec("nvidia") is None or find_spec("nvidia.dali") is None:
        pytest.skip("DALI is not installed: pip install -e '.[bench]'")
    export(out, "dali")
    done = subprocess.run([sys.executable, "-c", DALI, out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [
        (fields["jpg"].hex(), fields["json"].hex()) for _, fields in read_with_webdataset(*sorted(out.glob("*.tar")))
    ]
    assert [tuple(line.split(" ")) for line in done.stdout.splitlines()] == expected


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
    with shardio.ShardWriter(tmp_path / "out") as writer:
        writer.write({"__key__": "a", **fields})
    export(tmp_path / "out", "energon", tmp_path / "energon")
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((tmp_path / "energon" / ".nv-meta" / "dataset.yaml").read_text())
    assert found.get("sample_type", found) == {"__module__": "megatron.energon", "__class__": kind}


def test_energons_index_does_not_replace_shardios(out: Path) -> None:
    before = read_files(out)
    for folder in None, out, out / ".." / "out":
        assert_raises(ValueError, "also the name of shardio's index", export, out, "energon", folder)
    assert read_files(out) == before


def test_energons_folder_must_not_hold_another_dataset(packed: Path, out: Path, tmp_path: Path) -> None:
    assert_raises(FileExistsError, "holds a packed dataset", export, out, "energon", packed, overwrite=True)
    export(out, "energon", tmp_path / "energon")
    export(out, "energon", tmp_path / "energon", overwrite=True)
    assert_raises(FileExistsError, "is not a link", export, packed, "energon", tmp_path / "energon", overwrite=True)


def test_the_shard_index_of_wids_has_its_form(out: Path, tmp_path: Path) -> None:
    """wids/wids_specs.py requires the version, and a list of shards with nsamples and a url relative to the file."""
    export(out, "wids")
    found = json.loads((out / "wids.json").read_text())
    assert (found["__kind__"], found["wids_version"]) == ("wids-shard-index-v1", 1)
    assert [(shard["url"], shard["nsamples"]) for shard in found["shardlist"]] == list(
        zip(TARS, [2, 2, 2, 2, 1], strict=True)
    )
    assert [shard["filesize"] for shard in found["shardlist"]] == [(out / name).stat().st_size for name in TARS]
    export(out, "wids", tmp_path / "elsewhere")
    shards = json.loads((tmp_path / "elsewhere" / "wids.json").read_text())["shardlist"]
    assert all((tmp_path / "elsewhere" / shard["url"]).samefile(out / shard["url"][7:]) for shard in shards)


def test_wids_reads_its_shard_index(packed: Path) -> None:
    wids = pytest.importorskip("wids")
    export(packed, "wids")
    dataset = wids.ShardListDataset(str(packed / "wids.json"), transformations=[lambda sample: sample], keep=True)
    expected = read_with_webdataset(*sorted(packed.glob("*.tar")))
    assert len(dataset) == len(expected)
    for i, (key, fields) in enumerate(expected):
        assert (dataset[i]["__key__"], dataset[i][".jpg"].read()) == (key, fields["jpg"])


def test_the_sizes_of_webdatasets_count_the_samples(out: Path) -> None:
    """open_clip finds the sizes by the base names of the shards."""
    export(out, "webdataset-sizes")
    sizes = json.loads((out / "sizes.json").read_text())
    assert sizes == {name: len(read_with_webdataset(out / name)) for name in TARS}


# Run timm in its own process, because it leaves the tars open.
TIMM = """
import sys
from shardio.libraries import import_library

import_library("timm")
from timm.data.readers.reader_wds import ReaderWds

reader = ReaderWds(root=sys.argv[1], name="", split="validation", is_training=False, batch_size=1)
print(reader.num_samples, *(target for _, target in reader))
"""


@pytest.mark.slow
def test_timm_reads_its_info(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    (location,) = export(packed, "timm", tmp_path, split="validation")
    assert location.name == "_info.json"
    done = subprocess.run([sys.executable, "-c", TIMM, tmp_path], capture_output=True, text=True, check=False)
    if "cannot be imported" in done.stderr or "is not installed" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = read_with_webdataset(*sorted(packed.glob("*.tar")))
    labels = [int(fields["cls"]) for _, fields in found]
    assert done.stdout.split() == [str(open_table(packed).manifest.num_samples), *map(str, labels)]


def test_timms_info_has_its_form(packed: Path, tmp_path: Path) -> None:
    export(packed, "timm", tmp_path)
    found = json.loads((tmp_path / "_info.json").read_text())["splits"]["train"]
    assert (found["name"], found["num_samples"]) == ("train", sum(found["shard_lengths"]))
    assert found["shard_lengths"] == [len(read_with_webdataset(tmp_path / name)) for name in found["filenames"]]


@pytest.mark.parametrize("name", ["wids", "dali", "timm", "webdataset-sizes"])
def test_existing_files_are_not_replaced_unasked(out: Path, name: ExportFormat) -> None:
    export(out, name)
    before = read_files(out)
    assert_raises(FileExistsError, "--overwrite", export, out, name)
    export(out, name, overwrite=True)
    assert read_files(out) == before


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
