"""The training loop, which assembles a run, tracks its progress and measures it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardio.device import DevicePrefetcher
from shardio.errors import NonFiniteLossError, StateError
from shardio.sample import warn_of_other_classes
from shardio.train.callbacks import (
    Callback,
    EpochResult,
    JsonLog,
    SizeHints,
    StepRecord,
    TensorBoardLog,
    name_callbacks,
)
from shardio.train.checkpoint import (
    BEST,
    LAST,
    algorithms,
    are_equal,
    check_loadable,
    check_parts,
    claimed,
    find_shared_state,
    load_checkpoint,
    load_random_states,
    prepare_directory,
    random_states,
    save_checkpoint,
    seed_everything,
)
from shardio.train.config import TrainConfig
from shardio.train.models import LrSchedule, make_optimizer
from shardio.train.report import HtmlReport
from shardio.train.step import (
    Score,
    TrainStep,
    gather,
    images_and_labels,
    in_groups,
    joined_ranks,
    make_loss,
    make_transforms,
    measure,
    prefetch,
    reported_failures,
    share_gradients,
    sum_over_ranks,
    unwrap,
    use_device,
    warn_of_repeats,
)
from shardio.world import World


def train(
    model: nn.Module,
    loader: Iterable[Any],
    config: TrainConfig,
    *,
    val_loader: Iterable[Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[EpochResult]:
    """Train a classifier.

    Under torchrun, ranks average their gradients, and the loader gives each rank its own part of the data.

    With a ``directory``, the same call resumes an interrupted run on any number of ranks. On the same number of ranks,
    the resumed run equals an uninterrupted one, with two exceptions. In datasets that are not shardio's, transforms
    that use the generators of torch, numpy or Python draw different numbers. Results are bit-identical only on a CPU
    with ``deterministic``. With a different number of ranks, each sample is still used once per epoch. Without
    shardio's order, the number of ranks can change only between epochs. Callbacks resume if they have a ``state_dict``.

    Args:
        model: A module that maps images, float [N, C, H, W], to outputs [N, classes]. The model is moved to the device
            and trained in place.
        loader: An iterable of batches that start with images [N, …] and labels: integers [N] or floats [N, classes].
            Images that are uint8 [N, C, H, W] are normalized.
        config: The settings.
        val_loader: Batches to evaluate the model on after each epoch, as :func:`evaluate` does.
        callbacks: Additions to the loop.

    Returns:
        The metrics of each epoch.

    Raises:
        NonFiniteLossError: If the loss or a weight is NaN or infinite.
        StateError: If the directory contains a run with different settings, model or data, a run without its last
            checkpoint, or another tool's log.
        FormatError: If the checkpoint cannot be read.
        OSError: If a checkpoint cannot be written. The previous checkpoint is kept.
        BusyError: If another run is writing to the directory.
    """
    if val_loader is not None:
        warn_of_other_classes(loader, val_loader)
    device = use_device(config.device)
    directory = None if config.directory is None else Path(config.directory)
    with (
        reported_failures(),
        algorithms(deterministic=config.deterministic, tf32=config.tf32),
        joined_ranks(device) as world,
        claimed(directory),
    ):
        if val_loader is not None:
            warn_of_repeats(val_loader, world, stacklevel=2)
        callbacks = [*callbacks, *_make_callbacks(config, directory, device)] if world.rank == 0 else callbacks
        batches = prefetch(loader, config, device, make_transforms(loader, config))
        return _train(model, batches, config, val_loader, callbacks, world)


def _train(
    model: nn.Module,
    batches: DevicePrefetcher,
    config: TrainConfig,
    val_loader: Iterable[Any] | None,
    callbacks: Sequence[Callback],
    world: World,
) -> list[EpochResult]:
    # This is a separate function so that its return frees all objects that refer to other ranks.
    batches.start_workers()  # Workers start while the model is moved and the optimizer is created.
    val_batches = None if val_loader is None else prefetch(val_loader, config, batches.device)
    run = TrainRun(config, model, batches, world, callbacks)
    # In validation, DistributedDataParallel would require the same number of batches on every rank.
    network = unwrap(run.step.model)
    run.start()
    for epoch in run.epochs():
        model.train()
        for batch, ends_step in in_groups(run.batches_of(epoch), config.accumulate):
            images, labels = images_and_labels(batch)
            outputs, loss = run.step(images, labels, ends_step=ends_step)
            run.record(batch, outputs, loss, ends_step=ends_step)
        run.log()
        run.end_epoch(None if val_batches is None else measure(network, val_batches, config))
    for callback in callbacks:
        callback.on_end(run.results)
    return run.results


def _make_callbacks(config: TrainConfig, directory: Path | None, device: torch.device) -> list[Callback]:
    # Only rank 0 calls this function: its callbacks give hints for the GPU and write the files in the run's directory.
    callbacks: list[Callback] = []
    if device.type == "cuda" and config.precision != "fp32":
        callbacks.append(SizeHints())
    if directory is not None:
        callbacks += [JsonLog(directory), HtmlReport(directory, config)]
        if importlib.util.find_spec("tensorboard") is not None:
            callbacks.append(TensorBoardLog(directory))
    return callbacks


def count_steps(loader: Any, config: TrainConfig) -> int:
    """Return the number of steps in a full epoch.

    Raises:
        ValueError: If the loader has no length and the settings do not give one, or if the ranks' loaders have
            different numbers of batches.
    """
    if config.steps_per_epoch is not None:
        return config.steps_per_epoch
    try:
        num_batches = gather(len(loader))
    except TypeError as error:
        raise ValueError(
            f"{type(loader).__name__} has no length, which the schedule needs: set steps_per_epoch"
        ) from error
    if len(set(num_batches)) > 1:
        raise ValueError(
            f"all ranks must have the same number of batches, got {num_batches}: use remainder='pad' or 'drop' in the "
            "ShardDataset or EpochSampler"
        )
    return max(-(-num_batches[0] // config.accumulate), 1)


FOR_LOADING, FOR_STEPS = 1, 2
"""Purposes of random numbers. The random numbers that a loader draws to start workers must not affect the steps."""


class TrainRun:
    """A training run: the model on its device, the training step, and their progress.

    Args:
        config: The settings.
        model: The model. It is moved to the device, and its weights are trained and saved.
        batches: The training data.
        world: The rank and the world size.
        callbacks: The callbacks of this rank.

    Attributes:
        step: The training step.
        results: The metrics of the finished epochs.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        batches: DevicePrefetcher,
        world: World,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config, self.model, self.batches, self.world, self.callbacks = config, model, batches, world, callbacks
        layout = torch.channels_last if config.channels_last else torch.preserve_format
        model.to(batches.device, memory_format=layout)  # type: ignore[call-overload]  # torch's stubs lack it
        wrapped = model
        for callback in callbacks:
            wrapped = callback.wrap_model(wrapped)
        optimizer = make_optimizer(model, config)
        self.schedule = LrSchedule(optimizer, config, count_steps(batches.loader, config))
        self.step = TrainStep(
            share_gradients(wrapped, batches.device, deterministic=config.deterministic),
            optimizer,
            schedule=self.schedule,
            precision=config.precision,
            accumulate=config.accumulate,
            loss_fn=make_loss(config),
            clip_norm=config.clip_norm,
            clip_value=config.clip_value,
            hooks=[callback.add_to_loss for callback in callbacks],
        )
        self.results: list[EpochResult] = []
        self._directory = None if config.directory is None else Path(config.directory)
        self._score, self._times = Score(self.step.device), {"train_s": 0.0, "data_wait_s": 0.0}
        self._interval = LogInterval(batches)
        self._random: dict[str, Any] | None = None
        self._saved_step: int | None = None

    def start(self) -> None:
        """Resume from the directory's last checkpoint, or start a new run if there is none."""
        if self.config.checkpoint_every is not None and not self.batches.has_state:
            raise ValueError(
                f"checkpoint_every={self.config.checkpoint_every} needs a loader with a state, which this "
                f"{type(self.batches.loader).__name__} does not have: use a shardio.DataLoader over a ShardDataset or "
                "with sampler=EpochSampler(dataset), or omit checkpoint_every"
            )
        if self._directory is not None and prepare_directory(self._directory, self.config):
            self._load(load_checkpoint(self._directory / LAST), self._directory / LAST)
        for callback in self.callbacks:
            callback.on_start(len(self.results), self.step.num_steps)

    def epochs(self) -> Iterator[int]:
        """Yield the remaining epochs. Stop early when ``patience`` runs out."""
        while len(self.results) < self.config.epochs and not self._is_out_of_patience():
            yield len(self.results)

    def batches_of(self, epoch: int) -> Iterator[Any]:
        """Yield the remaining batches of an epoch."""
        self.batches.set_epoch(epoch)
        seed_everything(self.config.seed, self.world.rank, epoch, FOR_LOADING)
        self._interval.restart()
        is_first = True
        for batch in self.batches:
            if is_first and self._random is not None:
                load_random_states(self._random, self.step.device)
            elif is_first:
                seed_everything(self.config.seed, self.world.rank, epoch, FOR_STEPS, self.step.num_steps)
            is_first = False
            yield batch

    def record(self, batch: Any, outputs: torch.Tensor, loss: torch.Tensor, *, ends_step: bool) -> None:
        """Record a microbatch. After the last microbatch of a step, log and save at the configured intervals."""
        labels, num_steps = batch[1], self.step.num_steps
        self._score.add(loss.expand(len(labels)), outputs, labels)
        self._interval.add_loss(loss, batch, num_steps if ends_step else num_steps + 1)
        for callback in self.callbacks:
            callback.on_batch(batch)
        if not ends_step:
            return
        self._interval.num_steps += 1
        every = self.config.checkpoint_every
        is_saved = every is not None and num_steps % every == 0
        if is_saved or num_steps % self.config.log_every == 0:
            self.log()
        if is_saved:
            self._save([LAST], is_within_epoch=True)

    def log(self) -> None:
        """Read the losses since the last call, and pass the metrics to the callbacks.

        Raises:
            NonFiniteLossError: If a loss is not finite.
        """
        if not self._interval.num_steps:
            return
        try:
            loss, num_images = self._interval.read_losses()
        except NonFiniteLossError as error:
            raise NonFiniteLossError(f"{error}. {self._remedy()}", step=error.step, keys=error.keys) from error
        elapsed_s, wait_s = time.perf_counter() - self._interval.start, self._interval.wait_s
        memory = measure_memory(self.step.device)
        record = StepRecord(
            step=self.step.num_steps,
            epoch=len(self.results),
            loss=loss,
            lr=self.step.lr,
            scale=self.step.scale,
            num_skipped=self.step.num_skipped,
            images_per_s=num_images / elapsed_s,
            step_s=elapsed_s / self._interval.num_steps,
            data_wait_share=wait_s / elapsed_s,
            memory_allocated=memory and memory.allocated,
            memory_reserved=memory and memory.reserved,
        )
        self._times["train_s"] += elapsed_s
        self._times["data_wait_s"] += wait_s
        self._interval.restart()
        for callback in self.callbacks:
            callback.on_log(record)

    def end_epoch(self, validation: Score | None) -> None:
        """Add the epoch's result, given its validation score, and save checkpoints."""
        score = self._score.over_ranks()
        if not score.num_images:
            raise ValueError(
                f"epoch {len(self.results)} had no batches: pass a loader that yields at least one batch in every "
                "epoch. An iterator can be read only once, and drop_last leaves out an incomplete batch"
            )
        judged_by = (validation or score).loss
        before = [one.judged_by for one in self.results if (one.val_loss is None) == (validation is None)]
        result = EpochResult(
            epoch=len(self.results),
            step=self.step.num_steps,
            loss=score.loss,
            accuracy=score.accuracy,
            val_loss=validation.loss if validation else None,
            val_accuracy=validation.accuracy if validation else None,
            num_images=score.num_images,
            **self._times,
            lr=self.step.lr,
            is_best=math.isfinite(judged_by) and not any(loss <= judged_by for loss in before),
        )
        self.results.append(result)
        self._score, self._times, self._random = Score(self.step.device), dict.fromkeys(self._times, 0.0), None
        self.schedule.end_epoch(judged_by)
        for callback in self.callbacks:
            callback.on_epoch(result)
        # LAST is saved last: if the run is killed before that, the resumed run repeats the end of the epoch.
        self._save([BEST, LAST] if result.is_best else [LAST], is_within_epoch=False)

    def _is_out_of_patience(self) -> bool:
        best = max((result.epoch for result in self.results if result.is_best), default=0)
        return self.config.patience is not None and len(self.results) > best + self.config.patience

    def _remedy(self) -> str:
        remedy = "Start a new run with a lower learning rate or with clip_norm (--clip-norm), or repair the data"
        if self._saved_step is None:
            return remedy
        return f"{remedy}. {self._directory}/{LAST} holds the weights of step {self._saved_step}, before the failure"

    def _save(self, names: list[str], *, is_within_epoch: bool) -> None:
        if self._directory is None:
            return
        self._check_weights()
        loader_state = self.batches.state_dict() if self.batches.has_state else None
        check_loadable(loader_state, "the loader's state")
        callbacks = {name: callback.state_dict() for name, callback in name_callbacks(self.callbacks).items()}
        for name, callback_state in callbacks.items():
            check_loadable(callback_state, f"the state of the callback {name}")
        own = {"random": random_states(self.step.device), "loader": loader_state, "score": self._score.sums.cpu()}
        of_ranks = gather(own)
        self._saved_step = self.step.num_steps
        if self.world.rank != 0:
            return
        state = {
            "config": self.config.shared_settings(),
            "model": self.model.state_dict(),
            "step": self.step.state_dict(),
            "results": [dataclasses.asdict(result) for result in self.results],
            "is_within_epoch": is_within_epoch,
            "times": self._times,
            "ranks": of_ranks,
            "callbacks": {name: callback_state for name, callback_state in callbacks.items() if callback_state},
        }
        for name in names:
            save_checkpoint(self._directory / name, state)

    def _check_weights(self) -> None:
        norms = torch.stack(torch._foreach_norm([weight.detach() for weight in self.step.parameters]))
        if not norms.isfinite().all():
            raise NonFiniteLossError(
                f"weights are NaN or infinite after step {self.step.num_steps}, because a gradient was not finite. "
                f"{self._remedy()}",
                step=self.step.num_steps,
            )

    def _load(self, state: dict[str, Any], path: Path) -> None:
        # Keep no reference to the state's weights, so that their memory can be freed.
        check_parts(state, path)
        if differences := self.config.find_differences(state["config"]):
            raise StateError(
                f"{path} is from a run with different settings ({'; '.join(differences)}): use the original settings "
                "or another directory, or start a new run with resume=False (--fresh)"
            )
        try:
            self.model.load_state_dict(state["model"])
            self.step.load_state_dict(state["step"])
        except (RuntimeError, ValueError) as error:  # ValueError means that different weights are frozen.
            raise StateError(
                f"{path} is from a run with a different model: use that model or another directory, or start a new run "
                f"with resume=False (--fresh). torch reports: {error}"
            ) from error
        self.results = [EpochResult(**result) for result in state["results"]]
        self._times, self._saved_step = state["times"], self.step.num_steps
        of_ranks = state["ranks"]
        is_same_world = len(of_ranks) == self.world.world_size
        own = of_ranks[self.world.rank if is_same_world else 0]
        loader_state = own["loader"] if is_same_world else self._share_loader_state(state, path)
        if loader_state is not None and self.batches.has_state:
            self.batches.load_state_dict(loader_state)
        self._load_callbacks(state.get("callbacks", {}), path)
        if not state["is_within_epoch"]:
            return
        if is_same_world:
            self._random = own["random"]
            self._score.sums.copy_(own["score"])
        elif self.world.rank == 0:
            self._score.sums.copy_(torch.stack([rank["score"] for rank in of_ranks]).sum(0))

    def _share_loader_state(self, state: dict[str, Any], path: Path) -> Any:
        states = [rank["loader"] for rank in state["ranks"]]
        has_order = getattr(self.batches.loader, "has_order", False)
        if states[0] is None or (has_order and all(are_equal(states[0], other) for other in states)):
            return states[0]
        shared = None if state["is_within_epoch"] else find_shared_state(states)
        if shared is not None:
            return shared
        before, now = len(states), self.world.world_size
        why, until = "datasets, samplers or generators of its loader have a separate state on each rank", ""
        if state["is_within_epoch"]:
            why = "it was saved within an epoch, when each rank had different samples left"
            until = ", at least until the end of the epoch"
        raise StateError(
            f"{path} is from a run with a world size of {before}, and cannot be resumed with {now}: {why}. Use a world "
            f"size of {before}{until}. With shardio's "
            "order (a ShardDataset, or sampler=EpochSampler(dataset)), the world size may change after any step"
        )

    def _load_callbacks(self, states: dict[str, Any], path: Path) -> None:
        callbacks = name_callbacks(self.callbacks)
        for name, state in states.items():
            if name in callbacks:
                callbacks[name].load_state_dict(state)
            elif self.world.rank == 0:
                warnings.warn(
                    f"{path} holds the state of a callback {name}, which this run does not have: the state is neither "
                    "loaded nor saved again",
                    RuntimeWarning,
                    stacklevel=2,
                )


