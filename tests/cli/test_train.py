from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardio
from tests.sources import encode, write_images

LINE = re.compile(
    r"epoch (?P<epoch>\d+)  loss (?P<loss>\d+\.\d{3})  accuracy (?P<accuracy>\d+\.\d)%  "
    r"val loss (?P<val_loss>\d+\.\d{3})  val accuracy (?P<val_accuracy>\d+\.\d)%  "
    r"(?P<rate>\d+) images/s  waiting for data (?P<wait>\d+)%"
)


def _train(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardio", "train", str(source), "--image-size", "32", "--device", "cpu", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _assert_one_line_message(stderr: str, word: str) -> None:
    assert "Traceback" not in stderr
    assert stderr.startswith("error: ")
    assert word in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_epoch_prints_one_line_with_its_figures(packed: Path, num_workers: int) -> None:
    done = _train(packed, "--epochs", "2", "--batch-size", "8", "--num-workers", str(num_workers))
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
    ],
)
def test_an_option_that_cannot_be_is_wrong_usage(packed: Path, options: tuple[str, str], word: str) -> None:
    done = _train(packed, "--epochs", "1", "--num-workers", "0", *options)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert done.stdout == ""
    assert word in done.stderr


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
    for num_workers in ("0", "1"):
        done = _train(tmp_path / "packed", "--epochs", "1", "--num-workers", num_workers)
        assert done.returncode == 1
        _assert_one_line_message(done.stderr, "class-1/name-003")
        assert done.stderr.endswith("(--on-error skip or replace goes on without it)\n")
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
