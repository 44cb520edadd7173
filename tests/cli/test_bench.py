"""``shardio bench``: its figures, its advice, and what a command that loads batches takes a directory for."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.cli import check as check_module
from shardio.cli.check import DatasetFormat, ThroughputMeter, advise
from shardio.cli.options import has_class_folders
from shardio.errors import FormatError
from shardio.loader.executor import LoaderStats
from tests.cli.commands import error_of, pack_with_bad_image, run, unframed, usage_error
from tests.faults.worker_processes import wait_until
from tests.packing.packs import write_files
from tests.processes import start_python
from tests.sources import write_images

SHARDS = DatasetFormat(in_shards=True, has_images=True, jpeg="copy")


def bench(*arguments: object) -> str:
    return run("bench", *arguments).stdout


def samples_of(*arguments: object) -> list[int]:
    return [json.loads(line)["num_samples"] for line in bench(*arguments, "--json").splitlines()]


def stats(seconds: dict[str, Any], *, num_workers: int = 2, elapsed_s: float = 10.0) -> LoaderStats:
    """Return the statistics of an epoch whose workers spent all their time on these stages."""
    times: dict[str, Any] = dict.fromkeys(("read_s", "transform_s", "decode_s", "idle_s"), 0.0) | seconds
    times |= {"num_batches": 10, "num_samples": 1000, "first_batch_s": 1.0, "wait_for_data_s": 1.0}
    return LoaderStats(elapsed_s=elapsed_s, num_workers=num_workers, **times)


def test_bench_reports_the_speed_and_the_time_of_each_stage(packed: Path) -> None:
    lines = bench(packed, "--batch-size", 4, "--image-size", 48, "--num-workers", 1, "--epochs", 2).splitlines()
    assert [line[:39] for line in lines if line.startswith("epoch")] == [
        "epoch 0: 21 samples in 6 batches, " + lines[0][34:39],
        "epoch 1: 21 samples in 6 batches, " + lines[7][34:39],
    ]
    assert "; first batch after " in lines[0]
    assert lines[0].endswith(" samples/s")
    assert "decoding, cropping, resizing" in lines[4]
    # Tests of the advice show which figures give which; here, it depends on the speed of this machine.
    assert re.search(r"1 worker on .* is the bottleneck|is too short to judge", lines[13])


def test_bench_accepts_class_folders_and_single_fields(packed: Path, images: Path, tmp_path: Path) -> None:
    assert samples_of(images, "--num-workers", 0, "--epochs", 2) == [21, 21]
    assert samples_of(packed, "--fields", "cls,key", "--num-workers", 0) == [21]
    assert samples_of(packed, "--batch-size", 4, "--batches", 2, "--epochs", 2, "--num-workers", 1) == [8, 8]
    assert "1 batch, " in bench(packed, "--fields", "key", "--num-workers", 0)
    assert "has the field 'txt'" in unframed(run("bench", packed, "--fields", "txt", code=2).output)
    assert "--fields applies only to shards" in usage_error("bench", images, "--fields", "cls")
    assert "nothing" in error_of("bench", tmp_path / "nothing")


def test_with_torchs_workers_there_are_rates_but_no_stages(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    text = bench(packed, "--batch-size", 4, "--num-workers", 0)
    assert "21 samples in 6 batches" in text
    assert "per-stage timings are not available, because shardio's own code does not read these samples" in text
    assert json.loads(bench(packed, "--batch-size", 4, "--num-workers", 0, "--json"))["samples_per_s"] > 0


RECIPE = """
import threading

def invert(image):
    return {"image": 255 - image[:20, :20]}

def make_pipeline():
    from albumentations import Compose, RandomResizedCrop, VerticalFlip
    return Compose([RandomResizedCrop((24, 24)), VerticalFlip()])

lock = threading.Lock()
unsendable = lambda image: invert(image) if lock else None
unsendable.__module__ = "__main__"
size = 3
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bench_recipe.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)  # It is undone, with what the command adds.
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bench_recipe.py"