class MemoryUse(NamedTuple):
    """Memory in use, in bytes.

    Attributes:
        allocated: The memory of tensors on a GPU; on the CPU, this process's resident set.
        reserved: The memory that torch has reserved on a GPU; on the CPU, this process's address space.
    """

    allocated: int
    reserved: int


def measure_memory(device: torch.device) -> MemoryUse | None:
    """Return the memory in use; None if the operating system does not report it."""
    if device.type == "cuda":
        return MemoryUse(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return MemoryUse(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())
    statm = Path("/proc/self/statm")  # proc(5): the address space and the resident set, in pages.
    if not statm.exists():
        return None
    reserved, allocated = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in statm.read_text().split()[:2])
    return MemoryUse(allocated, reserved)


@contextmanager
def memory_difference(
    name: str, device: torch.device | str = "cpu", say: Callable[[str], object] = print
) -> Iterator[None]:
    """Print the change in memory use within a block.

    :class:`shardio.train.loop.MemoryUse` defines allocated and reserved memory.

    >>> with memory_difference("a large tensor"):  # doctest: +SKIP
    ...     tensor = torch.ones(2**24)
    a large tensor: allocated +64.1 MiB, reserved +64.0 MiB
    """
    device = torch.device(device)
    before = measure_memory(device)
    yield
    after = measure_memory(device)
    if before is None or after is None:
        say(f"{name}: memory use cannot be measured on this system")
        return
    allocated, reserved = ((new - old) / 2**20 for new, old in zip(after, before, strict=True))
    say(f"{name}: allocated {allocated:+.1f} MiB, reserved {reserved:+.1f} MiB")


