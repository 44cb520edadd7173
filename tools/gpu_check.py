"""Run everything that needs a GPU, in stages, and write the results to one folder: see tools/gpu_check.sh.

Each stage has its own time limit. If a stage fails, the next one still runs. The most valuable stages come first.
Output is printed as it arrives. The folder contains ``stages.json`` (the results), ``summary.md`` (one page),
``log.txt`` (all output) and the files that the stages write. A second call with the same folder adds its stages to the
results, so stages can be spread over several calls. Without ``--stage``, a call runs the stages that fit into seven
minutes.

This script imports only the standard library, because packages may be missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUDGET_S = 7 * 60.0
"""The time for a call, unless ``--budget`` sets a different time."""

FIRST_CALL = ("facts", "tests", "tiles", "memory")
"""The stages that run if the command line names none."""

END_S = 5.0
"""The time, in seconds, that a stage has after its time limit to end by itself before it is killed."""

CUDA_TESTS = (
    "tests/device/test_cuda.py",
    "tests/device/test_tiles.py",
    "tests/device/test_mixing.py",
    "tests/train/test_cuda.py",
)
"""The files with tests that need CUDA. Other tests may import packages that machines with a GPU lack."""

RESULTS = "RESULTS"
"""The placeholder in a stage's command for the directory to which the stage writes JSON files."""

NUM_LINES = 40
"""The number of lines from the end of a stage's output that the page shows."""

NUM_REASON_LINES = 10
"""The number of lines printed, after all stages, from the end of a failed stage's output."""

LOOK_S = 0.2
"""The interval at which the output of a stage is read, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage.

    Attributes:
        name: The stage's name.
        what: A description of the stage's results.
        command: The stage's command, with ``RESULTS`` for the directory of the JSON files that it writes.
        share: The stage's share of the budget, relative to the shares of the other stages of the call.
        program: A program that the stage needs. If the program is not installed, the stage is left out.
    """

    name: str
    what: str
    command: Sequence[str]
    share: float
    program: str = ""


