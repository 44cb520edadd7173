"""Kill worker processes, drop loaders and run many epochs, and check the batches and the use of resources.

``kills`` kills or stops a worker process at a random moment of each epoch, and compares the batches with those of a
loader without worker processes. ``leaks`` creates loaders, iterates over half of each one and drops it. ``epochs`` runs
many epochs and measures the memory of the process and its worker processes.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from torch.utils.data import default_collate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The script imports tests/, which is not installed.

import shardio
from shardio.libraries import import_library
from shardio.loader import chunk_pool as pool_module, fork_server
from shardio.loader.fork_server import end_kept
from shardio.transforms import Compose
from tests.buffers import find_buffers, find_fork_servers
from tests.faults.worker_processes import (
    CROP,
    KINDS,
    Batches,
    Data,
    Kind,
    batches_of,
    find_worker_processes,
    make_loader,
    send_signal,
)
from tests.files import find_open_files
from tests.sources import write_images
from tools.campaigns import INTERRUPTED, make_progress

PATIENCE_S = 0.3
"""The time in seconds after which a silent worker process is pinged, and then ended if it does not answer. The loader's
default would dominate the running time.
"""

STARTUP_PATIENCE_S = 10.0
"""Seconds to wait for a worker process that was stopped before it had started."""

LATEST_S = 0.8
"""The maximum time before a kill, in seconds: about one epoch, including the start of the worker processes."""

MAX_GROWTH = 1.05
"""The maximum ratio of the memory in the last epochs to that in the first. If one batch per epoch leaks, the ratio is
higher."""

PIPELINES = ("shardio", "a function", "Albumentations", "torchvision")
"""The transforms of the cases: shardio's own, and user code."""

Item = TypeVar("Item")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run over two epochs, in each of which a worker process or the fork server receives a signal."""

    kind: Kind
    num_workers: int
    batch_size: int
    persistent: bool
    signals: tuple[signal.Signals, ...]
    moments_s: tuple[float, ...]
    victims: tuple[int, ...]
    pipeline: str
    collates: bool


def make_pipeline(name: str) -> Any:
    """Return a transform: a crop by shardio, then user code. Libraries are imported only when needed."""
    if name == "shardio":
        return CROP
    if name == "Albumentations":
        import albumentations

        return albumentations.Compose(
            [albumentations.RandomResizedCrop((48, 48)), albumentations.HorizontalFlip(), albumentations.ColorJitter()]
        )
    if name == "torchvision":
        v2 = import_library("torchvision.transforms.v2")
        return v2.Compose([v2.RandomResizedCrop(48), v2.ColorJitter(0.4, 0.4), v2.RandomHorizontalFlip()])
    return Compose([CROP, lambda image: (image * random.random() + np.random.rand()).astype(np.float32)])


def darken(samples: list[Any]) -> Any:
    """Collate a batch, and make its images darker by a random factor."""
    images, *others = default_collate(samples)
    return [images * np.random.rand(), *others]


def draw_case(seed: int, *, with_others: bool = False) -> Case:
    """Return the case for a seed."""
    rng = random.Random(seed)
    return Case(
        kind=rng.choice(KINDS),
        num_workers=rng.randint(1, 6),
        batch_size=rng.choice((1, 4, 8, 17, 64)),
        persistent=rng.random() < 0.5,
        signals=(rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)), signal.SIGKILL),
        moments_s=(rng.uniform(0, LATEST_S), rng.uniform(0, LATEST_S)),
        victims=(rng.randrange(60), rng.randrange(60)),
        pipeline=rng.choice(PIPELINES) if with_others else "shardio",
        collates=with_others and rng.random() < 0.5,
    )


def run_case(data: Data, case: Case) -> tuple[str | None, Counter[str]]:
    """Return the failure of a case, or None, and the signals that were sent."""
    sent = Counter[str]()
    options: dict[str, Any] = {"batch_size": case.batch_size, "transform": make_pipeline(case.pipeline)}
    if case.collates:
        options["collate_fn"] = darken
    reference = make_loader(data, case.kind, **options)
    loader = make_loader(data, case.kind, case.num_workers, persistent_workers=case.persistent, **options)
    for signal_, moment_s, victim in zip(case.signals, case.moments_s, case.victims, strict=True):
        is_over = threading.Event()

        def disturb(signal_: signal.Signals, moment_s: float, victim: int, is_over: threading.Event) -> None:
            is_over.wait(moment_s)
            if victims := [*find_worker_processes(), *find_fork_servers()]:
                send_signal(victims[victim % len(victims)], signal_)
                sent[f"{signal_.name}{' after the epoch' if is_over.is_set() else ''}"] += 1

        thread = threading.Thread(target=disturb, args=(signal_, moment_s, victim, is_over))
        thread.start()
        try:
            batches = batches_of(loader)
        except Exception as error:  # Any error is a failure.
            return f"{type(error).__name__}: {error}", sent
        finally:
            is_over.set()
            thread.join()
        if wrong := _compare(batches, batches_of(reference)):
            return wrong, sent
    del loader
    end_kept()
    left = [*find_worker_processes(), *find_fork_servers()]
    return (f"processes {left} are still running" if left else None), sent


def _compare(batches: Batches, expected: Batches) -> str | None:
    if batches == expected:
        return None
    wrong = [i for i, (batch, other) in enumerate(zip(batches, expected, strict=False)) if batch != other]
    return f"{len(batches)} batches, expected {len(expected)}; these differ: {wrong}"


@contextmanager
def dataset(per_class: int, side: int) -> Iterator[Data]:
    """Create images and pack them; yield the locations of the images and of the shards."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root / "images", per_class=per_class, width=side, height=side)
        shardio.pack(root / "images", root / "shards", max_shard_samples=23)
        yield Data(images=root / "images", shards=root / "shards")