class LogInterval:
    """The steps since the last line of the log: their time, and the losses of their microbatches, on the device.

    The losses are read together, because each read waits for the device.

    Args:
        batches: The prefetcher, which measures the time that the device spends waiting for data.

    Attributes:
        start: The start of the interval, from ``time.perf_counter``.
        num_steps: Steps in the interval.
    """

    def __init__(self, batches: DevicePrefetcher) -> None:
        self._batches = batches
        self._losses: list[tuple[torch.Tensor, int, int, Sequence[str] | None]] = []
        self.restart()

    def restart(self) -> None:
        """Start a new interval."""
        self.start, self.num_steps = time.perf_counter(), 0
        self._stall_before_s = self._batches.stats().data_stall_s

    @property
    def wait_s(self) -> float:
        """Seconds that the device waited for data in the interval."""
        return self._batches.stats().data_stall_s - self._stall_before_s

    def add_loss(self, loss: torch.Tensor, batch: Any, step: int) -> None:
        """Add the mean loss of a microbatch of this step."""
        self._losses.append((loss, len(batch[1]), step, _find_keys(batch)))

    def read_losses(self) -> tuple[float, int]:
        """Return the mean loss and the number of samples, over all ranks, and clear the losses.

        Raises:
            NonFiniteLossError: If a loss is not finite. The message names the step and its samples.
        """
        pending, self._losses = self._losses, []
        losses = [loss.float() for loss, *_ in pending]
        values = torch.stack(losses).cpu().double() if losses else torch.zeros(0, dtype=torch.float64, device="cpu")
        sizes = torch.tensor([num_samples for _, num_samples, *_ in pending], dtype=torch.float64, device="cpu")
        total, num_samples = sum_over_ranks(torch.stack([(values * sizes).sum(), sizes.sum()])).tolist()
        if not math.isfinite(total):
            found = zip(values.tolist(), pending, strict=True)
            bad = ((step, value, keys) for value, (*_, step, keys) in found if not math.isfinite(value))
            raise _first_not_finite(next(bad, None))
        return total / max(num_samples, 1), int(num_samples)


def _first_not_finite(own: tuple[int, float, Sequence[str] | None] | None) -> NonFiniteLossError:
    # The first loss that is not finite also makes later losses on other ranks NaN.
    found = [(first, rank) for rank, first in enumerate(gather(own)) if first is not None]
    (step, value, keys), rank = min(found, key=lambda one: one[0][0])
    where = f" on rank {rank}" if len(found) > 1 or rank else ""
    if keys is None:
        samples = (
            "samples unknown, because the batch has no keys: to name them, train on shards with "
            'fields=("image", "label", "key")'
        )
    else:
        more = f" and {len(keys) - 20} more" if len(keys) > 20 else ""
        samples = f"samples: {', '.join(keys[:20])}{more}"
    return NonFiniteLossError(f"the loss of step {step}{where} is {value} ({samples})", step=step, keys=keys)


def _find_keys(batch: Any) -> Sequence[str] | None:
    fields = (field for field in batch[2:] if isinstance(field, (list, tuple)) and field)
    return next((field for field in fields if all(isinstance(value, str) for value in field)), None)