def test_bench_loads_the_users_own_transform(packed: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (packed, "--num-workers", 0, "--batch-size", 4, "--transform")
    own = bench(*options, "bench_recipe:invert")
    assert "21 samples in 6 batches" in own
    assert "\n  your own code  " in own
    assert "\n  run in Python: invert\n" in own
    unsendable = bench(packed, "--num-workers", 1, "--batch-size", 4, "--transform", "bench_recipe:unsendable")
    assert "code does not read these samples: the transform cannot be pickled" in unsendable
    (recipe.parent / "elsewhere").mkdir()
    monkeypatch.chdir(recipe.parent / "elsewhere")
    assert "\n  run in Python: invert\n" in bench(*options, f"{recipe}:invert")
    for name in ("size", "missing"):
        error = usage_error("bench", *options, f"bench_recipe:{name}")
        assert f"there is no transform 'bench_recipe:{name}': bench_recipe has no function '{name}'" in error


@pytest.mark.slow
def test_bench_names_what_it_replaces(packed: Path, recipe: Path) -> None:
    recipe.with_name("bench_pipeline.py").write_text(RECIPE + "pipeline = make_pipeline()")
    options = ("--num-workers", 1, "--batch-size", 4, "--transform", "bench_pipeline:pipeline")
    replaced = bench(packed, *options)
    assert "\n  replaced by shardio's own transforms: RandomResizedCrop(size=(24, 24)" in replaced
    assert "\n  run in Python: VerticalFlip\n" in replaced


def test_the_advice_for_pngs_makes_tiled_jpegs_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "pngs", classes=2, per_class=3, width=64, suffix="png")
    found = list[DatasetFormat]()

    def note(_: LoaderStats, stored: DatasetFormat, *__: object, **___: object) -> str:
        found.append(stored)
        return ""

    monkeypatch.setattr(check_module, "advise", note)
    shardio.pack(tmp_path / "pngs", tmp_path / "packed")
    for source in ("pngs", "packed"):
        bench(tmp_path / source, "--num-workers", 0, "--image-size", 32)
    assert [stored.formats for stored in found] == [{"PNG"}, {"PNG"}]
    advised = re.search(r"pack with (--.*),", advise(stats({"decode_s": 20.0}), found[1], 2, is_first=True))
    assert advised is not None
    run("pack", tmp_path / "pngs", tmp_path / "faster", *advised[1].split())
    manifest = shardio.open(tmp_path / "faster").manifest
    assert ("jpeg" in manifest.fields or "jpg" in manifest.fields, "png" in manifest.fields) == (True, False)
    assert manifest.pack["num_tiled"] == manifest.num_samples == 6


def test_a_bad_image_is_an_error_that_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = (pack_with_bad_image(tmp_path), "--batch-size", 4, "--num-workers")
    error = error_of("bench", *options, 1)
    assert error.startswith("error: the image of sample class-1/name-003 in ")
    assert error.endswith("(to continue without it, pass --on-error skip or replace)\n")
    for policy, num_samples in (("skip", 20), ("replace", 21)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert samples_of(*options, 0, "--on-error", policy) == [num_samples]
        assert json.loads((tmp_path / "quarantine.jsonl").read_text())["key"] == "class-1/name-003"
        (tmp_path / "quarantine.jsonl").unlink()


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_too_little_memory_is_an_error_of_one_line(packed: Path, num_workers: int) -> None:
    error = error_of("bench", packed, "--image-size", 10_000_000, "--num-workers", num_workers)
    assert error.startswith("error: not enough memory (")


@pytest.mark.slow
def test_ctrl_c_prints_the_results_so_far(packed: Path, tmp_path: Path) -> None:
    output, errors = tmp_path / "output", tmp_path / "errors"
    command = ["-m", "shardio", "bench", packed, "--batch-size", "1", "--epochs", "100000"]
    process = start_python(*command, output=output, errors=errors)
    wait_until(lambda: output.exists() and "epoch 0: 21 samples" in output.read_text(), "an epoch has ended")
    while process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)  # Python drops one that comes while an object is being freed.
        process.join(10)
    assert process.exitcode == 130
    assert errors.read_text().endswith("interrupted: the last epoch is incomplete\n")
    assert output.read_text().startswith("epoch 0: 21 samples")


