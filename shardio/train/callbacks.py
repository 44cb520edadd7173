"""Callbacks, which add logs or custom behavior to a training run, and the metrics that they receive."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shardio.errors import StateError
from shardio.files import naming, write_whole
from shardio.train.step import TrainStep
from shardio.values import count
from shardio.world import find_world


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A line of the log: the metrics of the steps since the previous line.

    Attributes:
        step: Steps so far, including skipped ones.
        epoch: The epoch, from 0.
        loss: The mean loss per sample, over all ranks.
        lr: The learning rate of the last step.
        scale: The factor by which fp16 scales the loss; 1 otherwise.
        num_skipped: Steps skipped so far because a gradient was not finite.
        images_per_s: Images per second, over all ranks.
        step_s: The mean duration of a step in seconds.
        data_wait_share: The share of the time in which this rank's device waited for data, with nothing left to do;
            see :meth:`shardio.DevicePrefetcher.stats`.
        memory_allocated: Memory in bytes; see :class:`shardio.train.loop.MemoryUse`. None if unknown.
        memory_reserved: Memory in bytes; see :class:`shardio.train.loop.MemoryUse`. None if unknown.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    scale: float
    num_skipped: int
    images_per_s: float
    step_s: float
    data_wait_share: float
    memory_allocated: int | None
    memory_reserved: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """The metrics of an epoch, over all ranks.

    Attributes:
        epoch: The epoch, from 0.
        step: The number of steps from the start of the run to the end of the epoch, including skipped ones.
        loss: The mean training loss per sample.
        accuracy: The share of training samples classified correctly during training. In a mixed sample, the class with
            the largest share counts, so mixing lowers this accuracy.
        val_loss: The mean loss per validation sample; None without validation.
        val_accuracy: The share of validation samples classified correctly; None without validation.
        num_images: Images trained on.
        train_s: The duration of the training in seconds.
        data_wait_s: The part of ``train_s`` during which this rank's device waited for data.
        lr: The learning rate of the last step.
        is_best: Whether the validation loss, or the training loss without validation, is the lowest so far.
    """

    epoch: int
    step: int
    loss: float
    accuracy: float
    val_loss: float | None
    val_accuracy: float | None
    num_images: int
    train_s: float
    data_wait_s: float
    lr: float
    is_best: bool

    @property
    def images_per_s(self) -> float:
        return self.num_images / max(self.train_s, 1e-9)

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / max(self.train_s, 1e-9)

    @property
    def judged_by(self) -> float:
        """The loss by which epochs are compared."""
        return self.loss if self.val_loss is None else self.val_loss

    def describe(self) -> str:
        """Return the metrics as a line of text."""
        validation = (
            "" if self.val_loss is None else f"val loss {self.val_loss:.3f}  val accuracy {self.val_accuracy:.1%}  "
        )
        return (
            f"epoch {self.epoch}  loss {self.loss:.3f}  accuracy {self.accuracy:.1%}  {validation}"
            f"{self.images_per_s:.0f} images/s  waiting for data {self.data_wait_share:.0%}"
        )


LOG = "log.jsonl"


class Callback:
    """The base class of callbacks. By default, the methods do nothing: override those that you need.

    Every rank calls its own callbacks, at the same points.
    """

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model or a wrapper that uses its weights.

        This method is called once, before DistributedDataParallel wraps the model.
        """
        return model

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        """Handle the start of training, given the numbers of completed epochs and steps, both 0 in a new run."""

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        """Return the loss to compute a microbatch's gradients from. The call is outside autocast."""
        return loss

    def on_batch(self, batch: Any) -> None:
        """Handle a microbatch, whose tensors are on the device, after the model has been trained on it."""

    def on_log(self, record: StepRecord) -> None:
        """Handle the metrics of the steps since the last call."""

    def on_epoch(self, result: EpochResult) -> None:
        """Handle the metrics of an epoch, before its checkpoint is written."""

    def on_end(self, results: list[EpochResult]) -> None:
        """Handle the metrics of all epochs at the end of training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, such as averaged weights. Checkpoints hold rank 0's state.

        The state may contain tensors, numpy arrays, numbers, strings, and dicts, lists, tuples and sets of these.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a non-empty state that :meth:`state_dict` returned. The run calls this before :meth:`on_start`."""
        raise NotImplementedError(f"{type(self).__name__} has a state_dict, so it needs a load_state_dict")


