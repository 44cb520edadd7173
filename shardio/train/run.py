"""TrainRun: the progress of a training run and its metrics, which it saves and resumes."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardio.device import DevicePrefetcher
from shardio.errors import NonFiniteLossError, StateError
from shardio.train.callbacks import Callback, name_callbacks
from shardio.train.checkpoint import (
    BEST,
    LAST,
    are_equal,
    check_loadable,
    check_parts,
    find_shared_state,
    load_checkpoint,
    save_checkpoint,
)
from shardio.train.config import TrainConfig
from shardio.train.directory import prepare_directory
from shardio.train.memory import measure_memory
from shardio.train.meters import EpochResult, LogInterval, PendingLosses, Score, StepRecord
from shardio.train.ranks import gather
from shardio.train.schedules import LrSchedule
from shardio.train.seeds import load_random_states, random_states, seed_everything
from shardio.train.step import TrainStep
from shardio.world import World

FOR_LOADING, FOR_STEPS = 1, 2
"""Purposes of random numbers. What a loader draws to start workers must not affect steps."""


class TrainRun:
    """A training run.

    Args:
        config: The settings.
        model: The model whose weights are trained and saved.
        step: The training step.
        schedule: The schedule of the learning rates.
        batches: The training data.
        world: The rank and the world size.
        callbacks: The callbacks of this rank.

    Attributes:
        results: The metrics of the finished epochs.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        step: TrainStep,
        schedule: LrSchedule,
        batches: DevicePrefetcher,
        world: World,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config, self.model, self.step, self.schedule = config, model, step, schedule
        self.batches, self.world, self.callbacks = batches, world, callbacks
        self.results: list[EpochResult] = []
        self._directory = None if config.directory is None else Path(config.directory)
        self._score, self._times = Score(step.device), {"train_s": 0.0, "data_wait_s": 0.0}
        self._losses, self._interval = PendingLosses(), LogInterval(batches)
        self._random: dict[str, Any] | None = None
        self._saved_step: int | None = None

    def start(self) -> None:
        """Resume from the directory's last checkpoint. Without one, start a new run."""
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
        """Record a microbatch. If it ended a step, log and save at the configured intervals."""
        labels, num_steps = batch[1], self.step.num_steps
        self._score.add(loss.expand(len(labels)), outputs, labels)
        self._losses.add(loss, batch, num_steps if ends_step else num_steps + 1)
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
            loss, num_images = self._losses.read()
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
            memory_allocated=memory.allocated if memory else None,
            memory_reserved=memory.reserved if memory else None,
        )
        self._times["train_s"] += elapsed_s
        self._times["data_wait_s"] += wait_s
        self._interval.restart()
        for callback in self.callbacks:
            callback.on_log(record)

    def end_epoch(self, validation: Score | None) -> None:
        """Summarise the epoch, with its score on validation data, and save."""
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
        # LAST is saved last. A run that is killed in between repeats the end of the epoch.
        self._save([BEST, LAST] if result.is_best else [LAST], is_within_epoch=False)

    def _is_out_of_patience(self) -> bool:
        best = max((result.epoch for result in self.results if result.is_best), default=0)
        return self.config.patience is not None and len(self.results) > best + self.config.patience

    def _remedy(self) -> str:
        if self._saved_step is None:
            return "Start a new run with a lower learning rate or with clip_norm (--clip-norm), or repair the data"
        return (
            "Start a new run with a lower learning rate or with clip_norm (--clip-norm), or repair the data. "
            f"{self._directory}/{LAST} holds the weights of step {self._saved_step}, before the failure"
        )

    def _save(self, names: list[str], *, is_within_epoch: bool) -> None:
        if self._directory is None:
            return
        self._check_weights()
        loader_state = self.batches.state_dict() if self.batches.has_state else None
        check_loadable(loader_state, "the loader's state")
        callbacks = {name: callback.state_dict() for name, callback in name_callbacks(self.callbacks).items()}
        for name, callback_state in callbacks.items():
            check_loadable(callback_state, f"the state of the callback {name}")
        of_ranks = gather(
            {
                "random": random_states(self.step.device),
                "loader": loader_state,
                "score": self._score.sums.cpu(),
            }
        )
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
        """Raise an error if weights are not finite. A finite loss may have a NaN gradient."""
        norms = torch.stack(torch._foreach_norm([weight.detach() for weight in self.step.parameters]))
        if not norms.isfinite().all():
            raise NonFiniteLossError(
                f"weights are NaN or infinite after step {self.step.num_steps}, because a gradient was not finite. "
                f"{self._remedy()}",
                step=self.step.num_steps,
            )

    def _load(self, state: dict[str, Any], path: Path) -> None:
        """Resume from a checkpoint. Keep no reference to its weights, to free their memory."""
        check_parts(state, path)
        if differences := self.config.find_differences(state["config"]):
            raise StateError(
                f"{path} is from a run with other settings ({'; '.join(differences)}): use the original settings or "
                "another directory, or start a new run with resume=False (--fresh)"
            )
        try:
            self.model.load_state_dict(state["model"])
            self.step.load_state_dict(state["step"])
        except (RuntimeError, ValueError) as error:  # ValueError: other weights are frozen.
            raise StateError(
                f"{path} is from a run with another model: use that model or another directory, or start a new run "
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
        """Return the state of all ranks' loaders for another number of ranks."""
        states = [rank["loader"] for rank in state["ranks"]]
        has_order = getattr(self.batches.loader, "has_order", False)
        if states[0] is None or (has_order and all(are_equal(states[0], other) for other in states)):
            return states[0]
        shared = None if state["is_within_epoch"] else find_shared_state(states)
        if shared is not None:
            return shared
        before, now = len(states), self.world.world_size
        why = "datasets, samplers or generators of its loader have a state of their own on each rank"
        if state["is_within_epoch"]:
            why = "it was saved within an epoch, where each rank has its own samples left"
        raise StateError(
            f"{path} is from a run with a world size of {before}, and cannot be resumed with {now}: {why}. Use a world "
            f"size of {before}{', at least to the end of the epoch' if state['is_within_epoch'] else ''}. In shardio's "
            "order (a ShardDataset, or sampler=EpochSampler(dataset)), the world size may change after any step"
        )

    def _load_callbacks(self, states: dict[str, Any], path: Path) -> None:
        callbacks = name_callbacks(self.callbacks)
        for name, state in states.items():
            if name in callbacks:
                callbacks[name].load_state_dict(state)
            elif self.world.rank == 0:
                warnings.warn(
                    f"{path} holds the state of a callback {name}, which this run does not have: it is not loaded, and "
                    "later checkpoints will lack it",
                    RuntimeWarning,
                    stacklevel=2,
                )