def list_stages(device: str) -> list[Stage]:
    """Return the stages, the most valuable first."""
    python = sys.executable
    facts = [python, "-m", "tools.gpu_facts", "--device", device, "--results", RESULTS]
    bench = [
        python,
        "-m",
        "benchmarks.bench_device",
        "--device",
        device,
        "--rounds",
        "3",
        "--results",
        RESULTS,
        "--source",
    ]
    tiles = [python, "-m", "benchmarks.bench_tiles", "--device", device, "--results", RESULTS]
    tests = [python, "-m", "pytest", "-v", "-rA", "--continue-on-collection-errors", "--timeout", "90"]
    sanitizer, short = ["compute-sanitizer", "--error-exitcode", "3"], ["--only", "crossing", "--only", "tiles"]
    return [
        Stage(name="facts", what="Transfers, pinning and stalls: see tools/gpu_facts.py", command=facts, share=120),
        Stage(
            name="tests",
            what="The tests that need CUDA",
            command=[*tests, "-m", "cuda", "-p", "no:cacheprovider", *CUDA_TESTS],
            share=180,
        ),
        Stage(name="tiles", what="Decoding tiles on the device", command=tiles, share=120),
        Stage(name="memory", what="Transfers without decoding", command=[*bench, "memory"], share=120),
        Stage(name="photographs", what="Training on photographs", command=[*bench, "photographs"], share=180),
        Stage(
            name="sanitizer",
            what="Memory errors in a short loop, found by NVIDIA's compute-sanitizer",
            # Without torch's own memory cache, an access beyond an array is outside the array's allocation.
            command=["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *sanitizer, *facts, *short],
            share=60,
            program="compute-sanitizer",
        ),
    ]


def run_stages(
    stages: Sequence[Stage], out: Path, budget_s: float, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run stages in order, write the results after each one, and return them.

    Args:
        stages: The stages.
        out: The folder for the results. Existing results of other stages are kept.
        budget_s: The time limit for all stages together, in seconds.
        environment: Additional environment variables.
    """
    out.mkdir(parents=True, exist_ok=True)
    ends_at, found = time.monotonic() + budget_s, list[dict[str, Any]]()
    for number, stage in enumerate(stages):
        left_s = ends_at - time.monotonic()
        limit_s = left_s * stage.share / sum(later.share for later in stages[number:]) - END_S
        print(f"===== {stage.name}: {stage.what}, at most {max(limit_s, 0):.0f} s", flush=True)
        result = {"name": stage.name, "what": stage.what, "command": " ".join(stage.command)}
        if stage.program and shutil.which(stage.program) is None:
            result |= {"status": f"left out: {stage.program} is not installed"}
        elif limit_s < 1:
            result |= {"status": "not started: the budget was used up"}
        else:
            result |= _run_stage(stage, out, limit_s, environment or {})
        print(f"===== {stage.name}: {result['status']}", flush=True)
        found.append(result)
        _write_results(out, found)
    for result in found:
        print(f"{result['name']}: {result['status']}")
        if not is_fine(result):
            print(*(f"    {line}" for line in result.get("tail", ())[-NUM_REASON_LINES:]), sep="\n")
    return found


def is_fine(result: dict[str, Any]) -> bool:
    """Return whether a stage passed or was left out."""
    status: str = result["status"]
    return status == "passed" or status.startswith("left out")


def _run_stage(stage: Stage, out: Path, limit_s: float, environment: dict[str, str]) -> dict[str, Any]:
    began, log, results = time.monotonic(), out / "log.txt", out / stage.name
    results.mkdir(exist_ok=True)
    with log.open("ab") as file:
        file.write(f"\n===== {stage.name}: {' '.join(stage.command)}\n".encode())
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            [str(results) if part == RESULTS else part for part in stage.command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
        try:
            status = _follow(process, log, start, began + limit_s) or f"timed out after {limit_s:.0f} s"
        finally:
            _end_group(process)
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    return {
        "status": status,
        "wall_s": round(time.monotonic() - began, 1),
        "limit_s": round(limit_s, 1),
        "results": {path.name: _read_json(path) for path in sorted(results.glob("*.json"))},
        "tail": lines[-NUM_LINES:],
    }


def _follow(process: subprocess.Popen[bytes], log: Path, start: int, ends_at: float) -> str | None:
    """Until a process ends, print the output that it adds to the log.

    Return the outcome of the process, or None after a timeout.
    """
    with log.open("rb") as output:
        output.seek(start)
        while True:
            code, is_late = process.poll(), time.monotonic() > ends_at
            sys.stdout.write(output.read().decode(errors="replace"))
            sys.stdout.flush()
            if code is not None:
                return "passed" if code == 0 else f"failed with exit code {code}"
            if is_late:
                return None
            time.sleep(LOOK_S)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # A terminated stage may have written only part of the file.
        return f"not JSON: {error}"


def _write_results(out: Path, found: Sequence[dict[str, Any]]) -> None:
    """Write the results of these stages, and those of other stages from earlier calls, as JSON and as a page."""
    path = out / "stages.json"
    earlier = json.loads(path.read_text())["stages"] if path.exists() else []
    names = [one["name"] for one in found]
    stages = [*(one for one in earlier if one["name"] not in names), *found]
    content = {"machine": platform.node(), "python": platform.python_version(), "stages": stages}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)
    lines = ["# Results on a GPU", "", "| stage | outcome | s | command |", "|---|---|---|---|"]
    lines += [f"| {one['name']} | {one['status']} | {one.get('wall_s', '')} | `{one['command']}` |" for one in stages]
    for one in stages:
        lines += ["", f"## {one['name']}: {one['what']}", "", "```text", *one.get("tail", ()), "```"]
    (out / "summary.md").write_text("\n".join(lines) + "\n")


def find_problem(device: str) -> str | None:
    """Return the reason why this Python cannot use the device, or None if it can."""
    if importlib.util.find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}: install a build of torch for CUDA with pip"
    if device == "cpu":
        return None
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA: install a build for the CUDA version that nvidia-smi "
            "shows; for 13.0: pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__}, for CUDA {torch.version.cuda}, finds no GPU: check that nvidia-smi shows one, "
            "that its driver supports that CUDA version, and that CUDA_VISIBLE_DEVICES does not hide it"
        )
    return None


def install_missing(wheels: Path, packages: Path) -> list[str]:
    """Install missing packages from wheels into a directory, and return their names.

    From shardio's wheel, only the compiled kernel is used, because the checkout has the rest.
    """
    searched = [*sys.path, str(packages)]
    installed = {name_of(found.name) for found in importlib.metadata.distributions(path=searched) if found.name}
    missing = list[Path]()
    for wheel in sorted(wheels.glob("*.whl")):
        name = name_of(wheel.name.partition("-")[0])
        if name == "shardio-loader":
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(ROOT, [each for each in archive.namelist() if "/kernel/built/" in each])
        elif name not in installed:
            missing.append(wheel)
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, *map(str, missing)], check=True)
    return [wheel.name.partition("-")[0] for wheel in missing]


def name_of(distribution: str) -> str:
    """Return a distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _read_minutes(text: str) -> float:
    """Convert a duration, such as 25m or 90s, to seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([ms])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be minutes or seconds, such as 25m or 90s, got {text!r}")
    return float(found[1]) * (60 if found[2] == "m" else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 if all stages passed."""
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="wheels from which to install missing packages")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-check"), help="folder for the results (default: gpu-check)"
    )
    parser.add_argument(
        "--budget", type=_read_minutes, default=BUDGET_S, help="time for all stages, such as 4m (default: 7m)"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial run")
    names = [stage.name for stage in list_stages("cpu")]
    parser.add_argument(
        "--stage", action="append", choices=names, help=f"run this stage; repeatable (default: {', '.join(FIRST_CALL)})"
    )
    given = parser.parse_args(arguments)
    ends_at = time.monotonic() + given.budget
    if (problem := find_problem(given.device)) is not None:
        print(problem, file=sys.stderr)
        return 1
    packages = Path(tempfile.gettempdir(), f"shardio-gpu-packages-{platform.python_version()}")
    if given.wheels is not None:
        installed = install_missing(given.wheels, packages)
        print(f"installed into {packages}: {', '.join(installed) or 'nothing'}", flush=True)
    paths = [str(ROOT), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    stages = [stage for stage in list_stages(given.device) if stage.name in (given.stage or FIRST_CALL)]
    found = run_stages(stages, given.out.resolve(), ends_at - time.monotonic(), {"PYTHONPATH": os.pathsep.join(paths)})
    print(f"the results are in {given.out}/summary.md and {given.out}/stages.json")
    return 0 if all(map(is_fine, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
