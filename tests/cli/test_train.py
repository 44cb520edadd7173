from __future__ import annotations

import json
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import typer
from typer.testing import Result

import shardio
from shardio.cli.main import app, main
from shardio.cli.training import VARIABLES, choose_threads
from shardio.errors import FormatError, ShardioError, StateError
from shardio.process import count_processors
from shardio.train import TrainConfig
from tests.cli.train_command import LINE, train_here
from tests.processes import run_launched_ranks, run_python
from tests.sources import encode, write_images


def _run(source: Path, *options: str) -> CompletedProcess[str]:
    """Run the command in a process of its own, with torch's default number of threads."""
    without = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = ["train", source, "--image-size", "32", "--device", "cpu", "--num-workers", "1", "--precision", "fp32"]
    return run_python("-m", "shardio", *command, *options, environment=without)


def _assert_one_line_message(stderr: str, word: str) -> None:
    assert "Traceback" not in stderr
    assert stderr.startswith("error: ")
    assert word in stderr
    assert stderr.count("\n") == 1


def test_each_epoch_prints_one_line_with_its_figures(packed: Path) -> None:
    done = train_here(packed, "--epochs", "2", "--batch-size", "8", "--num-workers", "0")
    assert done.exit_code == 0, done.stderr
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
    """In fp32, the same seed gives the same losses for any number of workers. Another seed gives others."""

    def losses(*options: str) -> list[tuple[str, str]]:
        done = train_here(packed, "--epochs", "1", "--batch-size", "8", "--precision", "fp32", *options)
        assert done.exit_code == 0, done.stderr
        return [(figures["loss"], figures["val_loss"]) for figures in LINE.finditer(done.stdout)]

    first = losses("--num-workers", "0", "--seed", "3")
    assert len(first) == 1
    assert losses("--num-workers", "2", "--seed", "3") == first
    assert losses("--num-workers", "0", "--seed", "4") != first


def test_every_setting_has_an_option_with_its_text() -> None:
    """Except those that make sense only in Python."""
    options = {option.name: option for option in typer.main.get_command(app).commands["train"].params}  # type: ignore[attr-defined]  # a group
    renamed = {"directory": "out", "resume": "fresh"}
    no_options = {"steps_per_epoch", "num_classes", "mean", "std", "data"}
    for setting in fields(TrainConfig):
        option = options.get(renamed.get(setting.name, setting.name))
        assert (option is None) == (setting.name in no_options), setting.name
        if option is not None and setting.name not in renamed:
            assert option.default == {"lr": 2e-3}.get(setting.name, setting.default)
            assert option.help


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--precision fp8", "'fp8' is not one of 'fp32'"),
        ("--precision fp16", "Invalid value for --precision: 'fp16' needs CUDA"),
        ("--optimizer lion", "'lion' is not one of 'adamw'"),
        ("--epochs 0", "Invalid value for --epochs: must be at least 1, got 0"),
        ("--mixup -1", "Invalid value for --mixup: must be at least 0 and finite, got -1.0"),
        ("--weight-decay -1", "Invalid value for --weight-decay: must be at least 0, got -1.0"),
        ("--device toaster", "Invalid value for --device: must be one that torch knows"),
        ("--val-share 1", "Invalid value for --val-share: must be at least 0 and below 1"),
        (
            "--val elsewhere --val-share 0.1",
            "Invalid value for --val-share: pass either --val or --val-share, not both",
        ),
        ("--plot lr.jpg", "'lr.jpg' must end in .png"),
        ("--model huge", "there is no model 'huge'"),
        ("--pretrained", "no pretrained weights for 'small'"),
        ("--checkpoint-every 3", "Invalid value for --checkpoint-every: needs a directory to write checkpoints to"),
        ("--out s3://bucket/run", "Invalid value for --out: must be local"),
    ],
)
def test_a_wrong_value_is_wrong_usage_of_its_option(packed: Path, options: str, message: str) -> None:
    done = train_here(packed, "--epochs", "1", "--num-workers", "0", *options.split())
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message.replace(" ", "") in re.sub(r"[\s│]+", "", done.stderr)


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}], ids=str)
def test_launcher_variables_that_name_no_rank_are_wrong_usage(
    packed: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = train_here(packed, "--num-workers", "0")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "unset RANK" in re.sub(r"[\W_]+", " ", done.stderr)


def test_a_last_batch_of_one_small_image_can_be_trained_on(packed: Path) -> None:
    """17 of 21 samples are for training: a batch of 16, and one of a single sample."""
    done = train_here(packed, "--epochs", "1", "--batch-size", "16", "--image-size", "16", "--num-workers", "0")
    assert done.exit_code == 0, done.stderr


def test_a_bad_image_is_an_error_that_names_the_option_to_continue_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "in")
    broken = tmp_path / "in" / "class-1" / "name-003.jpg"
    broken.write_bytes(broken.read_bytes()[:-100])
    shardio.pack(tmp_path / "in", tmp_path / "packed", check=False)
    monkeypatch.chdir(tmp_path)
    done = _run(tmp_path / "packed", "--threads", "1")
    assert done.returncode == 1
    _assert_one_line_message(done.stderr, "class-1/name-003")
    assert done.stderr.endswith("(to continue without it, pass --on-error skip or replace)\n")
    with pytest.warns(RuntimeWarning, match="replaced"):
        replaced = train_here(tmp_path / "packed", "--epochs", "1", "--num-workers", "0", "--on-error", "replace")
    assert replaced.exit_code == 0, replaced.stderr
    assert "class-1/name-003" in (tmp_path / "quarantine.jsonl").read_text()