def name_callbacks(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks by class name, numbered if several share a name. A resumed run uses the same names."""
    named: dict[str, Callback] = {}
    counts = Counter[str]()
    for callback in callbacks:
        name = type(callback).__qualname__
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} {counts[name]}"] = callback
    return named


class PrintEpochs(Callback):
    """A callback that prints one line per epoch on rank 0. ``say`` replaces ``print``."""

    def __init__(self, say: Callable[[str], object] = print) -> None:
        self.say = say if find_world().rank == 0 else lambda _: None

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        if num_steps:
            self.say(f"resuming after step {num_steps} (complete epochs: {num_epochs})")

    def on_epoch(self, result: EpochResult) -> None:
        self.say(result.describe())


class EpochBar(Callback):
    """A callback that shows the progress of each epoch as a bar.

    Args:
        bar: A ``rich.progress.Progress``. The callback adds a task with a field ``rate``.
        num_batches: The number of batches in an epoch.
    """

    def __init__(self, bar: Any, num_batches: int) -> None:
        self._bar, self._task = bar, bar.add_task("epoch 0", total=num_batches, rate="")
        self._begin(0)

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        self._begin(num_epochs)

    def on_batch(self, batch: Any) -> None:
        self._num_images += len(batch[1])
        rate = self._num_images / (time.perf_counter() - self._start)
        self._bar.update(self._task, advance=1, rate=f"{rate:.0f} images/s")

    def on_epoch(self, result: EpochResult) -> None:
        self._begin(result.epoch + 1)

    def _begin(self, epoch: int) -> None:
        self._num_images, self._start = 0, time.perf_counter()
        self._bar.update(self._task, completed=0, description=f"epoch {epoch}")


class Compile(Callback):
    """A callback that compiles the model with ``torch.compile(model, **options)``.

    Checkpoints hold the uncompiled model.
    """

    # Module.compile would not compile containers such as Sequential.

    def __init__(self, **options: Any) -> None:
        self.options = options

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(model, **self.options))


class GradientPenalty(Callback):
    """A callback that smooths the loss by adding ``weight`` times the gradient's norm to it.

    As in torch's "Automatic Mixed Precision examples", the gradient, which could underflow in fp16, is
    computed from the scaled loss, and is unscaled before its norm is computed.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        scale = step.scale
        gradients = torch.autograd.grad(loss * scale, step.parameters, create_graph=True, materialize_grads=True)
        squares = [(gradient / scale).pow(2).sum() for gradient in gradients]
        # The square root has no derivative at 0, where the loss is flat.
        return loss + self.weight * (torch.stack(squares).sum() + 1e-12).sqrt()


class SizeHints(Callback):
    """A callback that warns once about layer and batch sizes that leave a GPU's tensor cores idle.

    Sizes should be multiples of 8 (NVIDIA, "Train With Mixed Precision", "Tensor Core shape constraints"). The
    numbers of image channels and classes are exempt, because the task fixes both.
    """

    def __init__(self) -> None:
        self._odd: list[str] | None = []

    def wrap_model(self, model: nn.Module) -> nn.Module:
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
        self._odd = [
            f"{name or type(layer).__name__} has {size} outputs"
            for name, layer in layers[:-1]
            if (size := layer.weight.shape[0]) % 8
        ]
        return model

    def on_batch(self, batch: Any) -> None:
        if self._odd is None:
            return
        odd, self._odd = self._odd, None
        if len(batch[1]) % 8:
            odd.insert(0, f"a batch has {count(len(batch[1]), 'sample')}")
        if odd:
            more = f", and {len(odd) - 5} more" if len(odd) > 5 else ""
            warnings.warn(
                f"half precision is slower with sizes that are not multiples of 8: {', '.join(odd[:5])}{more}",
                stacklevel=2,
            )


class _Log(Callback):
    """A callback that writes each record and each result as it arrives."""

    def on_log(self, record: StepRecord) -> None:
        self.write("steps", record)

    def on_epoch(self, result: EpochResult) -> None:
        self.write("epoch", result)

    def write(self, kind: str, figures: StepRecord | EpochResult) -> None:
        raise NotImplementedError


class JsonLog(_Log):
    """A callback that writes ``log.jsonl``.

    Each line is a JSON object: a StepRecord (kind ``steps``) or an EpochResult (kind ``epoch``). A resumed run first
    removes the lines of the steps that it repeats.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOG

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        kept = [
            line
            for line in read_log(self.path)
            if (line["epoch"] < num_epochs if line["kind"] == "epoch" else line["step"] <= num_steps)
        ]
        with write_whole(self.path) as file:
            file.writelines(_dump(line) for line in kept)

    def write(self, kind: str, figures: StepRecord | EpochResult) -> None:
        with naming(self.path), self.path.open("ab") as file:
            file.write(_dump({"kind": kind, **dataclasses.asdict(figures)}))


class TensorBoardLog(_Log):
    """A callback that writes the metrics of the log for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._directory), purge_step=num_steps + 1)

    def on_end(self, results: list[EpochResult]) -> None:
        self._writer.close()

    def write(self, kind: str, figures: StepRecord | EpochResult) -> None:
        for name, value in dataclasses.asdict(figures).items():
            if value is not None and name not in ("step", "epoch"):
                self._writer.add_scalar(f"{kind}/{name}", float(value), figures.step)
        if kind == "epoch":
            self._writer.flush()


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, except lines that were truncated while being written.

    Raises:
        StateError: If a line was not written by a training run.
    """
    if not path.exists():
        return
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not (
            isinstance(line, dict)
            and line.get("kind") in ("steps", "epoch")
            and all(type(line.get(name)) is int for name in ("epoch", "step"))
        ):
            raise StateError(
                f"{path} is not the log of a training run, because line {number} lacks 'kind', 'epoch' or 'step': move "
                "the file, or use another directory"
            )
        yield line


def read_figures(directory: Path) -> tuple[list[StepRecord], list[EpochResult]]:
    """Return the step records and the epoch results in a run's log."""
    lines: dict[str, list[dict[str, Any]]] = {"steps": [], "epoch": []}
    for line in read_log(directory / LOG):
        lines[line.pop("kind")].append(line)
    return [StepRecord(**line) for line in lines["steps"]], [EpochResult(**line) for line in lines["epoch"]]


def _dump(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
