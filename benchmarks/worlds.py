"""Deliver a loader's batches in new processes, with any number of workers and ranks, and compare resumed runs.

A benchmark describes the work of one process as a :class:`Job`, and opens its loader in a function that returns
:class:`Opened`. The module also runs the job: :func:`start` passes it ``--job``, and the module calls :func:`answer`.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.loaders.measure import Stopwatch

SAVED_AFTER, NUM_RESUMED = 40, 40  # batches before the state is saved, and batches compared after that
NUM_SKIPPED = 20  # untimed batches at the beginning of each epoch

Codes = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process: delivering batches, and writing the codes of samples to files.

    Attributes:
        module: The benchmark's module.
        loader: The name of the loader.
        data: The folder of its data.
        codes: The common prefix of the files' paths.
        batch_size: The number of samples in a global batch, over all ranks.
        num_workers: The number of workers on each rank.
        num_batches: The number of batches to deliver.
        rank: The rank of the process.
        world_size: The number of ranks.
        saves: Whether to save the state after 40 batches.
        resumes: Whether to load the state at the beginning.
    """

    module: str
    loader: str
    data: str
    codes: str
    batch_size: int
    num_workers: int = 2
    num_batches: int = 460
    rank: int = 0
    world_size: int = 1
    saves: bool = False
    resumes: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of torch's DataLoader."""
        return {
            "batch_size": self.batch_size // self.world_size,
            "num_workers": self.num_workers,
            "persistent_workers": True,
        }


class Opened(NamedTuple):
    """A loader; each ``iter(batches)`` begins an epoch. A loader without a state has neither ``save`` nor ``load``."""

    batches: Any
    find_codes: Callable[[Any], Any]
    save: Callable[[], Any] | None = None
    load: Callable[[Any], None] | None = None


def deliver_here(job: Job, open_loader: Callable[[Job], Opened]) -> dict[str, Any]:
    """Deliver batches in this process and write their codes; return the state's size and the times per sample."""
    torch.set_num_threads(1)
    if job.world_size > 1:
        torch.distributed.init_process_group("gloo")
    opened = open_loader(job)
    if job.resumes and opened.load is not None:
        opened.load(pickle.loads(Path(f"{job.codes}.state").read_bytes()))
    codes, state_size, num_samples, wall_s, cpu_s = list[Codes](), None, 0, 0.0, 0.0
    while len(codes) < job.num_batches:
        stopwatch, first = Stopwatch(), len(codes)
        for batch in opened.batches:
            codes.append(np.array(opened.find_codes(batch), np.int64))
            if len(codes) == first + NUM_SKIPPED:
                stopwatch, first_timed = Stopwatch(), len(codes)
            if len(codes) == SAVED_AFTER and job.saves and opened.save is not None:
                state = opened.save()  # as a pickle, because LitData's state has integer keys
                Path(f"{job.codes}.state").write_bytes(pickle.dumps(state))
                state_size = len(state if isinstance(state, bytes) else json.dumps(state, default=int))
            if len(codes) == job.num_batches:
                break
        if len(codes) > first + NUM_SKIPPED:
            times, num_samples = stopwatch.stop(), num_samples + sum(map(len, codes[first_timed:]))
            wall_s, cpu_s = wall_s + times.wall_s, cpu_s + times.cpu_s
    np.savez(f"{job.codes}-{job.rank}.npz", codes=np.concatenate(codes), sizes=[len(each) for each in codes])
    return {"rate": num_samples / wall_s, "cpu_us": 1e6 * cpu_s / num_samples, "state_size": state_size}


def answer(text: str, run: Callable[[Job], dict[str, Any]]) -> None:
    """Run the job that :func:`start` passed to this process, and print its result or its error."""
    try:
        result = run(Job(**json.loads(text)))
    except Exception as error:  # A peer may reject a state with any error.
        lines = str(error).strip().splitlines() or [""]  # torch puts a worker's traceback before the message.
        result = {"error": lines[-1] if lines[0].startswith("Caught") else f"{type(error).__name__}: {lines[0]}"}
    print("\n" + json.dumps(result), flush=True)


def start(job: Job) -> list[dict[str, Any]]:
    """Run a job on each of its ranks, in new processes; return what each rank printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pipe, processes = subprocess.PIPE, list[subprocess.Popen[str]]()
    popen = partial(subprocess.Popen[str], stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    for rank in range(job.world_size):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "LOCAL_WORLD_SIZE": job.world_size}
        variables = {name: str(value) for name, value in names.items()} if job.world_size > 1 else {}
        env = {**os.environ, **variables, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        text = json.dumps(asdict(replace(job, rank=rank)))
        processes.append(popen([sys.executable, "-m", job.module, "--job", text], env=env))
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def deliver(job: Job) -> tuple[list[Codes], int | None]:
    """Run a job; return the codes of its global batches, and the size of its state.

    Raises:
        RuntimeError: If a rank has failed.
    """
    results = start(job)
    if errors := [result["error"] for result in results if "error" in result]:
        raise RuntimeError(errors[0])
    ranks = []
    for rank in range(job.world_size):
        with np.load(f"{job.codes}-{rank}.npz") as arrays:
            ranks.append(np.split(arrays["codes"], np.cumsum(arrays["sizes"])[:-1]))
    return [np.concatenate(parts) for parts in zip(*ranks, strict=True)], results[0]["state_size"]


def compare_resumed(job: Job, uninterrupted: list[Codes]) -> list[str]:
    """Resume from the saved state with 2 workers, with 1 worker and with 2 ranks; return a table cell for each.

    The samples of each global batch are compared, in any order, with those of the uninterrupted run.
    """
    cells = []
    for workers, ranks in ((2, 1), (1, 1), (2, 2)):
        resumed = replace(job, resumes=True, num_workers=workers, world_size=ranks, num_batches=NUM_RESUMED)
        try:
            pairs = zip(deliver(resumed)[0], uninterrupted[SAVED_AFTER:], strict=False)
            same = sum(np.array_equal(np.sort(one), np.sort(other)) for one, other in pairs)
            cells.append("equal" if same == NUM_RESUMED else f"{same} of {NUM_RESUMED} batches equal")
        except RuntimeError as error:
            cells.append(f"refused: {error}")
    return cells


def take_turns(jobs: dict[str, Job], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each job in each round; a different job runs first in each round."""
    names = list(jobs)
    found: dict[str, dict[str, list[float]]] = {name: {"rate": [], "cpu_us": []} for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            (result,) = start(jobs[name])
            print(f"round {number}, {name}: {result}", file=sys.stderr, flush=True)
            for key, figures in found[name].items():
                figures.append(result[key])
    return found
