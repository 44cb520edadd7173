"""Checkpoints are there whole or not at all, run no code, and are freed when they were read."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio.errors import FormatError, StateError
from shardio.train import Callback, load_checkpoint, train
from shardio.train import checkpoint as checkpoint_module
from tests.files import files_of_at_most, read_files
from tests.train.runs import (
    StopError,
    assert_same_weights,
    make_config,
    make_loader,
    make_model,
)

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_damaged_checkpoint_is_refused(packed: Path, tmp_path: Path, size: int) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    last = tmp_path / "last.pt"
    last.write_bytes(last.read_bytes()[:size])
    with pytest.raises(
        FormatError, match=r"last\.pt is not a checkpoint, or is truncated: use another one or start a new run"
    ):
        train(make_model(), make_loader(packed), make_config(tmp_path))


def test_a_file_that_is_something_else_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (tmp_path / "sprung").touch, ()

    torch.save({"model": Trap()}, tmp_path / "trap.pt")
    torch.save({"model": {}}, tmp_path / "other.pt")
    for name, message in (("trap.pt", "cannot be read as a checkpoint"), ("other.pt", "has the format None")):
        with pytest.raises(FormatError, match=message):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_a_failed_save_leaves_the_checkpoint_as_it_was(tmp_path: Path) -> None:
    checkpoint_module.save_checkpoint(tmp_path / "last.pt", {"model": {}})
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(Exception, match="pickle"):
        checkpoint_module.save_checkpoint(tmp_path / "last.pt", {"model": lambda: None})
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("num_bytes", [500, 5000, 200_000])
def test_a_checkpoint_on_a_full_disk_is_an_error_of_the_system_and_the_last_one_is_kept(
    tmp_path: Path, num_bytes: int
) -> None:
    """Wherever the disk becomes full: torch says "unexpected pos" of what it could not write."""
    path = tmp_path / "last.pt"
    state = {"model": {"weight": torch.zeros(40_000)}, "step": {"moment": torch.zeros(40_000)}}
    checkpoint_module.save_checkpoint(path, {"model": {}})
    with files_of_at_most(num_bytes), pytest.raises(OSError, match=r"File too large; what was saved .*last\.pt'"):
        checkpoint_module.save_checkpoint(path, state)
    assert load_checkpoint(path)["model"] == {}
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_a_checkpoints_memory_is_freed_after_it_was_loaded(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    tensors: list[weakref.ref[torch.Tensor]] = []

    def load_and_watch(*args: Any, **options: Any) -> dict[str, Any]:
        state = load_checkpoint(*args, **options)
        tensors.extend(weakref.ref(tensor) for tensor in state["model"].values())
        return state

    class Look(Callback):
        num_alive = -1

        def on_batch(self, batch: Any) -> None:
            gc.collect()
            self.num_alive = sum(tensor() is not None for tensor in tensors)

    monkeypatch.setattr("shardio.train.run.load_checkpoint", load_and_watch)
    look = Look()
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=2, schedule="onecycle"), callbacks=[look])
    assert len(tensors) == len(make_model().state_dict())
    assert look.num_alive == 0


def test_the_weights_of_a_checkpoint_are_the_models_own(packed: Path, tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    train(model, make_loader(packed), make_config(tmp_path, epochs=1))
    other.load_state_dict(load_checkpoint(tmp_path / "last.pt", map_location="cpu")["model"])
    assert_same_weights(model, other)


def test_killed_between_both_checkpoints_the_best_one_is_still_written(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Path, state: dict[str, Any]) -> None:
        if path.name == "last.pt":
            raise StopError
        checkpoint_module.save_checkpoint(path, state)

    with monkeypatch.context() as patch:
        patch.setattr("shardio.train.run.save_checkpoint", save)
        with pytest.raises(StopError):
            train(make_model(), make_loader(packed), make_config(tmp_path))
    results = train(make_model(), make_loader(packed), make_config(tmp_path))
    assert load_checkpoint(tmp_path / "best.pt")["results"][-1]["loss"] == min(result.loss for result in results)


@pytest.mark.parametrize("kept", [["best.pt", "log.jsonl"], ["best.pt"], ["log.jsonl"]])
def test_a_run_whose_last_checkpoint_is_gone_does_not_start_anew_in_silence(
    packed: Path, tmp_path: Path, kept: list[str]
) -> None:
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=2))
    for path in tmp_path.iterdir():
        if path.is_file() and path.name not in kept:
            path.unlink()
    before = read_files(tmp_path)
    with pytest.raises(StateError, match=r"of an earlier run, and no last\.pt to resume it from\. Put last\.pt back"):
        train(make_model(), make_loader(packed), make_config(tmp_path, epochs=2))
    assert {name: content for name, content in read_files(tmp_path).items() if name in kept} == before
    assert len(train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1, resume=False))) == 1


def test_a_best_checkpoint_of_other_settings_is_not_written_over(packed: Path, tmp_path: Path) -> None:
    """One epoch of the same settings may be written again: a run killed before its last.pt leaves that."""
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
    (tmp_path / "last.pt").unlink()
    with pytest.raises(StateError, match=r"holds best\.pt of an earlier run"):
        train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1, lr=0.123))
    train(make_model(), make_loader(packed), make_config(tmp_path, epochs=1))
