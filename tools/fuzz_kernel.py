"""Make the kernel read damaged files, and check that it accesses no memory but its own.

By default, the shared object that users load runs with inaccessible pages around all arrays that it gets.
``--sanitize address`` compiles the kernel with clang's AddressSanitizer and UndefinedBehaviorSanitizer, which also
check the arrays that the kernel allocates. ``--sanitize undefined`` needs only ziglang.

A separate process renders crops of each file, tiles some of the files, and edits images of noise. If the process ends
early, the tool names the responsible file. ``fuzz_images.py`` checks the pixels.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass, field, replace
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # The tests are not installed.

from shardio.images import DecodedCache, tiling
from shardio.images.netpbm import find_pixels
from shardio.kernel import operations as codes
from shardio.kernel.functions import Content, Kept, Kernel, StoredPixels
from shardio.kernel.records import OPERATION, PLAN
from shardio.kernel.targets import find_targets
from tests.images.fuzz_laws import make_damaged_file
from tests.images.mutations import Originals, find_frame, write_originals
from tests.images.tiled_laws import render_by_stages
from tools.guard_pages import GuardedMemory
from tools.guarded_kernel import GuardedFunctions, HeapMemory, Sanitizer, build_sanitized, find_compiler

CHUNK = 4
"""The number of files that one call of the kernel renders, in rows of equal size. With more files, a smaller share of
them would lie next to the inaccessible pages.
"""

OTHERS_SHARE = 0.05
"""The fraction of files on which the kernel's other, slower functions are also called."""

KEPT_SHARE = 0.2
"""The fraction of calls that keep decoded images and render them again."""

CACHE_BYTES = 1 << 24
"""The size, in bytes, of the cache for decoded images."""

UNDAMAGED_SHARE = 0.2
"""The fraction of files that are not damaged. Most damaged files are not rendered."""

LIMIT_S = 60
"""The time limit for a chunk, in seconds. A chunk that exceeds this limit ends the process."""

UNTOUCHED = 77
"""The value of all bytes in the rows before the kernel writes to them."""

SEED_HEAD_BYTES = 23
"""HEAD_BYTES of fuzz_kernel.c."""

_FILE = TemporaryFile()  # noqa: SIM115  # The process's end removes the file.