def track(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield items and show the progress on standard error."""
    with make_progress(what) as progress:
        yield from progress.track(items, total=total)


@app.command()
def kills(
    runs: Annotated[int, typer.Option(min=1, help="Number of runs.")] = 100,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of the campaign, which selects the runs.")] = 0,
    only: Annotated[int | None, typer.Option(min=0, help="Run only the case with this seed.")] = None,
    others: Annotated[bool, typer.Option(help="Also use user-defined transforms and a collate_fn.")] = False,
) -> None:
    """Kill or stop worker processes or fork servers at random moments, and check that all batches are unchanged."""
    warnings.filterwarnings("ignore", message="worker process|fork server")  # Worker processes are expected to die.
    pool_module.PATIENCE_S = fork_server.EXIT_S = PATIENCE_S
    pool_module.STARTUP_PATIENCE_S = STARTUP_PATIENCE_S
    seeds = range(seed << 32, (seed << 32) + runs) if only is None else range(only, only + 1)
    num_sent, started = Counter[str](), time.perf_counter()
    with dataset(per_class=80, side=320) as data:
        for case_seed in track(seeds, len(seeds), "runs"):
            case = draw_case(case_seed, with_others=others)
            wrong, sent = run_case(data, case)
            num_sent += sent
            if wrong is not None:
                typer.echo(
                    f"{wrong}\n{case}\nTo rerun only this case: tools/loader_campaign.py kills --only {case_seed}"
                    f"{' --others' if others else ''}"
                )
                raise typer.Exit(1)
    signals = ", ".join(f"{num_signals} {name}" for name, num_signals in sorted(num_sent.items()))
    typer.echo(
        f"in all {len(seeds)} runs with seed {seed}, both epochs had the same batches as without worker processes; the "
        f"runs took {time.perf_counter() - started:.0f} s ({signals or 'no signals were sent'})"
    )


@app.command()
def leaks(loaders: Annotated[int, typer.Option(min=1, help="Number of loaders.")] = 1000) -> None:
    """Create loaders, drop each one after half an epoch, and check that they leave nothing behind."""
    started = time.perf_counter()
    with dataset(per_class=16, side=64) as data:
        batches_of(make_loader(data, num_workers=1))  # Start the threads and processes that torch starts only once.
        gc.collect()
        before, peak = _count_resources(), Counter[str]()
        for i in track(range(loaders), loaders, "loaders"):
            options = {"persistent_workers": i % 2 == 0, "on_error": ("raise", "skip")[i // 2 % 2]}
            loader = make_loader(data, KINDS[i % 3], 1 + i % 2, **options)
            kept = list(islice(iterator := iter(loader), len(loader) // 2))
            peak |= Counter(_count_resources())
            del loader, iterator, kept
            if (left := _count_resources())["processes"] or left["buffers"]:
                typer.echo(f"after loader {i + 1}: {_describe(left)}, expected {_describe(before)}")
                raise typer.Exit(1)
        gc.collect()
        after = _count_resources()
    if after != before:
        typer.echo(f"after {loaders} loaders: {_describe(after)}, expected {_describe(before)}")
        raise typer.Exit(1)
    typer.echo(
        f"in {time.perf_counter() - started:.0f} s, {loaders} loaders, each dropped after half an epoch, left nothing "
        f"behind: {_describe(after)}, as before; at most {_describe(peak)} at any time"
    )


def _count_resources() -> dict[str, int]:
    return {
        "processes": len(find_fork_servers()) + len(find_worker_processes()),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(find_open_files()),
        "buffers": len(find_buffers()),
    }


def _describe(resources: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{num_resources} {name}" for name, num_resources in resources.items())


@app.command()
def epochs(
    epochs: Annotated[int, typer.Option(min=8, help="Number of epochs.")] = 50,
    num_workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 2,
    persistent: Annotated[bool, typer.Option(help="Keep worker processes between epochs.")] = True,
) -> None:
    """Run many epochs, and check that the memory of the process and its worker processes does not grow."""
    started, sizes_mb = time.perf_counter(), list[float]()
    with dataset(per_class=200, side=160) as data:
        loader = make_loader(data, "shards", num_workers, batch_size=32, persistent_workers=persistent)
        for _ in track(range(epochs), epochs, "epochs"):
            for i, _batch in enumerate(loader):
                if i == len(loader) // 2:
                    sizes_mb.append(sum(map(_pss_mb, [os.getpid(), *find_fork_servers(), *find_worker_processes()])))
    quarter = max(epochs // 4, 1)
    # The first epoch fills caches, so it does not count.
    first, last = median(sizes_mb[1 : 1 + quarter]), median(sizes_mb[-quarter:])
    result = (
        f"{epochs} epochs of 600 samples in {time.perf_counter() - started:.0f} s: PSS of the process and its worker "
        f"processes {sizes_mb[0]:.1f} MB in the first epoch, {sizes_mb[-1]:.1f} MB in the last; medians {first:.1f} MB "
        f"in the first quarter and {last:.1f} MB in the last"
    )
    typer.echo(result if last <= MAX_GROWTH * first else f"memory grows: {result}")
    raise typer.Exit(0 if last <= MAX_GROWTH * first else 1)


def _pss_mb(process_id: int) -> float:
    """Return a process's proportional set size, in which memory shared by n processes counts as 1/n."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    try:
        app(standalone_mode=False)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
