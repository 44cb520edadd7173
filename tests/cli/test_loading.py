"""``shardio bench`` and ``shardio train``: figures, advice, training, resumption, and options."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import shardio
from shardio.cli import train as command
from shardio.cli.main import load_command, main
from shardio.cli.measure import ThroughputMeter
from shardio.cli.options import has_class_folders
from shardio.cli.train import VARIABLES, choose_threads, leave_processors_to_workers
from shardio.errors import FormatError, StateError
from shardio.loader import statistics
from shardio.loader.statistics import DatasetFormat, LoaderStats, advise
from shardio.train import TrainConfig
from tests.cli.commands import LINE, error_of, pack_with_bad_image, run, run_main, train_here, usage_error
from tests.faults.worker_processes import wait_until
from tests.packing.packs import write_files
from tests.processes import run_launched_ranks, start_python
from tests.raising import assert_raises
from tests.sources import encode, write_images

SHARDS = DatasetFormat(in_shards=True, has_images=True, jpeg="copy")


def bench(*arguments: object) -> str:
    return run("bench", *arguments).stdout


def samples_of(*arguments: object) -> list[int]:
    return [json.loads(line)["num_samples"] for line in bench(*arguments, "--json").splitlines()]


def stats(seconds: dict[str, Any], *, num_workers: int = 2, elapsed_s: float = 10.0) -> LoaderStats:
    """Return the statistics of an epoch whose workers spent all their time on the given stages."""
    times: dict[str, Any] = dict.fromkeys(("read_s", "transform_s", "decode_s", "idle_s"), 0.0) | seconds
    times |= {"num_batches": 10, "num_samples": 1000, "first_batch_s": 1.0, "wait_for_data_s": 9.0}
    return LoaderStats(elapsed_s=elapsed_s, num_workers=num_workers, **times)


def test_bench_reports_the_speed_and_the_time_of_each_stage(packed: Path) -> None:
    lines = bench(packed, "--batch-size", 4, "--image-size", 48, "--num-workers", 1, "--epochs", 2).splitlines()
    for epoch, line in enumerate(line for line in lines if line.startswith("epoch")):
        assert re.fullmatch(rf"epoch {epoch}: 21 samples in 6 batches, .*; first batch after .* samples/s", line)
    assert lines[7].startswith("epoch 1: ")
    assert "decoding, cropping, resizing" in lines[4]
    # The advice depends on the speed of this machine. Other tests check the advice for given figures.
    assert re.search(r"1 worker on .*; (try|there are already) |^  too short to judge|^  loading keeps up", lines[13])


def test_bench_accepts_class_folders_and_single_fields(packed: Path, images: Path, tmp_path: Path) -> None:
    assert samples_of(images, "--num-workers", 0, "--epochs", 2) == [21, 21]
    assert samples_of(packed, "--fields", "cls,key", "--num-workers", 0) == [21]
    assert samples_of(packed, "--batch-size", 4, "--batches", 2, "--epochs", 2, "--num-workers", 1) == [8, 8]
    assert "1 batch, " in bench(packed, "--fields", "key", "--num-workers", 0)
    assert "has the field 'txt'" in usage_error("bench", packed, "--fields", "txt")
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

lock = threading.Lock()
unsendable = lambda image: invert(image) if lock else None
unsendable.__module__ = "__main__"
size = 3
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bench_recipe.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)  # monkeypatch also undoes the command's own change to sys.path.
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bench_recipe.py"


def test_bench_loads_the_users_own_transform(packed: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (packed, "--num-workers", 0, "--batch-size", 4, "--transform")
    own = bench(*options, "bench_recipe:invert")
    for words in ("21 samples in 6 batches", "\n  your own code  ", "\n  run in Python: invert\n"):
        assert words in own
    unsendable = bench(packed, "--num-workers", 1, "--batch-size", 4, "--transform", "bench_recipe:unsendable")
    assert "code does not read these samples: the transform cannot be pickled" in unsendable
    monkeypatch.chdir(recipe.parent.parent)
    assert "\n  run in Python: invert\n" in bench(*options, f"{recipe}:invert")
    for name in ("size", "missing"):
        error = f"there is no transform 'bench_recipe:{name}': bench_recipe has no function '{name}'"
        assert error in usage_error("bench", *options, f"bench_recipe:{name}")


def test_the_advice_for_pngs_makes_tiled_jpegs_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "pngs", classes=2, per_class=3, width=64, suffix="png")
    note = Mock(return_value="")
    monkeypatch.setattr(statistics, "advise", note)
    shardio.pack(tmp_path / "pngs", tmp_path / "packed")
    for source in ("pngs", "packed"):
        bench(tmp_path / source, "--num-workers", 0, "--image-size", 32)
    stored = [call.args[0].stored for call in note.call_args_list]
    assert [each.formats for each in stored] == [("PNG",), ("PNG",)]
    advice = advise(replace(stats({"decode_s": 20.0}), stored=stored[1]), 2)
    options = advice.partition("pack with ")[2].partition(",")[0].split()
    run("pack", tmp_path / "pngs", tmp_path / "faster", *options)
    manifest = shardio.open(tmp_path / "faster").manifest
    assert ("jpeg" in manifest.fields or "jpg" in manifest.fields, "png" in manifest.fields) == (True, False)
    assert manifest.pack["num_tiled"] == manifest.num_samples == 6


def test_a_bad_image_is_an_error_that_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed, quarantine = pack_with_bad_image(tmp_path), tmp_path / "quarantine.jsonl"
    for name, options in (("bench", "--batch-size 4 --num-workers 1"), ("train", "--device cpu --num-workers 0")):
        error = run_main(name, packed, "--image-size", 32, *options.split()).stderr.splitlines()[-1]
        assert error.startswith("error: the image of sample class-1/name-003 in ")
        assert error.endswith("(to continue without it, pass --on-error skip or replace)")
    for policy, num_samples in (("skip", 20), ("replace", 21)):
        with pytest.warns(RuntimeWarning):
            assert samples_of(packed, "--num-workers", 0, "--on-error", policy) == [num_samples]
        assert json.loads(quarantine.read_text())["key"] == "class-1/name-003"
        quarantine.unlink()
    with pytest.warns(RuntimeWarning, match="replaced"):
        train_here(packed, "--epochs", 1, "--num-workers", 0, "--on-error", "replace")
    assert "class-1/name-003" in quarantine.read_text()


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_too_little_memory_is_an_error_of_one_line(packed: Path, num_workers: int) -> None:
    error = error_of("bench", packed, "--image-size", 10_000_000, "--num-workers", num_workers)
    assert error.startswith("error: not enough memory (")


@pytest.mark.slow
def test_ctrl_c_prints_the_results_so_far(packed: Path, tmp_path: Path) -> None:
    output, errors, options = tmp_path / "output", tmp_path / "errors", ("--batch-size", "1", "--epochs", "100000")
    process = start_python("-m", "shardio", "bench", packed, *options, output=output, errors=errors)
    wait_until(lambda: output.exists() and "epoch 0: 21 samples" in output.read_text(), "an epoch has ended")
    while process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)  # Python ignores a KeyboardInterrupt in a destructor, so repeat the signal.
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
MIXED = {"formats": ("BMP", "JPEG", "PNG")}
MORE_WORKERS = "try more workers (up to {}, the number of processors)"
FEW_PROCESSORS = "there are already at least as many workers as processors"
SPACE = "they need about 2.794 GiB, and 9.313 GiB is free"
ON_GPU = "decoding on the GPU (DevicePrefetcher(decode='device'))"
REENCODE = "--jpeg reencode --max-side 400"
FASTER = f"decode faster (pack with --jpeg tile, or with {REENCODE})"
ADVICE: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    (DECODING, {}, 2, "decode faster (pack with --jpeg tile, or with --jpeg reencode --max-side 400)"),
    (DECODING, {"jpeg": "tile"}, 2, "try smaller images (pack with --jpeg reencode --max-side 400)"),
    (DECODING, {"jpeg": "reencode"}, 2, "try smaller images (pack with a smaller --max-side)"),
    (DECODING, {"decoded_bytes": 3 * 10**9, "free_bytes": 10**10}, 2, f"(decoded_cache='3GiB': {SPACE})"),
    (DECODING, {"decoded_bytes": 10**10, "free_bytes": 10**10}, 2, "or with --jpeg reencode --max-side 400)"),
    (DECODING, MIXED, 2, "BMP and PNG (pack with --convert-to jpeg --jpeg tile, which changes pixels slightly)"),
    (DECODING, {"has_gpu": True, "jpeg": "tile"}, 2, f"try {ON_GPU}, or smaller images (pack with {REENCODE})"),
    (DECODING, {"has_gpu": True}, 2, f"try packing with --jpeg tile, and {ON_GPU}, or images that {FASTER}"),
    (DECODING, {"has_gpu": True, "formats": ("PNG",)}, 2, "which changes pixels slightly)"),
    (DECODING, {"has_images": False}, 2, FEW_PROCESSORS),
    (DECODING, {"has_images": False}, 8, MORE_WORKERS.format(8)),
    ({"read_s": 20.0}, {}, 2, "try more workers (more reads at a time), or a local disk, or larger shards"),
    ({"read_s": 20.0}, {"in_shards": False}, 2, "a local disk, or shards (shardio pack)"),
    ({"transform_s": 20.0}, {}, 2, f"-image overhead is the bottleneck because the images are small; {FEW_PROCESSORS}"),
    ({"idle_s": 20.0}, {}, 2, "try larger batches, or a larger prefetch_factor"),
    (PYTHON, {}, 4, f"code is the bottleneck (Jitter, pad); {MORE_WORKERS.format(4)}, or less work in it"),
]


@pytest.mark.parametrize(("times", "stored", "processors", "words"), ADVICE)
def test_statistics_lead_to_advice(times: dict[str, Any], stored: dict[str, Any], processors: int, words: str) -> None:
    advice = advise(replace(stats(times), stored=replace(SHARDS, **stored)), processors)
    assert advice.startswith(f"2 workers on {processors} processors: ")
    assert advice.endswith(words)
    assert ("more workers (up to" in advice) == ("up to" in words)


def test_an_epoch_that_is_mostly_start_up_is_not_judged_and_one_that_hardly_waits_keeps_up() -> None:
    short = stats({"read_s": 0.003, "decode_s": 0.001}, elapsed_s=0.18)
    assert advise(short, 2).startswith("too short to judge: about 0.18 s of 0.18 s passed before the workers ran")
    alone = stats({"read_s": 0.003}, num_workers=0, elapsed_s=0.18)
    assert advise(alone, 1).startswith("no workers on 1 processor: storage is the bottleneck")
    assert "replaced by shardio's own transforms: Crop" in replace(alone, recognized=("Crop",)).describe_stages()
    for waited_s, keeps_up in ((1.0, True), (1.4, True), (1.5, False)):
        # The first batch took 1 s, and the rest took 9 s.
        advice = advise(replace(stats(DECODING), wait_for_data_s=waited_s), 2)
        assert advice.startswith("loading keeps up") == keeps_up


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
        ("class-0/a.jpg", True),
        ("notes/a.txt shard.tar", False),
        ("notes/a.txt SHARD.TAR", False),
        ("class-0/a.jpg shardio.json", False),
        ("a.jpg .hidden/b.jpg", False),
        ("class-0/a.jpg SHARD.TAR", None),
        ("a.PNG shard.tar", None),
    ],
)
def test_directories_without_shards_hold_class_folders(tmp_path: Path, names: str, expected: bool | None) -> None:
    image, *others = names.split()
    write_files(tmp_path, dict.fromkeys([image, *others], b""))
    if expected is None:
        message = f"holds both tars, such as {others[0]}, and images, such as {image}"
        assert_raises(FormatError, message, has_class_folders, tmp_path)
    else:
        assert has_class_folders(tmp_path) == expected


def test_each_epoch_prints_one_line_with_its_figures(packed: Path) -> None:
    lines = train_here(packed, "--epochs", 2, "--batch-size", 8, "--num-workers", 0, "--seed", 3).stdout.splitlines()
    assert len(lines) == 2
    for epoch, line in enumerate(lines):
        figures = LINE.fullmatch(line)
        assert figures is not None, line
        assert (int(figures["epoch"]), float(figures["loss"]) > 0, int(figures["rate"]) > 0) == (epoch, True, True)
        assert all(0 <= float(figures[name]) <= 100 for name in ("accuracy", "val_accuracy", "wait"))


def losses_of(source: Path, *options: object) -> list[tuple[str, str]]:
    output = train_here(source, "--epochs", 1, "--batch-size", 8, *options).stdout
    return [(figures["loss"], figures["val_loss"]) for figures in LINE.finditer(output)]


@pytest.mark.slow
def test_workers_do_not_change_what_is_learned_but_the_seed_does(packed: Path) -> None:
    first = losses_of(packed, "--num-workers", 0, "--seed", 3)
    assert (len(first), losses_of(packed, "--num-workers", 2, "--seed", 3)) == (1, first)
    assert losses_of(packed, "--num-workers", 0, "--seed", 4) != first


def test_every_setting_has_an_option_with_its_text() -> None:
    options: dict[str | None, Any] = {option.name: option for option in load_command("train").params}
    renamed = {"directory": "out", "resume": "fresh"}
    no_options = {"steps_per_epoch", "num_classes", "mean", "std", "data"}
    for setting in fields(TrainConfig):
        option = options.get(renamed.get(setting.name, setting.name))
        assert (option is None) == (setting.name in no_options), setting.name
        if option is not None and setting.name not in renamed:
            assert option.default == {"lr": 2e-3}.get(setting.name, setting.default)
            assert option.help


WRONG = {
    "--precision fp8": "'fp8' is not one of 'fp32'",
    "--precision fp16": "invalid value for --precision: 'fp16' needs CUDA",
    "--optimizer lion": "'lion' is not one of 'adamw'",
    "--epochs 0": "invalid value for --epochs: must be at least 1, got 0",
    "--mixup -1": "invalid value for --mixup: must be at least 0 and finite, got -1.0",
    "--weight-decay -1": "invalid value for --weight-decay: must be at least 0, got -1.0",
    "--device toaster": "invalid value for --device: must be one that torch supports",
    "--val-share 1": "invalid value for --val-share: must be at least 0 and below 1",
    "--val elsewhere --val-share 0.1": "invalid value for --val-share: pass either --val or --val-share, not both",
    "--plot lr.jpg": "'lr.jpg' must end in .png",
    "--model huge": "there is no model 'huge'",
    "--pretrained": "no pretrained weights for 'small'",
    "--checkpoint-every 3": "invalid value for --checkpoint-every: needs a directory to write checkpoints to",
    "--out s3://bucket/run": "invalid value for --out: must be local",
    "--recipe trivial_augmen": "did you mean trivial_augment",
    "--recipe simclr": "simclr makes several crops of each image",
    "--recipe cifar --transform a.py:b": "pass either --recipe or --transform",
}


@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_value_is_wrong_usage_of_its_option(packed: Path, options: str) -> None:
    done = train_here(packed, "--epochs", 1, "--num-workers", 0, *options.split(), code=2)
    assert (done.stdout, WRONG[options] in done.stderr) == ("", True)


@pytest.mark.parametrize("command", ["train", "bench"])
@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}], ids=str)
def test_launcher_variables_that_name_no_rank_are_wrong_usage(
    packed: Path, monkeypatch: pytest.MonkeyPatch, command: str, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "unset RANK" in usage_error(command, packed, "--num-workers", 0)


def test_a_last_batch_of_one_small_image_can_be_trained_on(packed: Path) -> None:
    """Training uses 17 of the 21 samples: a batch of 16 samples and a batch of one sample."""
    done = train_here(packed, "--epochs", 1, "--batch-size", 16, "--image-size", 16, "--num-workers", 0)
    assert "epoch 0  loss " in done.stdout


def assert_fails(kind: type[Exception], message: str, source: Path, *options: object) -> None:
    error = train_here(source, *options, "--num-workers", 0, code=1).exception
    assert isinstance(error, kind)
    assert message in str(error)


def test_sources_that_cannot_be_trained_on_are_refused(images: Path, packed: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "flat", {f"{index}.jpg": encode(index) for index in range(6)})
    shardio.pack(tmp_path / "flat", tmp_path / "packed")
    assert_fails(FormatError, "has no class names: pass class folders", tmp_path / "packed")
    assert_fails(FileNotFoundError, "nowhere", tmp_path / "nowhere")
    write_images(tmp_path / "other", classes=4)
    message = "are not among the given ones (class-0, class-1, class-2): class-3"
    assert_fails(FormatError, message, images, "--val", tmp_path / "other")


MODEL = """
from torch import nn

