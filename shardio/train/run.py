"""Run: how far a training run is, what is noted of it, and how it is saved and gone on with."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardio.device import DevicePrefetcher
from shardio.errors import NonFiniteLossError, StateError
from shardio.train.callbacks import Callback
from shardio.train.checkpoint import BEST, LAST, check_parts, load_checkpoint, save_checkpoint
from shardio.train.config import TrainConfig
from shardio.train.leftovers import explain_lost_checkpoint
from shardio.train.logs import explain_foreign_log
from shardio.train.losses import Losses
from shardio.train.memory import measure_memory
from shardio.train.meters import EpochResult, Interval, Score, StepRecord
from shardio.train.ranks import gather
from shardio.train.schedules import Schedule
from shardio.train.seeds import load_random_states, random_states, seed_everything
from shardio.train.step import TrainStep
from shardio.whole_writes import PARTIAL_SUFFIX
from shardio.world import World

FOR_LOADING, FOR_STEPS = 1, 2
"""What random numbers are for. Loaders draw some when they start workers, and how many must change no step."""


class Run:
    """A training run, as far as it has come.

    Args:
        config: Its settings.
        model: Whose weights are trained and saved.
        step: What computes with it, and how it learns.
        schedule: The learning rates.
        batches: What it learns from.
        world: Which rank this is.
        callbacks: Told of all that happens.

    Attributes:
        results: Of the epochs that are finished.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        step: TrainStep,
        schedule: Schedule,
        batches: DevicePrefetcher,
        world: World,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config, self.model, self.step, self.schedule = config, model, step, schedule
        self.batches, self.world, self.callbacks = batches, world, callbacks
        self.results: list[EpochResult] = []
        self._directory = None if config.directory is None else Path(config.directory)
        self._score, self._times = Score(step.device), {"train_s": 0.0, "data_wait_s": 0.0}
        self._losses, self._interval = Losses(), Interval()
        self._random: dict[str, Any] | None = None
        self._saved_step: int | None = None

    @property
    def num_steps(self) -> int:
        """How many steps there have been, taken and skipped."""
        return self.step.num_steps

    def begin(self) -> None:
        """Go on from the directory's last checkpoint, if there is one, or else begin."""
        if self.config.checkpoint_every is not None and not self.batches.has_state:
            raise ValueError(
                f"checkpoint_every={self.config.checkpoint_every} needs a loader that can say where it is, by "
                f"state_dict, and {type(self.batches.loader).__name__} cannot: take shardio.DataLoader, or leave it out"
            )
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            foreign = explain_foreign_log(self._directory) if self.world.rank == 0 else None
            if (foreign := gather(foreign)[0]) is not None:  # All ranks fail together, before anything is removed.
                raise StateError(foreign)
            for path in self._directory.glob(f".*{PARTIAL_SUFFIX}") if self.world.rank == 0 else ():
                path.unlink()  # What a killed run was about to write.
            if self._is_to_go_on(self._directory / LAST):
                self._load(load_checkpoint(self._directory / LAST), self._directory / LAST)
        for callback in self.callbacks:
            callback.on_start(len(self.results), self.num_steps)

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, until nothing improves any more."""
        while len(self.results) < self.config.epochs and not self._is_out_of_patience():
            yield len(self.results)

    def batches_of(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch, or what is left of it."""
        self.batches.set_epoch(epoch)
        seed_everything(self.config.seed, self.world.rank, epoch, FOR_LOADING)
        self._interval.restart()
        for number, batch in enumerate(self._interval.watch(self.batches)):
            if number == 0 and self._random is not None:
                load_random_states(self._random, self.step.device)
            elif number == 0:
                seed_everything(self.config.seed, self.world.rank, epoch, FOR_STEPS, self.num_steps)
            yield batch

    def note(self, batch: Any, outputs: torch.Tensor, loss: torch.Tensor, *, ends_step: bool) -> None:
        """Note a microbatch; if it ended a step, log and save as often as wanted."""
        labels = batch[1]
        self._score.add(loss.expand(len(labels)), outputs, labels)
        self._losses.add(loss, batch, self.num_steps if ends_step else self.num_steps + 1)
        for callback in self.callbacks:
            callback.on_batch(batch)
        if not ends_step:
            return
        self._interval.num_steps += 1
        every = self.config.checkpoint_every
        is_saved = every is not None and self.num_steps % every == 0
        if is_saved or self.num_steps % self.config.log_every == 0:
            self.log()
        if is_saved:
            self._save([LAST], is_within_epoch=True)

    def log(self) -> None:
        """Read the losses since the last time, and tell of them.

        Raises:
            NonFiniteLossError: If one is not finite.
        """
        if not self._interval.num_steps:
            return
        try:
            loss, num_images = self._losses.read()
        except NonFiniteLossError as error:
            raise NonFiniteLossError(f"{error}; {self._way_back()}", step=error.step, keys=error.keys) from error
        elapsed_s, memory = time.perf_counter() - self._interval.start, measure_memory(self.step.device)
        record = StepRecord(
            step=self.num_steps,
            epoch=len(self.results),
            loss=loss,
            lr=self.step.lr,
            scale=self.step.scale,
            num_skipped=self.step.num_skipped,
            images_per_s=num_images / elapsed_s,
            step_s=elapsed_s / self._interval.num_steps,
            data_wait_share=self._interval.wait_s / elapsed_s,
            memory_allocated=memory.allocated if memory else None,
            memory_reserved=memory.reserved if memory else None,
        )
        self._times["train_s"] += elapsed_s
        self._times["data_wait_s"] += self._interval.wait_s
        self._interval.restart()
        for callback in self.callbacks:
            callback.on_log(record)

    def end_epoch(self, validation: Score | None) -> None:
        """Sum up the epoch, of which ``validation`` is the score on other samples; save."""
        score = self._score.over_ranks()
        if not score.num_images:
            raise ValueError(f"epoch {len(self.results)} had no batches: a loader must give them anew in each epoch")
        judged_by = (validation or score).loss
        before = [one.judged_by for one in self.results if (one.val_loss is None) == (validation is None)]
        result = EpochResult(
            epoch=len(self.results),
            step=self.num_steps,
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
        self.schedule.end_epoch(result.judged_by)
        for callback in self.callbacks:
            callback.on_epoch(result)
        # LAST comes last: a run that is killed between both does the epoch's end again.
        self._save([BEST, LAST] if result.is_best else [LAST], is_within_epoch=False)

    def _is_to_go_on(self, last: Path) -> bool:
        """Say whether there is a checkpoint to go on from; take those away that are not wanted.

        Raises:
            StateError: If ranks see different files, or the run's last checkpoint is gone and others are there.
        """
        found = gather(last.exists())
        if len(set(found)) > 1:
            raise StateError(f"{last} is seen by some ranks and not by others: name a directory that all ranks share")
        if not self.config.resume:
            for name in (LAST, BEST) if self.world.rank == 0 else ():
                last.with_name(name).unlink(missing_ok=True)
        elif not found[0]:
            lost = explain_lost_checkpoint(last.parent, self.config) if self.world.rank == 0 else None
            if (lost := gather(lost)[0]) is not None:
                raise StateError(lost)
        return found[0] and self.config.resume

    def _is_out_of_patience(self) -> bool:
        best = max((result.epoch for result in self.results if result.is_best), default=0)
        return self.config.patience is not None and len(self.results) > best + self.config.patience

    def _way_back(self) -> str:
        if self._saved_step is None:
            return "there is no checkpoint to go back to: start a new run with a lower learning rate"
        return (
            f"the last checkpoint before it is {self._directory}/{LAST}, of step {self._saved_step}: go on from there "
            "without those samples, or start a new run with a lower learning rate"
        )

    def _save(self, names: list[str], *, is_within_epoch: bool) -> None:
        if self._directory is None:
            return
        self._check_weights()
        of_ranks = gather(
            {
                "random": random_states(self.step.device),
                "loader": self.batches.state_dict() if self.batches.has_state else None,
                "score": self._score.sums.cpu(),
            }
        )
        self._saved_step = self.num_steps
        if self.world.rank != 0:
            return
        state = {
            "config": self.config.what_matters(),
            "model": self.model.state_dict(),
            "step": self.step.state_dict(),
            "results": [dataclasses.asdict(result) for result in self.results],
            "is_within_epoch": is_within_epoch,
            "times": self._times,
            "ranks": of_ranks,
        }
        for name in names:
            save_checkpoint(self._directory / name, state)

    def _check_weights(self) -> None:
        """Raise an error if weights are not finite: losses may be so, and their gradients not."""
        norms = torch.stack(torch._foreach_norm([weight.detach() for weight in self.step.parameters]))
        if not norms.isfinite().all():
            raise NonFiniteLossError(
                f"after step {self.num_steps} weights are NaN or infinite, since a gradient was; {self._way_back()}",
                step=self.num_steps,
            )

    def _load(self, state: dict[str, Any], path: Path) -> None:
        """Go on from a checkpoint, which is freed with the caller's last reference to it."""
        check_parts(state, path)
        self._check_settings(state["config"], path)
        try:
            self.model.load_state_dict(state["model"])
            self.step.load_state_dict(state["step"])
        except (RuntimeError, ValueError) as error:  # ValueError: other weights are frozen.
            raise StateError(
                f"{path} is of another model: name another directory, or start a new run: {error}"
            ) from error
        self.results = [EpochResult(**result) for result in state["results"]]
        self._times, self._saved_step = state["times"], self.num_steps
        of_ranks = state["ranks"]
        is_same_world = len(of_ranks) == self.world.world_size
        own = of_ranks[self.world.rank if is_same_world else 0]
        if not is_same_world and any(repr(rank["loader"]) != repr(own["loader"]) for rank in of_ranks):
            raise StateError(
                f"{path} is of {len(of_ranks)} ranks, and {self.world.world_size} are to go on: "
                f"{type(self.batches.loader).__name__} cannot, since each rank had a state of its own; "
                "shardio.DataLoader can"
            )
        if own["loader"] is not None and self.batches.has_state:
            self.batches.load_state_dict(own["loader"])
        if not state["is_within_epoch"]:
            return
        if is_same_world:
            self._random = own["random"]
            self._score.sums.copy_(own["score"])
        elif self.world.rank == 0:
            self._score.sums.copy_(torch.stack([rank["score"] for rank in of_ranks]).sum(0))

    def _check_settings(self, saved: dict[str, Any], path: Path) -> None:
        if differing := self.config.find_differing(saved):
            raise StateError(
                f"{path} is of a run with other settings: {'; '.join(differing)}: use the original "
                "settings, name another directory, or start a new run (resume=False, --fresh)"
            )
