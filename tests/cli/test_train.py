"""``shardio train``: what it prints, learns and resumes, its options, and how many threads it leaves to torch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer

import shardio
from shardio.cli import train as command
from shardio.cli.main import app, main
from shardio.cli.train import VARIABLES, choose_threads, leave_processors_to_workers
from shardio.errors import FormatError, StateError
from shardio.train import TrainConfig
from tests.cli.commands import LINE, pack_with_bad_image, run, run_main, train_here, unframed
from tests.packing.packs import write_files
from tests.processes import run_launched_ranks
from tests.sources import encode, write_images


def losses_of(source: Path, *options: object) -> list[tuple[str, str]]:
    output = train_here(source, "--epochs", 1, "--batch-size", 8, *options).stdout
    return [(figures["loss"], figures["val_loss"]) for figures in map(LINE.fullmatch, output.splitlines()) if figures]


def test_each_epoch_prints_one_line_with_its_figures(packed: Path) -> None:
    lines = train_here(packed, "--epochs", 2, "--batch-size", 8, "--num-workers", 0, "--seed", 3).stdout.splitlines()
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


@pytest.mark.slow
def test_workers_do_not_change_what_is_learned_but_the_seed_does(packed: Path) -> None:
    first = losses_of(packed, "--num-workers", 0, "--seed", 3)
    assert (len(first), losses_of(packed, "--num-workers", 2, "--seed", 3)) == (1, first)
    assert losses_of(packed, "--num-workers", 0, "--seed", 4) != first


def test_every_setting_has_an_option_with_its_text() -> None:
    options = {option.name: option for option in typer.main.get_command(app).commands["train"].params}  # type: ignore[attr-defined]  # a group
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
    "--precision fp16": "Invalid value for --precision: 'fp16' needs CUDA",
    "--optimizer lion": "'lion' is not one of 'adamw'",
    "--epochs 0": "Invalid value for --epochs: must be at least 1, got 0",
    "--mixup -1": "Invalid value for --mixup: must be at least 0 and finite, got -1.0",
    "--weight-decay -1": "Invalid value for --weight-decay: must be at least 0, got -1.0",
    "--device toaster": "Invalid value for --device: must be one that torch knows",
    "--val-share 1": "Invalid value for --val-share: must be at least 0 and below 1",
    "--val elsewhere --val-share 0.1": "Invalid value for --val-share: pass either --val or --val-share, not both",
    "--plot lr.jpg": "'lr.jpg' must end in .png",
    "--model huge": "there is no model 'huge'",
    "--pretrained": "no pretrained weights for 'small'",
    "--checkpoint-every 3": "Invalid value for --checkpoint-every: needs a directory to write checkpoints to",
    "--out s3://bucket/run": "Invalid value for --out: must be local",
    "--recipe trivial_augmen": "did you mean trivial_augment",
    "--recipe simclr": "simclr makes several crops of each image",
    "--recipe cifar --transform a.py:b": "pass either --recipe or --transform",
}


@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_value_is_wrong_usage_of_its_option(packed: Path, options: str) -> None:
    done = train_here(packed, "--epochs", 1, "--num-workers", 0, *options.split(), code=2)
    assert done.stdout == ""
    assert WRONG[options].replace(" ", "") in unframed(done.stderr).replace(" ", "")


@pytest.mark.parametrize("command", ["train", "bench"])
@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}], ids=str)
def test_launcher_variables_that_name_no_rank_are_wrong_usage(
    packed: Path, monkeypatch: pytest.MonkeyPatch, command: str, variables: dict[str, str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run(command, packed, "--num-workers", 0, code=2)
    assert done.stdout == ""
    assert "unset RANK" in re.sub(r"[\W_]+", " ", done.stderr)


def test_a_last_batch_of_one_small_image_can_be_trained_on(packed: Path) -> None:
    """17 of 21 samples are for training: a batch of 16, and one of a single sample."""
    train_here(packed, "--epochs", 1, "--batch-size", 16, "--image-size", 16, "--num-workers", 0)


def test_a_bad_image_is_an_error_that_names_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_with_bad_image(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = run_main("train", packed, "--image-size", 32, "--device", "cpu", "--num-workers", 0)
    line = done.stderr.splitlines()[-1]
    assert (done.code, line.startswith("error: ")) == (1, True)
    assert "class-1/name-003" in line
    assert line.endswith("(to continue without it, pass --on-error skip or replace)")
    with pytest.warns(RuntimeWarning, match="replaced"):
        train_here(packed, "--epochs", 1, "--num-workers", 0, "--on-error", "replace")
    assert "class-1/name-003" in (tmp_path / "quarantine.jsonl").read_text()


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
    command = " ".join(
        (
            f"--out {folder} --model {tmp_path}/model.py:make --plot {folder}/lr.png --batch-size 4 --accumulate 2",
            "--recipe trivial_augment --mixup 0.2 --cutmix 1 --random-erasing 0.1 --label-smoothing 0.1",
            "--optimizer rmsprop --momentum 0.5 --schedule cosine --warmup 0.1 --clip-norm 1 --clip-value 0.5",
            "--gradient-penalty 0.01 --patience 5 --deterministic --checkpoint-every 2 --log-every 1",
            "--no-channels-last --num-workers 0",
        )
    ).split()
    done = train_here(packed, "--epochs", 1, *command)
    assert done.stderr == ""
    assert [line["epoch"] for line in map(LINE.fullmatch, done.stdout.splitlines()) if line] == ["0"]
    names = {"best.pt", "last.pt", "log.jsonl", "report.html", "report.png", "lr.png"}
    assert {path.name for path in folder.iterdir()} >= names
    first, *lines = train_here(packed, "--epochs", 2, *command).stdout.splitlines()
    assert first == "resuming after step 3 (complete epochs: 1)"
    assert [line["epoch"] for line in map(LINE.fullmatch, lines) if line] == ["1"]
    steps = [line["step"] for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]
    changes = "lr was 0.002 and is now 0.5; image_size was 32 and is now 48; val_share was 0.2 and is now 0.3"
    others = ["--lr", 0.5, "--image-size", 48, "--val-share", 0.3]
    assert_fails(StateError, changes, packed, "--epochs", 2, *command, *others)
    command[command.index("trivial_augment")] = "randaugment"
    message = "recipe was 'trivial_augment' and is now 'randaugment'"
    assert_fails(StateError, message, packed, "--epochs", 2, *command)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")  # It is still supported.
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
    """Make torch use six threads on a machine with eight processors, without a choice of the user."""
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
@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "num_left"), [(1, 3, 5), (2, 1, 3), (1, 0, None), (1, 1, None), (1, 2, None)]
)
def test_the_number_is_set_and_reported_unless_processors_remain(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_workers: int, num_left: int | None
) -> None:
    if num_ranks > 1:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    message = leave_processors_to_workers(num_workers, CPU, 6)
    assert torch.get_num_threads() == (num_left or 6)
    if num_left is None:
        assert message is None
    else:
        assert str(message).startswith(f"torch uses {num_left} of its 6 threads")
        assert f"(processors: 8, ranks: {num_ranks}, workers: {num_workers})" in str(message)


@pytest.mark.usefixtures("six_of_eight")
def test_a_chosen_number_is_kept_and_all_threads_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leave_processors_to_workers(3, CPU, 4) is None  # It was 4 at the start.
    assert leave_processors_to_workers(3, torch.device("cuda"), 6) is None
    for name in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "6")
            assert leave_processors_to_workers(3, CPU, 6) is None
    assert torch.get_num_threads() == 6