def make(num_classes, image_size):
    hidden = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(3 * image_size**2, 8), nn.ReLU())
    return nn.Sequential(hidden, nn.Linear(8, num_classes))
"""


def test_the_same_command_resumes_a_run(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    folder = tmp_path / "run"
    command = f"""
        --out {folder} --model {tmp_path}/model.py:make --plot {folder}/lr.png --batch-size 4 --accumulate 2
        --recipe trivial_augment --mixup 0.2 --cutmix 1 --random-erasing 0.1 --label-smoothing 0.1
        --optimizer rmsprop --momentum 0.5 --schedule cosine --warmup 0.1 --clip-norm 1 --clip-value 0.5
        --gradient-penalty 0.01 --patience 5 --deterministic --checkpoint-every 2 --log-every 1
        --no-channels-last --num-workers 0
    """.split()
    done = train_here(packed, "--epochs", 1, *command)
    assert (done.stderr, [line["epoch"] for line in LINE.finditer(done.stdout)]) == ("", ["0"])
    assert {path.name for path in folder.iterdir()} >= {"best.pt", "last.pt", "log.jsonl", "report.html", "lr.png"}
    resumed = train_here(packed, "--epochs", 2, *command).stdout
    assert resumed.startswith("resuming after step 3 (complete epochs: 1)\n")
    assert [line["epoch"] for line in LINE.finditer(resumed)] == ["1"]
    steps = [line["step"] for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]
    changes = "lr was 0.002 and is now 0.5; image_size was 32 and is now 48; val_share was 0.2 and is now 0.3"
    others = ["--lr", 0.5, "--image-size", 48, "--val-share", 0.3]
    assert_fails(StateError, changes, packed, "--epochs", 2, *command, *others)
    command[command.index("trivial_augment")] = "randaugment"
    message = "recipe was 'trivial_augment' and is now 'randaugment'"
    assert_fails(StateError, message, packed, "--epochs", 2, *command)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # TorchScript still works.
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch has no TorchScript on Python 3.14")
def test_validation_is_of_other_shards_or_left_out(images: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from shardio.transforms import Compose, RandomInvert, RandomResizedCrop\n"
        "def make(size): return Compose([RandomResizedCrop(size), RandomInvert()])\n"
    )
    ((_, loss),) = losses_of(images, "--val", packed, "--num-workers", 0, "--transform", f"{tmp_path}/mine.py:make")
    assert loss is not None
    ((_, loss),) = losses_of(packed, "--val-share", 0, "--num-workers", 0, "--script")
    assert loss is None


def _train_as_rank(rank: int, packed: Path, out: Path) -> None:
    options = "--epochs 1 --batch-size 4 --image-size 16 --num-workers 1 --device cpu --precision fp32"
    sys.argv = ["shardio", "train", str(packed), *options.split(), "--out", str(out / "run")]
    with (out / f"output-{rank}").open("w") as output, redirect_stdout(output):
        main()


@pytest.mark.slow
def test_two_ranks_print_everything_once(packed: Path, tmp_path: Path) -> None:
    run_launched_ranks(_train_as_rank, packed, tmp_path, num_ranks=2)
    first, second = ((tmp_path / f"output-{rank}").read_text() for rank in range(2))
    assert LINE.fullmatch(first.strip()) is not None, first
    assert second == ""
    assert (tmp_path / "run" / "last.pt").exists()


COUNT_THREADS = """
from pathlib import Path
import torch
from torch import nn

