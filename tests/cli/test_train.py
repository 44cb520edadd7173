from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardio
from shardio.processors import count_processors
from shardio.train.threads import VARIABLES, choose_threads
from tests.sources import encode, write_images

LINE = re.compile(
    r"epoch (?P<epoch>\d+)  loss (?P<loss>\d+\.\d{3})  accuracy (?P<accuracy>\d+\.\d)%  "
    r"(val loss (?P<val_loss>\d+\.\d{3})  val accuracy (?P<val_accuracy>\d+\.\d)%  )?"
    r"(?P<rate>\d+) images/s  waiting for data (?P<wait>\d+)%"
)


def _train(source: Path, *options: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardio", "train", str(source), "--image-size", "32", "--device", "cpu", *options]
    environment = environment or {**os.environ, "OMP_NUM_THREADS": "1"}  # Tests run side by side.
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def _assert_one_line_message(stderr: str, word: str) -> None:
    assert "Traceback" not in stderr
    assert stderr.startswith("error: ")
    assert word in stderr
    assert stderr.count("\n") == 1


def test_each_epoch_prints_one_line_with_its_figures(packed: Path) -> None:
    done = _train(packed, "--epochs", "2", "--batch-size", "8", "--num-workers", "2")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for epoch, line in enumerate(lines):
        figures = LINE.fullmatch(line)
        assert figures is not None, line
        assert int(figures["epoch"]) == epoch
        assert float(figures["loss"]) > 0
        assert 0 <= float(figures["accuracy"]) <= 100
        assert 0 <= float(figures["val_accuracy"]) <= 100
        assert int(figures["rate"]) > 0
        assert 0 <= int(figures["wait"]) <= 100


def test_workers_do_not_change_what_is_learned(packed: Path) -> None:
    """The same seed gives the same losses in fp32, whoever decodes; another seed gives others."""

    def losses(*options: str) -> list[tuple[str, str]]:
        done = _train(packed, "--epochs", "1", "--batch-size", "8", "--precision", "fp32", *options)
        assert done.returncode == 0, done.stderr
        return [(figures["loss"], figures["val_loss"]) for figures in LINE.finditer(done.stdout)]

    first = losses("--num-workers", "0", "--seed", "3")
    assert len(first) == 1
    assert losses("--num-workers", "2", "--seed", "3") == first
    assert losses("--num-workers", "0", "--seed", "4") != first


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--precision", "fp8"), "precision"),
        (("--precision", "fp16"), "fp16"),
        (("--optimizer", "lion"), "optimizer"),
        (("--device", "toaster"), "toaster"),
        (("--val-share", "1"), "--val-share"),
        (("--val", "elsewhere", "--val-share", "0.1"), "--val-share"),
        (("--plot", "lr.jpg"), "lr.jpg"),
        (("--model", "huge"), "huge"),
        (("--pretrained",), "small"),
        (("--checkpoint-every", "3"), "directory"),
    ],
)
def test_an_option_that_cannot_be_is_wrong_usage(packed: Path, options: tuple[str, str], word: str) -> None:
    done = _train(packed, "--epochs", "1", "--num-workers", "0", *options)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert done.stdout == ""
    assert word in done.stderr


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}], ids=str)
def test_variables_of_a_launcher_that_name_no_rank_are_wrong_usage(packed: Path, variables: dict[str, str]) -> None:
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = _train(packed, "--num-workers", "0", environment={**without, "OMP_NUM_THREADS": "1", **variables})
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert done.stdout == ""
    assert "unset RANK" in re.sub(r"[\W_]+", " ", done.stderr)


