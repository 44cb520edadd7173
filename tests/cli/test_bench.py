from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import shardio
from shardio.cli.bench import DatasetFormat, ThroughputMeter, advise
from shardio.cli.main import app
from shardio.loader.stats import LoaderStats
from tests.faults.worker_processes import wait_until
from tests.processes import run_python, start_python
from tests.sources import write_images

SHARDS = DatasetFormat(in_shards=True, has_images=True, jpeg="copy")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def run_process(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "shardio", "bench", *arguments, cwd=cwd)


def bench(*arguments: object) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def stats(seconds: dict[str, Any], *, num_workers: int = 2, elapsed_s: float = 10.0) -> LoaderStats:
    """Return the statistics of an epoch whose workers spent all their time on these stages."""
    times: dict[str, Any] = dict.fromkeys(("read_s", "transform_s", "decode_s", "idle_s"), 0.0) | seconds
    return LoaderStats(
        num_batches=10,
        num_samples=1000,
        elapsed_s=elapsed_s,
        first_batch_s=1.0,
        wait_for_data_s=1.0,
        num_workers=num_workers,
        **times,
    )


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


def test_bench_accepts_class_folders_and_single_fields(packed: Path, images: Path) -> None:
    lines = bench(images, "--num-workers", 0, "--epochs", 2, "--json").splitlines()
    assert [json.loads(line)["num_samples"] for line in lines] == [21, 21]
    assert json.loads(bench(packed, "--fields", "cls,key", "--num-workers", 1, "--json"))["num_batches"] == 1
    assert "1 batch, " in bench(packed, "--fields", "key", "--num-workers", 0)


def test_bench_refuses_missing_fields_and_sources(packed: Path, tmp_path: Path) -> None:
    found = run(packed, "--fields", "txt")
    words = " ".join(found.output.replace("│", " ").split())  # Without the frame, which breaks lines anywhere.
    assert (found.exit_code, "has the field 'txt'" in words) == (2, True)
    assert run(tmp_path / "nothing").exit_code == 1


def test_fields_do_not_apply_to_class_folders(images: Path) -> None:
    found = run(images, "--fields", "cls")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "--fields applies only to shards" in found.stderr


def test_batches_limits_each_epoch(packed: Path) -> None:
    lines = bench(packed, "--batch-size", 4, "--batches", 2, "--epochs", 2, "--num-workers", 1, "--json").splitlines()
    assert [json.loads(line)["num_samples"] for line in lines] == [8, 8]


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


