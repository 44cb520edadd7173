from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import shardio
from shardio.cli.main import app
from shardio.cli.options import parse_size_option, read_classes
from shardio.errors import PackError
from shardio.packing import PackSettings, packer
from shardio.packing.plan import PackPlan, make_plan
from shardio.packing.sources.source import SourceTable
from tests.files import read_files
from tests.processes import run_python
from tests.sources import encode, write_images


def run_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process, as users do."""
    return run_python("-m", "shardio", *arguments)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_the_same_files_as_the_function(images: Path, packed: Path, tmp_path: Path) -> None:
    done = run_process("pack", images, tmp_path / "out", "--max-shard-samples", 5)
    assert done.returncode == 0, done.stderr
    assert read_files(tmp_path / "out") == read_files(packed)
    assert done.stdout.startswith("packed 21 samples of 3 classes into 5 shards")
    assert "packing 21 samples" in done.stderr


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--no-shuffle"], {"shuffle_seed": None}),
        (["--shuffle-seed", "7"], {"shuffle_seed": 7}),
        (["--max-shard-size", "10KB"], {"max_shard_size": 10_000}),
        (["--max-shard-samples", "1", "--num-workers", "3"], {"max_shard_samples": 1}),
        ([], {}),
    ],
    ids=str,
)
def test_options_equal_the_functions_arguments(
    images: Path, tmp_path: Path, options: list[str], settings: dict[str, int | None]
) -> None:
    assert run("pack", images, tmp_path / "a", *options).exit_code == 0
    shardio.pack(images, tmp_path / "b", **settings)  # type: ignore[arg-type]
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


@pytest.mark.parametrize("text", ["\ufeffa\r\nb\u2028c\r\n", "a\nb\u2028c\n \n\n"])
def test_a_file_of_classes_has_one_name_per_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "names.txt").write_bytes(text.encode())
    assert read_classes(tmp_path / "names.txt") == ("a", "b\u2028c")


def test_an_empty_line_between_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("a\n\nb\n")
    done = run("pack", tmp_path, tmp_path / "out", "--classes", tmp_path / "names.txt")
    assert done.exit_code == 2
    assert "line 2 of" in done.output


def test_a_file_of_classes_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"classes\.txt is not a UTF-8 text file"):
        read_classes(tmp_path / "classes.txt")


def test_classes_define_the_labels(tmp_path: Path) -> None:
    """A file of names, class folders, or a packed dataset gives validation data the labels of the training data."""
    write_images(tmp_path / "train", classes=3, per_class=1)
    write_images(tmp_path / "val", classes=3, per_class=1)
    shutil.rmtree(tmp_path / "val" / "class-1")
    train = shardio.pack(tmp_path / "train", tmp_path / "packed")
    (tmp_path / "names.txt").write_text("class-0\nclass-1\nclass-2\n")
    shardio.pack(tmp_path / "val", tmp_path / "expected", classes=train)
    expected = read_files(tmp_path / "expected")
    sources = ["names.txt", "train", "packed", "packed/shardio.json"]
    for i, source in enumerate(sources):
        done = run("pack", tmp_path / "val", tmp_path / f"out{i}", "--classes", tmp_path / source)
        assert done.exit_code == 0, done.output
        assert read_files(tmp_path / f"out{i}") == expected
    dataset = shardio.ShardMapDataset(tmp_path / "out0", fields=("key", "label"))
    assert dataset.classes == ["class-0", "class-1", "class-2"]
    assert sorted(dataset[index] for index in range(2)) == [("class-0/name-000", 0), ("class-2/name-000", 2)]
    whole, out = tmp_path / "train", tmp_path / "out"
    with pytest.raises(PackError, match=r"has classes that are not among the given ones \(class-0, class-2\): class-1"):
        shardio.pack(whole, out, classes=["class-0", "class-2"])
    with pytest.raises(PackError, match="is packed without class folders"):
        shardio.pack(whole, out, classes=train, layout="flat")
    assert not out.exists()


def test_the_summary_lists_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "in", classes=1, per_class=3)
    missing = tmp_path / "in" / "class-0" / "name-001.jpg"

    def make_plan_and_remove(samples: SourceTable, classes: Sequence[str], settings: PackSettings) -> PackPlan:
        missing.unlink()
        return make_plan(samples, classes, settings)

    monkeypatch.setattr(packer, "make_plan", make_plan_and_remove)
    done = run("pack", tmp_path / "in", tmp_path / "out", "--on-changed", "skip", "--json")
    summary = json.loads(done.stdout)
    assert (summary["samples"], summary["changed"]) == (2, [{"path": str(missing), "what": "is missing"}])


def test_json_contains_the_whole_summary(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    write_images(source, classes=2, per_class=3)
    (source / "class-0" / "odd.jpg").write_bytes(encode(1, suffix="png"))
    (source / "class-0" / "broken.jpg").write_bytes(b"no image")
    (source / "notes.txt").touch()
    done = run_process("pack", source, out, "--json", "--max-shard-samples", 4)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary.pop("seconds") > 0
    manifest = shardio.ShardDataset(out).table.manifest
    size = sum(path.stat().st_size for path in source.rglob("name-*.jpg"))
    assert summary == {
        "out": str(out),
        "samples": 7,
        "kept": 0,
        "classes": 2,
        "shards": 2,
        "bytes": sum(path.stat().st_size for path in out.glob("*.tar")),
        "fields": ["cls", "jpg"],
        "digest": manifest.digest,
        "jpegs": {"outcomes": {"copied": 6}, "bytes_before": size, "bytes_after": size, "damaged": []},
        "converted": {},
        "clipped": {},
        "mislabelled": [
            {"path": str(source / "class-0" / "odd.jpg"), "what": "has the suffix .jpg but is in PNG format"}
        ],
        "rejected": [{"key": "class-0/broken", "file": "class-0/broken.jpg", "reason": "is not an image"}],
        "ignored": [str(source / "notes.txt")],
        "suffixed": [],
        "packed_again": [],
        "changed": [],
    }


def test_standard_error_names_files_that_are_not_packed(tmp_path: Path) -> None:
    source = tmp_path / "in"
    write_images(source, classes=1, per_class=1)
    for i in range(12):
        (source / "class-0" / f"broken-{i:02d}.jpg").write_bytes(b"no image")
    (source / "class-0" / "odd.jpg").write_bytes(encode(1, suffix="png"))
    (source / "notes.txt").touch()
    done = run("pack", source, tmp_path / "out")
    assert done.exit_code == 0
    assert "12 files left out" in done.stderr
    assert "broken-09.jpg is not an image" in done.stderr
    assert "broken-10.jpg" not in done.stderr
    assert "and 2 more (--json lists all of them)" in done.stderr
    assert "odd.jpg has the suffix .jpg but is in PNG format" in done.stderr
    assert "notes.txt" in done.stderr


def test_standard_error_says_how_to_store_uncompressed_and_unread_images(tmp_path: Path) -> None:
    for i, suffix in enumerate(("bmp", "jpg")):
        write_images(tmp_path / "in", classes=1, per_class=1 + i, suffix=suffix)
        (tmp_path / "in" / "class-0" / "name-000.jpg").unlink(missing_ok=True)
        done = run("pack", tmp_path / "in", tmp_path / f"out-{suffix}")
        others = " and convert all others, too\n" if i else "\n"
        assert f".bmp images are uncompressed: --convert-to png would store them in less space{others}" in done.stderr
    (tmp_path / "in" / "class-0" / "x.gif").write_bytes(b"x")
    done = run("pack", tmp_path / "in", tmp_path / "out", "--convert-to", "png")
    assert "uncompressed" not in done.stderr
    done = run("pack", tmp_path / "in", tmp_path / "out-too")
    assert "left out images in other formats (1 .gif)" in done.stderr


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=2)
    (tmp_path / "in" / "class-0" / "broken.jpg").write_bytes(b"no image")
    done = run_process("pack", tmp_path / "in", tmp_path / "out", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "out" / "shardio.json").is_file()


def test_samples_larger_than_the_maximum_shard_size_are_reported(images: Path, tmp_path: Path) -> None:
    done = run("pack", images, tmp_path / "out", "--max-shard-size", "1kB")
    assert done.exit_code == 0
    assert "21 shards exceed --max-shard-size 1000 B because samples are never split" in done.stderr
    assert "--max-shard-size" not in run("pack", images, tmp_path / "roomy", "--max-shard-size", "10kB").stderr


def test_a_missing_source_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = run_process("pack", tmp_path / "nothing", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: the source {tmp_path}/nothing does not exist\n"


def test_packing_twice_fails(images: Path, packed: Path) -> None:
    done = run_process("pack", images, packed)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {packed} already holds a packed dataset")
    assert len(done.stderr.splitlines()) == 1


def test_strict_fails_if_a_file_does_not_match_its_suffix(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=2)
    (tmp_path / "in" / "class-0" / "name-001.jpg").write_bytes(b"no image")
    done = run_process("pack", tmp_path / "in", tmp_path / "out", "--strict")
    assert done.returncode == 1
    assert "name-001.jpg is not an image" in done.stderr
    assert not (tmp_path / "out").exists()


def test_dots_in_stems_are_refused_unless_renamed(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1)
    (tmp_path / "in" / "class-0" / "a.b.jpg").write_bytes(encode(5))
    refused = run_process("pack", tmp_path / "in", tmp_path / "out")
    assert refused.returncode == 1
    assert "--rename-dots" in refused.stderr
    assert run_process("pack", tmp_path / "in", tmp_path / "out", "--rename-dots").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["in"],
        ["in", "out", "more"],
        ["in", "out", "--no-such-option"],
        ["in", "out", "--max-shard-size", "many"],
        ["in", "out", "--max-shard-size", "0"],
        ["in", "out", "--max-shard-size", "-5"],
        ["in", "out", "--max-shard-samples", "0"],
        ["in", "out", "--max-shard-samples", "some"],
        ["in", "out", "--num-workers", "0"],
        ["in", "out", "--shuffle-seed", "-1"],
        ["in", "out", "--shuffle-seed", str(2**63)],
    ],
    ids=" ".join,
)
def test_wrong_usage_has_exit_code_2_and_writes_nothing(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "in", classes=1, per_class=1)
    monkeypatch.chdir(tmp_path)
    done = run("pack", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("512", 512),
        ("1B", 1),
        ("10KB", 10_000),
        ("10kb", 10_000),
        ("10KiB", 10_240),
        ("256MiB", 268_435_456),
        ("256 MiB", 268_435_456),
        ("1.5GiB", 1_610_612_736),
        ("1GB", 10**9),
        ("2TiB", 2**41),
    ],
)
def test_sizes_may_have_units(text: str, num_bytes: int) -> None:
    assert parse_size_option(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "1XB", "one", "1 2", "-1", "1MiB2", "nan", "inf"])
def test_bad_sizes_are_usage_errors_with_examples(images: Path, tmp_path: Path, text: str) -> None:
    done = run("pack", images, tmp_path / "out", "--max-shard-size", text)
    assert done.exit_code == 2
    assert "must be a size such as" in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