def test_a_last_batch_of_one_small_image_can_be_trained_on(packed: Path) -> None:
    """Of 21 samples 17 are for training: a batch of 16, and one more."""
    done = _train(packed, "--epochs", "1", "--batch-size", "16", "--image-size", "16", "--num-workers", "0")
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_a_bad_image_is_gone_on_without_or_an_error_that_names_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "in")
    broken = tmp_path / "in" / "class-1" / "name-003.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])
    shardio.pack(tmp_path / "in", tmp_path / "packed")
    monkeypatch.setenv("PYTHONPATH", str(Path(shardio.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    done = _train(tmp_path / "packed", "--epochs", "1", "--num-workers", "1")
    assert done.returncode == 1
    _assert_one_line_message(done.stderr, "class-1/name-003")
    assert done.stderr.endswith("(to continue without it, pass --on-error skip or replace)\n")
    done = _train(tmp_path / "packed", "--epochs", "1", "--num-workers", "0", "--on-error", "replace")
    assert done.returncode == 0, done.stderr
    assert "class-1/name-003" in (tmp_path / "quarantine.jsonl").read_text()


def test_a_dataset_without_classes_cannot_be_trained_on(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for number in range(6):
        (tmp_path / "flat" / f"{number}.jpg").write_bytes(encode(number))
    shardio.pack(tmp_path / "flat", tmp_path / "packed")
    done = _train(tmp_path / "packed", "--epochs", "1")
    assert done.returncode == 1
    _assert_one_line_message(done.stderr, "classes")


def test_a_source_that_is_not_there_fails_in_one_line(tmp_path: Path) -> None:
    done = _train(tmp_path / "nowhere", "--epochs", "1")
    assert done.returncode == 1
    _assert_one_line_message(done.stderr, "nowhere")


MODEL = """
from torch import nn

def make(num_classes, image_size):
    hidden = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(3 * image_size**2, 8), nn.ReLU())
    return nn.Sequential(hidden, nn.Linear(8, num_classes))
"""


def test_a_run_is_written_and_gone_on_with_by_the_same_command(packed: Path, tmp_path: Path) -> None:
    """With a model of one's own and nearly every option; only with other settings it is refused."""
    (tmp_path / "model.py").write_text(MODEL)
    run = tmp_path / "run"
    options = f"--out {run} --model {tmp_path}/model.py:make --plot {run}/lr.png --batch-size 4 --accumulate 2"
    learning = "--optimizer rmsprop --momentum 0.5 --schedule cosine --warmup 0.1 --clip-norm 1 --clip-value 0.5"
    rest = "--gradient-penalty 0.01 --patience 5 --deterministic --checkpoint-every 2 --log-every 1 --precision fp32"
    command = [
        *options.split(),
        *learning.split(),
        *rest.split(),
        "--no-channels-last",
        "--num-workers",
        "1",
        "--threads",
        "1",
    ]
    done = _train(packed, "--epochs", "1", *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [line["epoch"] for line in map(LINE.fullmatch, done.stdout.splitlines()) if line] == ["0"]
    names = {"best.pt", "last.pt", "log.jsonl", "report.html", "report.png", "lr.png"}
    assert {path.name for path in run.iterdir()} >= names
    done = _train(packed, "--epochs", "2", *command)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "going on from step 3, in epoch 1"
    assert [line["epoch"] for line in map(LINE.fullmatch, lines) if line] == ["1"]
    steps = [line["step"] for line in map(json.loads, (run / "log.jsonl").read_text().splitlines())]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]
    done = _train(packed, "--epochs", "2", *command, "--lr", "0.5", "--image-size", "48", "--val-share", "0.3")
    assert done.returncode == 1
    differing = "lr was 0.002, is 0.5; image_size was 32, is 48; val_share was 0.2, is 0.3"
    _assert_one_line_message(done.stderr, differing)


def test_class_folders_are_trained_on_and_validated_by_shards(images: Path, packed: Path, tmp_path: Path) -> None:
    done = _train(images, "--epochs", "1", "--val", str(packed), "--num-workers", "0")
    assert done.returncode == 0, done.stderr
    figures = LINE.fullmatch(done.stdout.strip())
    assert figures is not None
    assert figures["val_loss"] is not None
    write_images(tmp_path / "other", classes=4)
    done = _train(images, "--epochs", "1", "--val", str(tmp_path / "other"), "--num-workers", "0")
    assert done.returncode == 1
    _assert_one_line_message(done.stderr, "has classes that are not in classes=…: class-3")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript is not offered on Python 3.14")
def test_without_validation_there_are_no_figures_of_it(packed: Path) -> None:
    done = _train(packed, "--epochs", "1", "--val-share", "0", "--num-workers", "0", "--script")
    assert done.returncode == 0, done.stderr
    figures = LINE.fullmatch(done.stdout.strip())
    assert figures is not None
    assert figures["val_loss"] is None


def test_two_ranks_say_everything_once(packed: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "shardio.train",
    ]
    options = ["--epochs", "1", "--batch-size", "4", "--image-size", "16", "--num-workers", "1", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(shardio.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(packed), *options, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert LINE.fullmatch(done.stdout.strip()) is not None, done.stdout
    assert (tmp_path / "last.pt").exists()


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


def test_on_a_cpu_torch_leaves_processors_to_the_workers(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(COUNT_THREADS)
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    options = ("--epochs", "1", "--num-workers", "1", "--model", f"{tmp_path}/model.py:make")
    done = _train(packed, *options, environment=inherited)
    assert done.returncode == 0, done.stderr
    default = int((tmp_path / "default").read_text())
    expected = min(default, choose_threads(count_processors(), 1, 1))
    assert {*(tmp_path / "threads").read_text().split()} == {str(expected)}
    lines = done.stderr.splitlines()
    assert len(lines) == (expected < default)
    assert all(line.startswith(f"torch computes in {expected} of its {default} threads") for line in lines)