def test_bench_loads_the_users_own_transform(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench_recipe.py").write_text(RECIPE + "pipeline = make_pipeline()")
    monkeypatch.syspath_prepend(tmp_path)  # It is undone, with what the command adds.
    monkeypatch.chdir(tmp_path)
    options = (packed, "--num-workers", 1, "--batch-size", 4, "--transform")
    own = bench(*options, "bench_recipe:invert")
    assert "21 samples in 6 batches" in own
    assert "\n  your own code  " in own
    assert "\n  run in Python: invert\n" in own
    replaced = bench(*options, "bench_recipe:pipeline")
    assert "\n  replaced by shardio's own transforms: RandomResizedCrop(size=(24, 24)" in replaced
    assert "\n  run in Python: VerticalFlip\n" in replaced
    assert "code does not read these samples: the transform cannot be pickled" in bench(
        *options, "bench_recipe:unsendable"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "\n  run in Python: invert\n" in bench(*options, f"{tmp_path}/bench_recipe.py:invert")
    for name in ("size", "missing"):
        refused = run(*options, f"bench_recipe:{name}")
        words = " ".join(refused.output.replace("│", " ").split())
        assert refused.exit_code == 2
        assert f"there is no transform 'bench_recipe:{name}': bench_recipe has no function '{name}'" in words


def test_the_advice_for_pngs_makes_tiled_jpegs_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(6):
        (tmp_path / f"pngs/class-{index % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), (9 * index, 0, 99)).save(tmp_path / f"pngs/class-{index % 2}/{index}.PNG")
    found = list[DatasetFormat]()

    def note(_: LoaderStats, stored: DatasetFormat, *__: object, **___: object) -> str:
        found.append(stored)
        return ""

    monkeypatch.setattr("shardio.cli.bench.advise", note)
    shardio.pack(tmp_path / "pngs", tmp_path / "packed")
    for source in ("pngs", "packed"):
        bench(tmp_path / source, "--num-workers", 0, "--image-size", 32)
    assert [stored.formats for stored in found] == [{"PNG"}, {"PNG"}]
    advised = re.search(r"pack with (--.*),", advise(stats({"decode_s": 20.0}), found[1], 2, is_first=True))
    assert advised is not None
    command = ["pack", str(tmp_path / "pngs"), str(tmp_path / "faster"), *advised[1].split()]
    assert CliRunner().invoke(app, command).exit_code == 0
    manifest = shardio.open(tmp_path / "faster").manifest
    assert ("jpeg" in manifest.fields or "jpg" in manifest.fields, "png" in manifest.fields) == (True, False)
    assert manifest.pack["num_tiled"] == manifest.num_samples == 6


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    write_images(root / "in")
    broken = root / "in" / "class-1" / "name-003.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])
    shardio.pack(root / "in", root / "out", check=False)
    return root / "out"


def test_a_bad_image_is_an_error_that_names_the_remedy(damaged: Path, tmp_path: Path) -> None:
    done = run_process(damaged, "--batch-size", 4, "--num-workers", 1, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the image of sample class-1/name-003 in ")
    assert done.stderr.endswith("(to continue without it, pass --on-error skip or replace)\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("policy", "num_samples"), [("skip", 20), ("replace", 21)])
def test_a_bad_image_can_be_skipped_or_replaced(damaged: Path, tmp_path: Path, policy: str, num_samples: int) -> None:
    options = ["--batch-size", 4, "--num-workers", 1, "--on-error", policy, "--json"]
    done = run_process(damaged, *options, cwd=tmp_path)
    assert json.loads(done.stdout)["num_samples"] == num_samples
    assert json.loads((tmp_path / "quarantine.jsonl").read_text())["key"] == "class-1/name-003"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_too_little_memory_is_an_error_of_one_line(packed: Path, num_workers: int) -> None:
    done = run_process(packed, "--image-size", 10_000_000, "--num-workers", num_workers)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: not enough memory (")
    assert done.stderr.count("\n") == 1


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
    monkeypatch.setattr("shardio.cli.bench.time.perf_counter", lambda: next(clock))
    meter = ThroughputMeter(started=100.0)
    assert (meter.samples_per_s, meter.samples_per_s_after_first_batch) == (0.0, None)
    meter.watch([range(8)])
    assert (meter.samples_per_s, meter.samples_per_s_after_first_batch) == (2.0, None)
    meter.watch([[range(8), range(8)], [range(4), range(4)]])
    assert (meter.first_batch_s, meter.elapsed_s, meter.num_samples) == (4.0, 6.0, 20)
    assert meter.samples_per_s_after_first_batch == 6.0


@pytest.mark.parametrize(
    ("times", "stored", "processors", "words"),
    [
        (
            {"decode_s": 20.0},
            {},
            2,
            "try images that decode faster (pack with --jpeg tile, or with --jpeg reencode --max-side 400)",
        ),
        ({"decode_s": 20.0}, {"jpeg": "tile"}, 2, "try smaller images (pack with --jpeg reencode --max-side 400)"),
        ({"decode_s": 20.0}, {"jpeg": "reencode"}, 2, "try smaller images (pack with a smaller --max-side)"),
        (
            {"decode_s": 20.0},
            {"formats": frozenset({"JPEG", "PNG", "BMP"})},
            2,
            "try JPEGs instead of BMP and PNG (pack with --convert-to jpeg --jpeg tile, which changes pixels slightly)",
        ),
        ({"decode_s": 20.0}, {"has_images": False}, 2, "there are already at least as many workers as processors"),
        ({"decode_s": 20.0}, {"has_images": False}, 8, "try more workers (up to 8, the number of processors)"),
        ({"read_s": 20.0}, {}, 2, "try more workers (more reads at a time), or a local disk, or larger shards"),
        ({"read_s": 20.0}, {"in_shards": False}, 2, "a local disk, or shards (shardio pack)"),
        (
            {"transform_s": 20.0},
            {},
            2,
            "per-image overhead is the bottleneck because the images are small; "
            "there are already at least as many workers as processors",
        ),
        ({"idle_s": 20.0}, {}, 2, "a larger --batch-size"),
        (
            {"transform_s": 20.0, "python_s": 18.0, "in_python": ("Jitter", "pad")},
            {},
            4,
            "your own code is the bottleneck (Jitter, pad); try more workers (up to 4, the number of processors), or "
            "less work in it",
        ),
    ],
)
def test_advice_follows_from_the_statistics(
    times: dict[str, Any], stored: dict[str, Any], processors: int, words: str
) -> None:
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
def test_bench_reports_its_rank_if_there_are_several(
    packed: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables left over from a launcher make a process load only a part of the dataset."""
    monkeypatch.setenv("RANK", str(world_size - 1))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    done = run(packed, "--batch-size", 4, "--num-workers", 0, "--image-size", 32, "--json")
    found = json.loads(done.stdout)
    assert (found["rank"], found["world_size"], found["num_samples"]) == (world_size - 1, world_size, 21 // world_size)
    expected = "rank 2 of 3: this process loads only its share of the samples. If no launcher started it, unset RANK"
    assert (expected in done.stderr) == (world_size == 3)


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}], ids=str)
def test_invalid_launcher_variables_are_wrong_usage(
    packed: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run_process(packed, "--num-workers", 0)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert done.stdout == ""
    assert "unset RANK" in re.sub(r"[\W_]+", " ", done.stderr)
