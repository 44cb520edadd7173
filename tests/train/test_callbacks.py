from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch import nn

import shardio
from shardio.train import Callback, Compile, GradientPenalty, TrainConfig, TrainStep, load_checkpoint, train
from shardio.train.callbacks import SizeHints
from tests.train.runs import PLAIN, StopAfter, StopError, make_batches, make_network, read_figures, weights_of


def make_config(directory: Path | None = None, **options: Any) -> TrainConfig:
    fixed = {"precision": "fp32", "device": "cpu", "lr": 0.02, "log_every": 1, "directory": directory, **PLAIN}
    return TrainConfig(**{"epochs": 2, **fixed, **options})


def test_a_gradient_penalty_is_the_norm_of_the_gradient_of_the_loss() -> None:
    model, (images, labels) = make_network(), make_batches([6])[0]
    inputs = images.float() / 255
    loss = nn.functional.cross_entropy(model(inputs), labels)
    norm = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
    ).norm()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))
    for weight in (0.5, 0.0):
        total = GradientPenalty(weight).add_to_loss(nn.functional.cross_entropy(model(inputs), labels), step)
        assert total.item() == pytest.approx((loss + weight * norm).item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_penalty_keeps_gradients_small(precision: Any) -> None:

    def norm_after(weight: float) -> float:
        model, (batch,) = make_network(), [(images.float() / 255, labels) for images, labels in make_batches([12])]
        hooks = [GradientPenalty(weight).add_to_loss] if weight else []
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision, hooks=hooks)
        for _ in range(20):
            step(*batch)
        assert step.num_skipped == 0
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return float(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm())

    assert norm_after(0.5) < 0.8 * norm_after(0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # It is still supported.
@pytest.mark.parametrize("kind", ["compiled", "scripted"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile causes it.
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch has no TorchScript on Python 3.14")
def test_compiled_and_scripted_models_train_save_and_resume_like_any_other(tmp_path: Path, kind: str) -> None:
    """The checkpoints of compiled and scripted models equal those of the original model."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 7 * 7, 3))
    batches, val_loader = make_batches([4] * 4, side=16), make_batches([5], side=16)

    def run(name: str, *callbacks: Callback) -> Any:
        model: Any = copy.deepcopy(plain)
        # This backend needs no C++ compiler, which not every machine has.
        own = [Compile(backend="aot_eager")] if kind == "compiled" else []
        model = model if kind == "compiled" else torch.jit.script(model)
        config = make_config(tmp_path / name)
        return model, train(model, batches, config, val_loader=val_loader, callbacks=[*own, *callbacks])

    whole, results = run("whole")
    with pytest.raises(StopError):
        run("run", StopAfter(6))
    resumed, _ = run("run")
    figures, expected_figures = read_figures(tmp_path / "run"), read_figures(tmp_path / "whole")
    if kind == "scripted":
        # TorchScript rewrites a model after its first passes, and the model then rounds differently.
        losses, expected_losses = ([line["loss"] for line in lines] for lines in (figures, expected_figures))
        assert losses == pytest.approx(expected_losses, rel=1e-4)
    else:
        assert figures == expected_figures
    for one, other in zip(weights_of(resumed), weights_of(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 if kind == "scripted" else 0)
    fresh = copy.deepcopy(plain)
    fresh.load_state_dict(load_checkpoint(tmp_path / "run" / "best.pt")["model"])
    expected = train(plain, batches, make_config(), val_loader=val_loader)
    assert [result.loss for result in results] == pytest.approx([result.loss for result in expected], rel=1e-3)


def test_a_compiled_model_is_compiled() -> None:
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(inputs))
        return graph.forward

    train(make_network(), make_batches([4, 4]), make_config(epochs=1), callbacks=[Compile(backend=backend)])
    assert calls


def test_sizes_that_are_not_multiples_of_8_are_named_once() -> None:
    """Sizes of the data, such as 108 inputs and 3 classes, are not named, because they cannot be changed."""
    config = TrainConfig(epochs=2, precision="bf16", device="cpu")
    for hidden, batch_size in ((13, 6), (16, 8)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, make_batches([batch_size] * 2), config, callbacks=[SizeHints()])
        expected = "sizes that are not multiples of 8: a batch has 6 samples, 1 has 13 outputs"
        assert [str(warning.message).endswith(expected) for warning in caught] == [True] * (hidden == 13)


class Averaged(Callback):
    """A moving average of a model's weights, whose state also has values of many types."""

    def __init__(self) -> None:
        self.weights = dict[str, torch.Tensor]()
        self.others: Any = {"decay": np.float64(0.5), "seen": np.arange(3, dtype=np.uint16), "steps": (0, [None, 1j])}

    def wrap_model(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        return model

    def on_batch(self, batch: Any) -> None:
        for name, weight in self.model.named_parameters():
            self.weights[name].lerp_(weight.detach(), 1 - float(self.others["decay"]))
        self.others["seen"] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "others": self.others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.others = state["weights"], state["others"]


@pytest.mark.parametrize("num_batches", [3, 8])
def test_the_states_of_callbacks_resume(tmp_path: Path, num_batches: int) -> None:

    def run(name: str, *others: Callback) -> list[Averaged]:
        averaged = [Averaged(), Averaged()]
        averaged[1].others["decay"] = np.float64(0.25)
        dataset = torch.utils.data.TensorDataset(*make_batches([24])[0])
        loader = shardio.DataLoader(dataset, 4, shuffle=True)
        config = make_config(tmp_path / name, checkpoint_every=1 if num_batches < 6 else None)
        train(make_network(), loader, config, callbacks=[averaged[0], *others, averaged[1]])
        return averaged

    whole = run("whole")
    with pytest.raises(StopError):
        run("stopped", StopAfter(num_batches))
    for one, expected in zip(run("stopped"), whole, strict=True):
        assert all(torch.equal(one.weights[name], weight) for name, weight in expected.weights.items())
        assert (one.others["decay"], one.others["seen"].tolist()) == (expected.others["decay"], [12, 13, 14])
        assert one.others["seen"].dtype == np.uint16
    assert sorted(load_checkpoint(tmp_path / "whole" / "best.pt")["callbacks"]) == ["Averaged", "Averaged 2"]


def train_small(directory: Path, *callbacks: Callback, epochs: int = 2) -> None:
    config = make_config(directory, schedule="constant", epochs=epochs)
    train(make_network(), make_batches([4]), config, callbacks=callbacks)


def test_states_without_a_callback_or_that_cannot_be_loaded_again_are_reported(tmp_path: Path) -> None:
    class Saving(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"steps": 1}

    averaged = Averaged()
    averaged.others["path"] = [tmp_path]
    with pytest.raises(TypeError, match=r"the state of the callback Averaged\['others'\]\['path'\]\[0\] is "):
        train_small(tmp_path / "refused", averaged)
    train_small(tmp_path / "averaged", Averaged())
    with pytest.warns(RuntimeWarning, match="holds the state of a callback Averaged, which this run does not have"):
        train_small(tmp_path / "averaged", epochs=3)
    train_small(tmp_path / "saving", Saving())
    with pytest.raises(NotImplementedError, match="Saving has a state_dict, so it needs a load_state_dict"):
        train_small(tmp_path / "saving", Saving(), epochs=3)
