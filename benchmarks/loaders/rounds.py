"""Run rounds: in each round, every candidate runs once, in its own process.

A different candidate comes first in each round.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.loaders.checks import Figures
from benchmarks.loaders.data import prepare
from benchmarks.loaders.registry import Candidate

TIMEOUT_S = 1800


@dataclass(slots=True, kw_only=True)
class Result:
    """The results of one candidate.

    Attributes:
        rounds: The figures of each round; empty if there was a problem.
        problem: The reason why the candidate was not measured; empty if it was measured.
    """

    candidate: Candidate
    rounds: list[Figures] = field(default_factory=list)
    problem: str = ""

    @property
    def reason(self) -> str:
        """The last line of ``problem``. The earlier lines are a traceback, which contains paths on this machine."""
        return self.problem.strip().splitlines()[-1] if self.problem else ""

    def figures(self, name: str) -> list[float]:
        """Return a figure from each round."""
        return [figures[name] for figures in self.rounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run."""

    work: Path
    num_samples: int
    num_small: int
    num_workers: int
    num_epochs: int
    num_rounds: int


def run_case(case: str, candidates: Sequence[Candidate], settings: Settings) -> list[Result]:
    """Run all rounds of a case; return the results in the order of the candidates."""
    results = [Result(candidate=candidate) for candidate in candidates]
    places = {}
    for result in results:
        places[result.candidate.name] = _prepare(case, result, settings)
    for number in range(settings.num_rounds):
        first = number % len(results)
        for turn, result in enumerate(results[first:] + results[:first], 1):
            if not result.problem:
                turns = f"round {number + 1} of {settings.num_rounds}, turn {turn} of {len(results)}"
                tell(f"{case}: {turns}: {result.candidate.name}")
                _run_once(case, result, places[result.candidate.name], settings)
    _compare_contents(results, settings.num_samples)
    return results


def tell(what: str) -> None:
    """Print progress on standard error: a run takes a long time."""
    print(what, file=sys.stderr, flush=True)


def _prepare(case: str, result: Result, settings: Settings) -> Path:
    if not result.candidate.is_installed:
        result.problem = "not installed"
        return settings.work
    tell(f"{case}: preparing data for {result.candidate.name}")
    try:
        if case == "flatness":
            prepare(settings.work, "tiny", settings.num_small)
        return prepare(settings.work, result.candidate.storage, settings.num_small)
    except RuntimeError as error:
        result.problem = str(error)
        return settings.work


def _run_once(case: str, result: Result, data: Path, settings: Settings) -> None:
    num_samples = settings.num_small if case == "small" else settings.num_samples
    numbers = (num_samples, settings.num_workers, settings.num_epochs)
    command = [sys.executable, "-m", "benchmarks.loaders.worker", case, result.candidate.name]
    command += [str(settings.work), str(data), *map(str, numbers)]
    # A separate session identifies the candidate's processes, so they can be measured and ended together.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        result.problem = f"took longer than {TIMEOUT_S} s"
        return
    finally:
        _end_session(process.pid)
    if process.returncode:
        result.problem = f"exit code {process.returncode}: {errors[-2000:]}"
        return
    result.rounds.append(json.loads(output.splitlines()[-1]))


def _end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _compare_contents(results: list[Result], num_samples: int) -> None:
    """Reject candidates whose mean pixel value over an epoch differs from that of the others."""
    means = {}
    for result in results:
        if result.rounds and "mean_pixel" in result.rounds[0]:
            means[id(result)] = sum(result.figures("mean_pixel")) / len(result.rounds)
    if not means:
        return
    middle = sorted(means.values())[len(means) // 2]
    # The means of different random crops of one image differ by about 15 levels.
    allowed = 0.75 + 4 * 15 / num_samples**0.5
    for result in results:
        if id(result) in means and abs(means[id(result)] - middle) > allowed:
            result.problem = f"its mean pixel value is {means[id(result)]:.2f}, but that of the others is {middle:.2f}"