def test_the_rate_after_the_first_batch_excludes_that_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([104.0, 105.0, 106.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = ThroughputMeter(started=100.0)
    assert (meter.samples_per_s, meter.samples_per_s_after_first_batch) == (0.0, None)
    meter.watch([range(8)])
    assert (meter.samples_per_s, meter.samples_per_s_after_first_batch) == (2.0, None)
    meter.watch([[range(8), range(8)], [range(4), range(4)]])
    assert (meter.first_batch_s, meter.elapsed_s, meter.num_samples) == (4.0, 6.0, 20)
    assert meter.samples_per_s_after_first_batch == 6.0


DECODING = {"decode_s": 20.0}
PYTHON = {"transform_s": 20.0, "python_s": 18.0, "in_python": ("Jitter", "pad")}
MIXED = {"formats": frozenset({"JPEG", "PNG", "BMP"})}
MORE_WORKERS = "try more workers (up to {}, the number of processors)"
FEW_PROCESSORS = "there are already at least as many workers as processors"
ADVICE: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    (DECODING, {}, 2, "decode faster (pack with --jpeg tile, or with --jpeg reencode --max-side 400)"),
    (DECODING, {"jpeg": "tile"}, 2, "try smaller images (pack with --jpeg reencode --max-side 400)"),
    (DECODING, {"jpeg": "reencode"}, 2, "try smaller images (pack with a smaller --max-side)"),
    (DECODING, MIXED, 2, "BMP and PNG (pack with --convert-to jpeg --jpeg tile, which changes pixels slightly)"),
    (DECODING, {"has_images": False}, 2, FEW_PROCESSORS),
    (DECODING, {"has_images": False}, 8, MORE_WORKERS.format(8)),
    ({"read_s": 20.0}, {}, 2, "try more workers (more reads at a time), or a local disk, or larger shards"),
    ({"read_s": 20.0}, {"in_shards": False}, 2, "a local disk, or shards (shardio pack)"),
    ({"transform_s": 20.0}, {}, 2, f"-image overhead is the bottleneck because the images are small; {FEW_PROCESSORS}"),
    ({"idle_s": 20.0}, {}, 2, "a larger --batch-size"),
    (PYTHON, {}, 4, f"code is the bottleneck (Jitter, pad); {MORE_WORKERS.format(4)}, or less work in it"),
]


@pytest.mark.parametrize(("times", "stored", "processors", "words"), ADVICE)
def test_statistics_lead_to_advice(times: dict[str, Any], stored: dict[str, Any], processors: int, words: str) -> None:
    advice = advise(stats(times), replace(SHARDS, **stored), processors, is_first=True)
    assert advice.startswith(f"2 workers on {processors} processors: ")
    assert advice.endswith(words)
    assert ("more workers (up to" in advice) == ("up to" in words)


def test_an_epoch_that_is_mostly_start_up_is_not_judged() -> None:
    short = stats({"read_s": 0.003, "decode_s": 0.001}, elapsed_s=0.18)
    advice = advise(short, SHARDS, 2, is_first=True)
    assert advice.startswith("this epoch is too short to judge: workers took about 0.18 s of 0.18 s to start")
    assert advise(short, SHARDS, 2, is_first=False).endswith("too short to judge: use a dataset with more samples")
    alone = advise(stats({"read_s": 0.003}, num_workers=0, elapsed_s=0.18), SHARDS, 1, is_first=True)
    assert alone.startswith("no workers on 1 processor: storage is the bottleneck")


@pytest.mark.parametrize("world_size", [1, 3])
def test_bench_reports_one_of_several_ranks(packed: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(world_size - 1))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    done = run("bench", packed, "--batch-size", 4, "--num-workers", 0, "--image-size", 32, "--json")
    found = json.loads(done.stdout)
    assert (found["rank"], found["world_size"], found["num_samples"]) == (world_size - 1, world_size, 21 // world_size)
    expected = "rank 2 of 3: this process loads only its share of the samples. If no launcher started it, unset RANK"
    assert (expected in done.stderr) == (world_size == 3)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["class-0/a.jpg"], True),
        (["notes/a.txt", "shard.tar"], False),
        (["notes/a.txt", "SHARD.TAR"], False),
        (["class-0/a.jpg", "shardio.json"], False),
        (["a.jpg", ".hidden/b.jpg"], False),
        (["class-0/a.jpg", "SHARD.TAR"], None),
        (["a.PNG", "shard.tar"], None),
    ],
)
def test_directories_without_shards_hold_class_folders(tmp_path: Path, names: list[str], expected: bool | None) -> None:
    write_files(tmp_path, dict.fromkeys(names, b""))
    if expected is None:
        with pytest.raises(FormatError, match=f"holds both tars, such as {names[1]}, and images, such as {names[0]}"):
            has_class_folders(tmp_path)
    else:
        assert has_class_folders(tmp_path) == expected