class Count(nn.Sequential):
    def forward(self, images):
        with Path(__file__).with_name("threads").open("a") as file:
            file.write(f"{torch.get_num_threads()} ")
        return super().forward(images)

def make(num_classes, image_size):
    Path(__file__).with_name("default").write_text(str(torch.get_num_threads()))
    return Count(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
"""


@pytest.mark.usefixtures("six_of_eight")
def test_torch_leaves_processors_to_workers(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(COUNT_THREADS)
    options = "--image-size 16 --device cpu --num-workers 3 --epochs 1 --precision fp32"
    done = run("train", packed, *options.split(), "--model", f"{tmp_path}/model.py:make")
    assert ((tmp_path / "default").read_text(), {*(tmp_path / "threads").read_text().split()}) == ("6", {"5"})
    (line,) = done.stderr.splitlines()
    assert line.startswith("torch uses 5 of its 6 threads")


CPU = torch.device("cpu")


@pytest.fixture
def six_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch use six threads on a machine with eight processors, as if the user had not set a number of threads."""
    monkeypatch.setattr(command, "count_processors", lambda: 8)
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_processors", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 100])
def test_threads_and_workers_share_the_processors(num_processors: int, num_ranks: int, num_workers: int) -> None:
    num_threads = choose_threads(num_processors, num_ranks, num_workers)
    assert num_threads >= 1
    assert num_threads == 1 or num_ranks * (num_threads + num_workers) <= num_processors
    assert num_ranks * (num_threads + num_workers + 1) > num_processors, "at most one processor per rank stays idle"


@pytest.mark.usefixtures("six_of_eight")
def test_the_number_is_set_and_reported_unless_processors_remain_or_the_user_chose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert leave_processors_to_workers(3, CPU, 4) is None, "the user has changed the number of threads from 4 to 6"
    assert leave_processors_to_workers(3, torch.device("cuda"), 6) is None
    for name in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "6")
            assert leave_processors_to_workers(3, CPU, 6) is None
    assert [leave_processors_to_workers(num_workers, CPU, 6) for num_workers in range(3)] == [None] * 3
    assert torch.get_num_threads() == 6
    for num_ranks, num_workers, num_left in ((1, 3, 5), (2, 1, 3)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
        torch.set_num_threads(6)
        message = str(leave_processors_to_workers(num_workers, CPU, 6))
        assert torch.get_num_threads() == num_left
        assert message.startswith(f"torch uses {num_left} of its 6 threads")
        assert f"(processors: 8, ranks: {num_ranks}, workers: {num_workers})" in message
