"""TrainRun: the progress of a training run and its metrics, which it saves and resumes."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import math
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardio.device import DevicePrefetcher
from shardio.errors import BusyError, NonFiniteLossError, StateError
from shardio.files import remove_unfinished
from shardio.process import call_at_fork
from shardio.train.callbacks import LOG, PAGE, PICTURE, Callback, name_callbacks, read_log
from shardio.train.checkpoint import (
    BEST,
    LAST,
    are_equal,
    check_loadable,
    check_parts,
    find_shared_state,
    load_checkpoint,
    load_random_states,
    random_states,
    save_checkpoint,
    seed_everything,
)
from shardio.train.config import TrainConfig
from shardio.train.meters import (
    EpochResult,
    LogInterval,
    PendingLosses,
    Score,
    StepRecord,
    gather,
    measure_memory,
    on_rank_0,
)
from shardio.train.optimizers import LrSchedule
from shardio.train.step import TrainStep
from shardio.values import parse_json
from shardio.world import World

LOCK = ".run.lock"

_log = logging.getLogger("shardio")


@contextmanager
def claimed(directory: Path | None) -> Iterator[None]:
    """Hold the lock of a run's directory, and create the directory if it is missing.

    Without a directory, do nothing. Rank 0 holds the lock for all ranks, which fail together. The
    lock ends with its process. Worker processes that torch forks close their copy of the lock's
    descriptor, so a killed run can be resumed while its workers still exist. On NFS, the lock
    works between machines if the server has a lock service. On a file system without locks, a
    warning is logged.

    Raises:
        BusyError: If another run holds the lock.
        OSError: If the directory cannot be created or written to.
    """
    lock = _Lock()  # Only rank 0 takes it.
    try:
        if directory is not None:
            on_rank_0(lambda: lock.take(directory))
        yield
    finally:
        lock.release()


class _Lock:
    """The lock of a run's directory.

    A forked child releases its copy, which would otherwise hold the lock until the child ends.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        call_at_fork(self, after_in_child=_Lock.release)

    def take(self, directory: Path) -> None:
        """Take the lock, unless the file system has none."""
        self._descriptor = _lock(directory)

    def release(self) -> None:
        """Release the lock if this process holds it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _lock(directory: Path) -> int | None:
    """Return the descriptor that holds the lock; None if the file system has no locks."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _name_holder(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        raise BusyError(
            f"{directory} is in use by {holder}, which is training there: wait for it to end, or use another directory"
        ) from None
    except OSError as error:
        os.close(descriptor)
        _log.warning(
            "%s is on a file system without locks (%s): do not start a second run that writes there", directory, error
        )
        return None
    with suppress(OSError):  # On a full disk, the lock holds even if the holder's name is not written.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"process_id": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor


def _name_holder(content: bytes) -> str:
    try:
        holder = parse_json(content)
        return f"process {holder['process_id']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):  # The holder has not written its name yet.
        return "another process"


def prepare_directory(directory: Path, config: TrainConfig) -> bool:
    """Remove outdated files, and return whether there is a checkpoint to resume from.

    Raises:
        StateError: If ranks see different directories, or the directory holds another tool's log
            or a run without its last checkpoint. In these cases, nothing is removed.
        FormatError: If the best checkpoint cannot be read.
    """
    last = directory / LAST
    if len(set(gather(last.exists()))) > 1:
        raise StateError(f"only some ranks see {last}: use a directory that all ranks share")
    return on_rank_0(lambda: _prepare(directory, config))


def _prepare(directory: Path, config: TrainConfig) -> bool:
    last_epoch = max((line["epoch"] for line in read_log(directory / LOG)), default=None)
    has_last = (directory / LAST).exists()
    if config.resume and not has_last and not _may_start_over(directory / BEST, config, last_epoch):
        found = BEST if (directory / BEST).exists() else f"{LOG} (up to epoch {last_epoch})"
        raise StateError(
            f"{directory} contains the {found} of an earlier run, but no {LAST} to resume from: restore {LAST}, use "
            "another directory, or replace the earlier run with resume=False (--fresh)"
        )
    remove_unfinished(directory, (LAST, BEST, LOG, PAGE, PICTURE))
    for name in () if config.resume else (LAST, BEST):
        (directory / name).unlink(missing_ok=True)
    return has_last and config.resume


def _may_start_over(best: Path, config: TrainConfig, last_epoch: int | None) -> bool:
    """Return whether a run without its last checkpoint was killed in its first epoch, before it could write one.

    Its log then ends in epoch 0. Its best checkpoint, which is written first, is of that epoch and
    of the same settings.
    """
    if not best.exists():
        return not last_epoch
    if last_epoch != 0:
        return False
    state = load_checkpoint(best)
    return len(state["results"]) == 1 and not config.find_differences(state["config"])


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
