"""Kill hosts, drop loaders, run for many epochs: nothing is lost, repeated, left behind, or grows.

``kills`` runs epochs in which a host is killed or stopped at a random moment, and compares the batches with those of a
loader without hosts. ``leaks`` makes loaders, iterates over a half of each and drops it. ``epochs`` goes through many
epochs and reads from the system how much memory the process and its hosts take.
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
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are no installed package.

import shardio
from shardio.loader import hosts as hosts_module
from tests.faults.worker_processes import (
    KINDS,
    Batches,
    Data,
    Kind,
    batches_of,
    count_mapped_slots,
    count_threads,
    find_hosts,
    make_loader,
    send_signal,
)
from tests.files import count_open_files
from tests.sources import write_images

PATIENCE_S = 0.3
"""How long a host that was stopped is waited for, twice: the loader's own patience would take up most of the time."""

STARTUP_PATIENCE_S = 10.0
"""Likewise, for one that was stopped before it had started."""

LATEST_S = 0.8
"""When a host is killed at the latest: an epoch takes about as long, with the start of the hosts."""

MAX_GROWTH = 1.05
"""By how much the memory of the last epochs may exceed that of the first: a leak of a batch an epoch would be more."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

Item = TypeVar("Item")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run over two epochs, in each of which something happens to a host."""

    kind: Kind
    num_workers: int
    batch_size: int
    persistent: bool
    signals: tuple[signal.Signals, ...]
    moments_s: tuple[float, ...]
    victims: tuple[int, ...]


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    return Case(
        kind=draw.choice(KINDS),
        num_workers=draw.randint(1, 6),
        batch_size=draw.choice((1, 4, 8, 17, 64)),
        persistent=draw.random() < 0.5,
        signals=(draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)), signal.SIGKILL),
        moments_s=(draw.uniform(0, LATEST_S), draw.uniform(0, LATEST_S)),
        victims=(draw.randrange(60), draw.randrange(60)),
    )


def run_case(data: Data, case: Case) -> tuple[str | None, Counter[str]]:
    """Return what is wrong with a case, or None, and what was done to hosts."""
    done = Counter[str]()
    options = {"batch_size": case.batch_size}
    without = make_loader(data, case.kind, **options)
    loader = make_loader(data, case.kind, case.num_workers, persistent_workers=case.persistent, **options)
    for number, moment_s, victim in zip(case.signals, case.moments_s, case.victims, strict=True):
        is_over = threading.Event()

        def disturb(number: signal.Signals, moment_s: float, victim: int, is_over: threading.Event) -> None:
            is_over.wait(moment_s)
            if hosts := find_hosts():
                send_signal(hosts[victim % len(hosts)], number)
                done[f"{number.name}{' after the epoch' if is_over.is_set() else ''}"] += 1

        thread = threading.Thread(target=disturb, args=(number, moment_s, victim, is_over))
        thread.start()
        try:
            batches = batches_of(loader)
        except Exception as error:  # Any error is a failure of the case.
            return f"{type(error).__name__}: {error}", done
        finally:
            is_over.set()
            thread.join()
        if wrong := _compare(batches, batches_of(without)):
            return wrong, done
    del loader
    return (f"hosts {hosts} are left" if (hosts := find_hosts()) else None), done


def _compare(batches: Batches, expected: Batches) -> str | None:
    if batches == expected:
        return None
    wrong = [number for number, (one, other) in enumerate(zip(batches, expected, strict=False)) if one != other]
    return f"{len(batches)} batches instead of {len(expected)}, and of these differ {wrong}"


