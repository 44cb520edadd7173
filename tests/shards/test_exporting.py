"""The indexes of other tools say what those tools find in the tars themselves."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio.errors import FormatError
from shardio.shards import DatasetSource, ExportFormat, export_index, open_table
from shardio.storage import Location, parse_location
from tests.files import read_files
from tests.raising import assert_raises
from tests.tars import read_with_webdataset, write_tar

yaml = pytest.importorskip("yaml")

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
    """Its version 1.2, as tools/wds2idx.py of DALI writes it."""
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


# A process of its own, because DALI loads libraries of 500 MB.
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
    """As TarIndexWriter of Megatron-Energon writes it: where the headers of each sample start, and the end."""
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
    found = yaml.safe_load((tmp_path / "energon" / ".nv-meta" / "dataset.yaml").read_text())
    assert found.get("sample_type", found) == {"__module__": "megatron.energon", "__class__": kind}


def test_energons_index_does_not_replace_shardios(out: Path) -> None:
    before = read_files(out)
    for folder in None, out, out / ".." / "out":
        assert_raises(ValueError, "also shardio's", export, out, "energon", folder)
    assert read_files(out) == before


def test_energons_folder_must_not_hold_another_dataset(packed: Path, out: Path, tmp_path: Path) -> None:
    assert_raises(FileExistsError, "holds a packed dataset", export, out, "energon", packed, overwrite=True)
    export(out, "energon", tmp_path / "energon")
    export(out, "energon", tmp_path / "energon", overwrite=True)
    assert_raises(FileExistsError, "is not a link", export, packed, "energon", tmp_path / "energon", overwrite=True)


def test_the_shard_index_of_wids_has_its_form(out: Path, tmp_path: Path) -> None:
    """That of wids/wids_specs.py: the version, and a list of shards with url and nsamples, relative to the file."""
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
    """As open_clip sums them: by the base names of the shards."""
    export(out, "webdataset-sizes")
    sizes = json.loads((out / "sizes.json").read_text())
    assert sizes == {name: len(read_with_webdataset(out / name)) for name in TARS}


# A process of its own, because timm leaves the tars open.
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
