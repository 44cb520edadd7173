"""Prepare and open photographs on disk: shards for shardio's loader, files for torch's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.device.feeds import Planes, Source
from benchmarks.loaders.data import copy_images
from benchmarks.loaders.job import Job

ROOT = Path(__file__).parents[2]
NEEDED = ["braceexpand", "cv2", "filelock", "PIL", "platformdirs", "pydantic", "simplejpeg", "typer", "xxhash"]
"""The modules that are needed to pack or decode the photographs."""


def find_missing() -> list[str]:
    """Return the names in NEEDED that are not installed."""
    return [module for module in NEEDED if importlib.util.find_spec(module) is None]


def make_photographs(folder: Path, *, num_classes: int, per_class: int) -> Path:
    """Create synthetic photographs in class folders; return the folder."""
    command = [sys.executable, "-m", "tools.make_images", str(folder)]
    command += ["--classes", str(num_classes), "--per-class", str(per_class)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def pack_photographs(images: Path, work: Path, num_samples: int) -> str:
    """Copy photographs to ``work/folder``, repeated as needed, and pack them in ``work/packed``; return the format."""
    import shardio

    copy_images(images, work, num_samples)
    # This gives enough shards to keep all packing threads busy.
    max_samples = max(1, num_samples // 32)
    shardio.pack(work / "folder", work / "packed", jpeg="tile", max_shard_samples=max_samples)
    return "tiled JPEGs"


def open_photographs(work: Path, batch_size: int, num_workers: int, device: torch.device) -> Source:
    """Return shardio's loader over shards and torch's over files (with OpenCV); both crop and flip at random."""
    from benchmarks.loaders.crops import use_one_thread, use_opencv
    from benchmarks.loaders.from_shardio import make_shards
    from benchmarks.loaders.peers_torch import Files

    files = Files(work / "folder", "train", use_opencv)
    job = Job(data=work / "packed", num_samples=len(files), batch_size=batch_size, num_workers=num_workers)
    theirs = torch.utils.data.DataLoader(
        files,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        worker_init_fn=use_one_thread,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    return Source(name="photographs", for_shardio=make_shards(job), for_others=Planes(theirs), decodes=True)