@contextmanager
def dataset(per_class: int, side: int) -> Iterator[Data]:
    """Make images, and shards of them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root / "images", per_class=per_class, width=side, height=side)
        shardio.pack(root / "images", root / "shards", max_shard_samples=23)
        yield Data(images=root / "images", shards=root / "shards")


def track(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield items, and show on stderr how many there were."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield from progress.track(items, total=total)


@app.command()
def kills(
    runs: Annotated[int, typer.Option(min=1, help="How many runs.")] = 100,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the campaign; others have other runs.")] = 0,
    only: Annotated[int | None, typer.Option(min=0, help="Run the case of this seed alone.")] = None,
) -> None:
    """Kill or stop a host at a random moment of each epoch: no batch is lost, repeated or another one."""
    warnings.filterwarnings("ignore", message="host process")  # That hosts die is no news here.
    hosts_module.PATIENCE_S = hosts_module.CLOSE_S = PATIENCE_S
    hosts_module.STARTUP_PATIENCE_S = STARTUP_PATIENCE_S
    seeds = range(seed << 32, (seed << 32) + runs) if only is None else range(only, only + 1)
    done, started = Counter[str](), time.perf_counter()
    with dataset(per_class=80, side=320) as data:
        for case_seed in track(seeds, len(seeds), "runs"):
            case = draw_case(case_seed)
            wrong, what = run_case(data, case)
            done += what
            if wrong is not None:
                typer.echo(f"{wrong}\n{case}\nRun it alone with: tools/loader_campaign.py kills --only {case_seed}")
                raise typer.Exit(1)
    said = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    typer.echo(
        f"all {len(seeds)} runs of seed {seed} gave the batches of two epochs as without hosts, none lost, repeated or "
        f"moved, in {time.perf_counter() - started:.0f} s: {said or 'nothing was killed'}"
    )


@app.command()
def leaks(loaders: Annotated[int, typer.Option(min=1, help="How many loaders.")] = 1000) -> None:
    """Make loaders, iterate over a half of each, drop it: nothing is left of them."""
    started = time.perf_counter()
    with dataset(per_class=16, side=64) as data:
        batches_of(make_loader(data, num_workers=1))  # What torch starts once is no loader's.
        gc.collect()
        before, most = _take_stock(), Counter[str]()
        for number in track(range(loaders), loaders, "loaders"):
            options = {"persistent_workers": number % 2 == 0, "on_error": ("raise", "skip")[number // 2 % 2]}
            loader = make_loader(data, KINDS[number % 3], 1 + number % 2, **options)
            kept = list(islice(iterator := iter(loader), len(loader) // 2))
            most |= Counter(_take_stock())
            del loader, iterator, kept
            if (left := _take_stock())["processes"] or left["slots"]:
                typer.echo(f"after loader {number + 1}: {_name(left)}, instead of {_name(before)}")
                raise typer.Exit(1)
        gc.collect()
        after = _take_stock()
    if after != before:
        typer.echo(f"after {loaders} loaders: {_name(after)}, instead of {_name(before)}")
        raise typer.Exit(1)
    typer.echo(
        f"{loaders} loaders, iterated over by half and dropped, left nothing in {time.perf_counter() - started:.0f} s: "
        f"{_name(after)}, as before them, and at most {_name(most)} meanwhile"
    )


def _take_stock() -> dict[str, int]:
    return {
        "processes": len(find_hosts()),
        "threads": count_threads(),
        "descriptors": count_open_files(),
        "slots": count_mapped_slots(),
    }


def _name(stock: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in stock.items())


@app.command()
def epochs(
    epochs: Annotated[int, typer.Option(min=8, help="How many epochs.")] = 50,
    num_workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 2,
    persistent: Annotated[bool, typer.Option(help="Whether the hosts outlive an epoch.")] = True,
) -> None:
    """Go through many epochs: the memory of the process and its hosts stays as it is."""
    started, sizes_mb = time.perf_counter(), list[float]()
    with dataset(per_class=200, side=160) as data:
        loader = make_loader(data, "shards", num_workers, batch_size=32, persistent_workers=persistent)
        for _ in track(range(epochs), epochs, "epochs"):
            for number, _batch in enumerate(loader):
                if number == len(loader) // 2:
                    sizes_mb.append(sum(map(_pss_mb, [os.getpid(), *find_hosts()])))
    quarter = max(epochs // 4, 1)
    # The very first epoch fills caches.
    first, last = median(sizes_mb[1 : 1 + quarter]), median(sizes_mb[-quarter:])
    said = (
        f"{epochs} epochs of 600 samples in {time.perf_counter() - started:.0f} s: PSS of the process and its hosts "
        f"{sizes_mb[0]:.1f} MB in the first, {sizes_mb[-1]:.1f} MB in the last; medians {first:.1f} MB in the first "
        f"quarter and {last:.1f} MB in the last"
    )
    typer.echo(said if last <= MAX_GROWTH * first else f"it grows: {said}")
    raise typer.Exit(0 if last <= MAX_GROWTH * first else 1)


def _pss_mb(process_id: int) -> float:
    """Return a process's proportional share of memory: what several have mapped counts once for all of them."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    try:
        app(standalone_mode=False)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