PROBLEM = 1
"""The process's exit code if pixels are wrong, or if a row of an image that was not rendered has changed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The task of a process, and its progress.

    Attributes:
        path: The kernel's shared object.
        options: The command-line options that select the shared object.
        sanitizer: The sanitizer that the shared object was compiled with, or None.
        seed: The campaign's seed.
        files: The indices of the files.
        num_at_once: The number of files per call.
        begun: The first file of the last call.
        num_rendered: The number of rendered files.
        num_tiled: The number of tiled files.
        num_staged: The number of files that the stages of a device decoded.
    """

    path: Path
    options: str
    sanitizer: Sanitizer | None
    seed: int
    files: range
    num_at_once: int = CHUNK
    begun: Any = field(default_factory=lambda: RawValue(c_int64, -1))
    num_rendered: Any = field(default_factory=lambda: RawValue(c_int64, 0))
    num_tiled: Any = field(default_factory=lambda: RawValue(c_int64, 0))
    num_staged: Any = field(default_factory=lambda: RawValue(c_int64, 0))

    def calls(self) -> Iterator[range]:
        """Yield the files of each call. Files from different chunks never share a call: their rows differ in size."""
        start = self.files.start
        while start < self.files.stop:
            stop = min(start + self.num_at_once, (start // CHUNK + 1) * CHUNK, self.files.stop)
            yield range(start, stop)
            start = stop


def run(job: Job) -> None:
    """Run a job in this process. End the process at the first error."""
    if job.sanitizer is not Sanitizer.ADDRESS:  # AddressSanitizer reports where in the C code an error occurred.
        faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    functions = GuardedFunctions(job.path, HeapMemory if job.sanitizer is Sanitizer.ADDRESS else GuardedMemory)
    kernel, cache = Kernel(functions), DecodedCache(CACHE_BYTES, uuid.uuid4().hex)
    with patch.multiple(tiling, scratch=functions.scratch, require_functions=lambda: functions):
        originals = write_originals()
        for files in job.calls():
            job.begun.value = files.start
            signal.alarm(LIMIT_S)  # SIGALRM ends the process, even while the kernel runs.
            functions.at_end = files.start // CHUNK % 2 == 0
            made = [_make_file((job.seed << 32) + file, originals) for file in files]
            contents, generators = [content for content, _ in made], [rng for _, rng in made]
            rng = random.Random((job.seed << 32) + files.start // CHUNK)
            if cache.num_used_bytes > cache.num_bytes // 2:
                cache = DecodedCache(CACHE_BYTES, uuid.uuid4().hex)
            chosen = cache if rng.random() < KEPT_SHARE else None
            is_done, is_staged = _render(functions, kernel, contents, generators, rng, chosen)
            job.num_rendered.value += int(is_done.sum())
            job.num_staged.value += int(is_staged.sum())
            for content, rng in zip(contents, generators, strict=True):
                if rng.random() < OTHERS_SHARE:
                    job.num_tiled.value += _tile(content, rng)
                    _edit(functions, np.random.default_rng(rng.getrandbits(64)))
    signal.alarm(0)


def _make_file(seed: int, originals: Originals) -> tuple[bytes, random.Random]:
    """Return a file, which is usually damaged, and a random number generator."""
    content, (original, _), rng = make_damaged_file(seed, originals)
    return (original.content if rng.random() < UNDAMAGED_SHARE else content), rng


def _render(
    functions: GuardedFunctions,
    kernel: Kernel,
    contents: list[bytes],
    generators: list[random.Random],
    rng: random.Random,
    cache: DecodedCache | None,
) -> tuple[Any, Any]:
    """Render crops of files, and keep the images in a cache if one is given.

    Returns: Which files were rendered, and which of these were also rendered by the stages of a device.
    """
    (height, width), num_crops = rng.choices(range(1, 80), k=2), rng.choice((1, 1, 3))
    plans = [
        _make_plan(content, own) for content, own in zip(contents, generators, strict=True) for _ in range(num_crops)
    ]
    turns = [own.choice((0, own.randrange(8))) for own in generators]
    order = rng.sample(range(len(contents)), len(contents))
    rows = np.full((len(plans), height, width, 3), UNTOUCHED, np.uint8)
    images: list[Content] = [
        _find_pixels(content, own) or content for content, own in zip(contents, generators, strict=True)
    ]
    records, orders, turned = np.array(plans, PLAN), np.array(order), np.array(turns, np.uint8)
    if cache is not None:
        keys = [rng.getrandbits(64) | 1 for _ in images]
        images = [
            Kept(image, key, cache.address, cache.file) if isinstance(image, bytes) else image
            for image, key in zip(images, keys, strict=True)
        ]
    is_done = kernel.decode(images, records, orders, rows, turned)
    if cache is not None:
        kept = [cache.find(key) for key in keys]
        again = [Kept(None, kept=found.address) if found else image for found, image in zip(kept, images, strict=True)]
        same = np.full_like(rows, UNTOUCHED)
        if (kernel.decode(again, records, orders, same, turned) != is_done).any() or (same != rows).any():
            print("kept images have different pixels", file=sys.stderr)
            sys.exit(PROBLEM)
    if (rows.reshape(len(contents), -1)[~is_done] != UNTOUCHED).any():
        print("rows of images that were not rendered have changed", file=sys.stderr)
        sys.exit(PROBLEM)
    is_staged = np.zeros_like(is_done)
    if cache is None:
        is_staged, crops, is_damaged = render_by_stages(functions, kernel, images, records, turned, rows.shape)
        is_equal = (crops == rows).reshape(len(images), -1).all(axis=1)
        if (is_staged & ((is_damaged == is_done) | (is_done & ~is_equal))).any():
            print("the stages of a device render different pixels", file=sys.stderr)
            sys.exit(PROBLEM)
    return is_done, is_staged


def _find_pixels(content: bytes, rng: random.Random) -> StoredPixels | None:
    """Return the pixels of a PPM, in memory or in a file that may be too short."""
    if (layout := find_pixels(content)) is None:
        return None
    if rng.random() < 0.5:
        return StoredPixels(content, None, *layout[:4])
    _FILE.seek(0)
    _FILE.truncate(0)
    _FILE.write(content[: rng.choice((len(content), rng.randrange(len(content))))])
    _FILE.flush()
    return StoredPixels(None, _FILE.fileno(), *layout[:4])


def _make_plan(content: bytes, rng: random.Random) -> tuple[int, ...]:
    """Return a plan for a part that usually lies within the image."""
    if (layout := find_pixels(content)) is not None:
        sides = [layout.height, layout.width]
    else:
        frame = find_frame(content) + 5
        sides = [int.from_bytes(content[at : at + 2], "big") for at in (frame, frame + 2)]
    if rng.random() < 0.2:
        corner, box = [0, 0], sides
    elif rng.random() < 0.15:
        corner, box = [rng.randint(-1, 60) for _ in sides], [rng.randint(0, 90) for _ in sides]
    else:
        corner = [rng.randrange(max(side, 1)) for side in sides]
        box = [rng.randint(1, max(1, min(side - first, 90))) for side, first in zip(sides, corner, strict=True)]
    longest = 1_100_000 if rng.random() < 0.05 else 120  # The kernel refuses sides longer than 2^20.
    after = box if rng.random() < 0.3 else [rng.choice((rng.randint(1, longest), rng.randint(1, 3))) for _ in sides]
    window = [0, 0] if rng.random() < 0.5 else [rng.randint(-30, side) for side in after]
    return (*corner, *box, *after, *window, rng.randrange(2), rng.randrange(4))


def _tile(content: bytes, rng: random.Random) -> bool:
    """Tile a file, and write it with a random restart interval. Return whether the file could be tiled."""
    with suppress(tiling.NotTileable):
        tiled = tiling.tile_jpeg(content)
        tiling._transcode(content, tiling._read_head(content), rng.choice((0, 1, 2, 7)))
        return tiling.untile_jpeg(tiled) != tiled
    return False


STRANGE_NUMBERS = (0, 1, -1, 0.5, 255, 256, 1e5, -1e5, 1e10, -1e10, 1e300, math.inf, -math.inf, math.nan)


def _edit(functions: GuardedFunctions, random: np.random.Generator) -> None:
    """Apply operations with unusual parameters to images, normalize one image, and make a Huffman table."""
    shapes = random.integers(1, random.choice([5, 70], 2), (2, 2)).tolist()
    images = [random.integers(0, 256, (*shape, 3)).astype(np.uint8) for shape in shapes]
    operations = np.zeros((2, random.integers(1, 12)), OPERATION)
    operations["code"] = random.integers(-1, 21, operations.shape)
    is_strange = random.random((*operations.shape, 12)) < random.choice([0.1, 0.5])
    ordinary = random.uniform(-2, 2, is_strange.shape) * random.choice([1, 40], is_strange.shape)
    operations["numbers"] = np.where(is_strange, random.choice(STRANGE_NUMBERS, is_strange.shape), ordinary)
    numbers, code = operations["numbers"], operations["code"]
    # Python checks blur radii, and the fill colors and interpolation methods of warps, so these are valid here.
    is_blur = code == codes.GAUSSIAN_BLUR
    numbers[is_blur, 0:3:2] = random.integers(0, 30, (is_blur.sum(), 2))
    is_moved = np.isin(code, list(codes.MOVING))
    numbers[is_moved, codes.FILL] = random.integers(0, 256, (is_moved.sum(), 3))
    numbers[is_moved, codes.INTERPOLATION] = random.choice([0, 2, 3], is_moved.sum())
    is_scaled = is_moved & (random.random(code.shape) < 0.5)
    numbers[is_scaled, 1] = numbers[is_scaled, 3] = 0
    functions.edit_images(images, operations)
    means, deviations = random.choice(STRANGE_NUMBERS[:7], (2, 3)).astype(np.float32)
    functions.normalize_image(images[0], means, deviations)
    functions.make_best_table(
        (2.0 ** random.uniform(0, 54, 256)).astype(np.int64) * (random.random(256) < random.random())
    )


def watch(job: Job, progress: Progress) -> str:
    """Run a job in a separate process. Return the error that ended the job, or an empty string."""
    process = multiprocessing.get_context("spawn").Process(target=run, args=(job,))
    environment = {}
    if job.sanitizer is Sanitizer.ADDRESS:
        environment = {"LD_PRELOAD": str(find_compiler()[1]), "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"}
    with patch.dict(os.environ, environment):
        process.start()
    task = progress.add_task("files", total=len(job.files))
    try:
        while process.is_alive():
            process.join(0.5)
            progress.update(task, completed=max(0, job.begun.value - job.files.start))
    finally:
        process.kill()
        process.join()
    code = process.exitcode or 0
    if code == -signal.SIGALRM:
        return f"a chunk took longer than {LIMIT_S} s"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}" if code else ""


def main(
    files: Annotated[int, typer.Option(min=1, help="Number of files.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Seed of the damage.")] = 0,
    start: Annotated[int, typer.Option(min=0, help="Index of the first file.")] = 0,
    target: Annotated[str | None, typer.Option(help="Name of the kind of processor. Default: the fastest.")] = None,
    sanitize: Annotated[Sanitizer | None, typer.Option(help="Compile the kernel with a sanitizer.")] = None,
    write_seeds: Annotated[Path | None, typer.Option(help="Only write files for fuzz_kernel.c to a folder.")] = None,
) -> None:
    """Render random crops of many damaged files, and call the kernel's other functions."""
    if write_seeds:
        _write_seeds(write_seeds)
        return
    targets = {each.name: each for each in find_targets()}
    chosen = targets.get(target or next(iter(targets), ""))
    if chosen is None:
        raise typer.BadParameter(f"this processor runs {', '.join(targets) or 'no target'}", param_hint="--target")
    if not (sanitize or chosen.path.exists()):
        sys.exit(f"{chosen.path} does not exist: run tools/build_kernel.py")
    with TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        path = build_sanitized(sanitize, chosen, Path(folder)) if sanitize else chosen.path
        options = f" --target {chosen.name}" + (f" --sanitize {sanitize.value}" if sanitize else "")
        began = time.monotonic()
        job = Job(path=path, options=options, sanitizer=sanitize, seed=seed, files=range(start, start + files))
        if end := watch(job, progress):
            sys.exit(_name_file(job, end, progress))
    elapsed_s = time.monotonic() - began
    print(
        f"{files:,} files with seed {seed} from {start} on{job.options}: no access outside the kernel's memory; "
        f"{job.num_rendered.value:,} were rendered, {job.num_staged.value:,} decoded by the stages of a device, and "
        f"{job.num_tiled.value:,} tiled; the run took {elapsed_s:.0f} s "
        f"({files / elapsed_s:,.0f} files/s)"
    )


def _write_seeds(folder: Path) -> None:
    """Write undamaged files for fuzz_kernel.c, each preceded by plans for the whole picture."""
    folder.mkdir()
    originals = write_originals()
    for i, original in enumerate([*originals.tiled, *originals.untouched]):
        (folder / str(i)).write_bytes(bytes(SEED_HEAD_BYTES) + original.content)


def _name_file(job: Job, end: str, progress: Progress) -> str:
    """Return a message that names the file or files that ended a job early."""
    files = next((call for call in job.calls() if call.start == job.begun.value), None)
    if files is None:
        return f"{end}, before the first file"
    alone = replace(job, files=files, num_at_once=1, begun=RawValue(c_int64, -1))
    end_alone = watch(alone, progress)
    first, count = (alone.begun.value, 1) if end_alone else (files.start, len(files))
    return (
        f"{end_alone or end}: seed {job.seed}, "
        + (f"file {first}" if end_alone else f"files {first} to {first + count - 1}, together")
        + f"; repeat with --seed {job.seed} --start {first} --files {count}{job.options}"
    )


if __name__ == "__main__":
    typer.run(main)
