"""Checkpoints are written whole or not at all, execute nothing, and are freed after they are loaded."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio.errors import FormatError
from shardio.train import Callback, checkpoint as checkpoint_module, load_checkpoint, train
from shardio.train.checkpoint import are_equal, check_loadable, save_checkpoint
from tests.files import files_of_at_most
from tests.loader.fetching.programs import Point
from tests.train.runs import (
    STEPS_PER_EPOCH,
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


def test_another_file_is_refused_and_not_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (tmp_path / "sprung").touch, ()

    torch.save({"model": Trap()}, tmp_path / "trap.pt")
    torch.save({"model": {}}, tmp_path / "other.pt")
    for name, message in (("trap.pt", "cannot be read as a checkpoint"), ("other.pt", "has no 'format'")):
        with pytest.raises(FormatError, match=message):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    checkpoint_module.save_checkpoint(tmp_path / "last.pt", {"model": {}})
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(Exception, match=r"pickle|local object"):
        checkpoint_module.save_checkpoint(tmp_path / "last.pt", {"model": lambda: None})
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("num_bytes", [500, 5000, 200_000])
def test_a_full_disk_raises_the_operating_systems_error_and_keeps_the_previous_checkpoint(
    tmp_path: Path, num_bytes: int
) -> None:
    """No matter where the disk becomes full. torch would only say "unexpected pos"."""
    path = tmp_path / "last.pt"
    state = {"model": {"weight": torch.zeros(40_000)}, "step": {"moment": torch.zeros(40_000)}}
    checkpoint_module.save_checkpoint(path, {"model": {}})
    with (
        files_of_at_most(num_bytes),
        pytest.raises(OSError, match=r"File too large\. Any previous checkpoint is kept.*last\.pt'"),
    ):
        checkpoint_module.save_checkpoint(path, state)
    assert load_checkpoint(path)["model"] == {}
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_the_memory_of_a_checkpoint_is_freed_after_loading(
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

        def on_log(self, record: Any) -> None:
            gc.collect()
            self.num_alive = sum(tensor() is not None for tensor in tensors)

    monkeypatch.setattr("shardio.train.run.load_checkpoint", load_and_watch)
    look = Look()
    config = make_config(tmp_path, epochs=2, schedule="onecycle", log_every=STEPS_PER_EPOCH)
    train(make_model(), make_loader(packed), config, callbacks=[look])
    assert len(tensors) == len(make_model().state_dict())
    assert look.num_alive == 0


def test_a_checkpoint_holds_the_weights_of_the_model(packed: Path, tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    train(model, make_loader(packed), make_config(tmp_path, epochs=1))
    other.load_state_dict(load_checkpoint(tmp_path / "last.pt", map_location="cpu")["model"])
    assert_same_weights(model, other)


def test_a_run_killed_between_its_two_checkpoints_still_writes_the_best_one(
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


LOADABLE: dict[str, Any] = {
    "none": None,
    "numbers": [True, 2**100, -0.5, 1j],
    "text": ["a", b"b", bytearray(b"c")],
    "containers": (OrderedDict(a={1}), {3: ()}, Counter("a")),
    "tensors": [torch.ones(2), torch.nn.Parameter(torch.ones(1)), torch.Size([1]), torch.float16, torch.device("cpu")],
    "arrays": [np.ones((2, 3), np.float32), np.array(["a"]), np.zeros(2, [("a", "<i4")]), np.array("2020", "M8[D]")],
    "scalars": [np.float64(0.5), np.int8(3), np.bool_(True), np.str_("a")],
    "the state of numpy": np.random.get_state(),
    "the state of python": random.getstate(),
}


@pytest.mark.parametrize("name", LOADABLE)
def test_what_is_saved_is_loaded_without_executing_code(tmp_path: Path, name: str) -> None:
    check_loadable(LOADABLE[name], "it")
    save_checkpoint(tmp_path / "last.pt", {"value": LOADABLE[name]})
    assert are_equal(load_checkpoint(tmp_path / "last.pt")["value"], LOADABLE[name])


@pytest.mark.parametrize(
    "value", [defaultdict(int), Point(1, 2), Path("a"), np.array([Path("a")], object), range(3), len], ids=repr
)
def test_what_could_not_be_loaded_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"it\[0\]\['a'\] is of type \w+, which checkpoints cannot hold"):
        check_loadable([{"a": value}], "it")
    save_checkpoint(tmp_path / "last.pt", {"value": value})
    with pytest.raises(FormatError, match="cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "last.pt")