def _assert_fails(done: Result, kind: type[ShardioError | OSError], message: str) -> None:
    """Check the error that the command line prints in one line."""
    assert isinstance(done.exception, kind), done.output
    assert message in str(done.exception)


def test_a_dataset_without_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for index in range(6):
        (tmp_path / "flat" / f"{index}.jpg").write_bytes(encode(index))
    shardio.pack(tmp_path / "flat", tmp_path / "packed")
    done = train_here(tmp_path / "packed", "--epochs", "1")
    _assert_fails(done, FormatError, "has no class names: pass class folders")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    _assert_fails(train_here(tmp_path / "nowhere", "--epochs", "1"), FileNotFoundError, "nowhere")


MODEL = """
from torch import nn

def make(num_classes, image_size):
    hidden = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(3 * image_size**2, 8), nn.ReLU())
    return nn.Sequential(hidden, nn.Linear(8, num_classes))
"""


def test_the_same_command_resumes_a_run(packed: Path, tmp_path: Path) -> None:
    """With the user's own model and nearly every option. With other settings it is refused."""
    (tmp_path / "model.py").write_text(MODEL)
    run = tmp_path / "run"
    options = f"--out {run} --model {tmp_path}/model.py:make --plot {run}/lr.png --batch-size 4 --accumulate 2"
    mixing = "--mixup 0.2 --cutmix 1 --random-erasing 0.1 --label-smoothing 0.1"
    learning = "--optimizer rmsprop --momentum 0.5 --schedule cosine --warmup 0.1 --clip-norm 1 --clip-value 0.5"
    rest = "--gradient-penalty 0.01 --patience 5 --deterministic --checkpoint-every 2 --log-every 1 --precision fp32"
    command = [
        *options.split(),
        *mixing.split(),
        *learning.split(),
        *rest.split(),
        "--no-channels-last",
        "--num-workers",
        "0",
    ]
    done = train_here(packed, "--epochs", "1", *command)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    assert [line["epoch"] for line in map(LINE.fullmatch, done.stdout.splitlines()) if line] == ["0"]
    names = {"best.pt", "last.pt", "log.jsonl", "report.html", "report.png", "lr.png"}
    assert {path.name for path in run.iterdir()} >= names
    done = train_here(packed, "--epochs", "2", *command)
    assert done.exit_code == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "resuming after step 3 (complete epochs: 1)"
    assert [line["epoch"] for line in map(LINE.fullmatch, lines) if line] == ["1"]
    steps = [line["step"] for line in map(json.loads, (run / "log.jsonl").read_text().splitlines())]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]
    done = train_here(packed, "--epochs", "2", *command, "--lr", "0.5", "--image-size", "48", "--val-share", "0.3")
    changes = "lr was 0.002 and is now 0.5; image_size was 32 and is now 48; val_share was 0.2 and is now 0.3"
    _assert_fails(done, StateError, changes)


def test_class_folders_can_be_trained_on_and_shards_validated_on(images: Path, packed: Path, tmp_path: Path) -> None:
    done = train_here(images, "--epochs", "1", "--val", str(packed), "--num-workers", "0")
    assert done.exit_code == 0, done.stderr
    figures = LINE.fullmatch(done.stdout.strip())
    assert figures is not None
    assert figures["val_loss"] is not None
    write_images(tmp_path / "other", classes=4)
    done = train_here(images, "--epochs", "1", "--val", str(tmp_path / "other"), "--num-workers", "0")
    _assert_fails(done, FormatError, "are not among the given ones (class-0, class-1, class-2): class-3")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # It is still supported.
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch has no TorchScript on Python 3.14")
def test_without_validation_there_are_no_validation_figures(packed: Path) -> None:
    done = train_here(packed, "--epochs", "1", "--val-share", "0", "--num-workers", "0", "--script")
    assert done.exit_code == 0, done.stderr
    figures = LINE.fullmatch(done.stdout.strip())
    assert figures is not None
    assert figures["val_loss"] is None


def _train_as_rank(rank: int, packed: Path, out: Path) -> None:
    options = "--epochs 1 --batch-size 4 --image-size 16 --num-workers 1 --device cpu --precision fp32"
    sys.argv = ["shardio", "train", str(packed), *options.split(), "--out", str(out / "run")]
    with (out / f"output-{rank}").open("w") as output, redirect_stdout(output):
        main()


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


def test_on_a_cpu_torch_leaves_processors_to_the_workers(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(COUNT_THREADS)
    done = _run(packed, "--epochs", "1", "--model", f"{tmp_path}/model.py:make")
    assert done.returncode == 0, done.stderr
    default = int((tmp_path / "default").read_text())
    expected = min(default, choose_threads(count_processors(), 1, 1))
    assert {*(tmp_path / "threads").read_text().split()} == {str(expected)}
    lines = done.stderr.splitlines()
    assert len(lines) == (expected < default)
    assert all(line.startswith(f"torch uses {expected} of its {default} threads") for line in lines)
