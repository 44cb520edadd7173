"""A batch that is requested while Python ends arrives or raises an error at once: nothing waits or crashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit, builtins, sys, threading

def ask(when):
    for iterator in iterators:
        try:
            while True:
                next(iterator)
        except BaseException as error:
            print(when, type(error).__name__, flush=True)

class Last:
    def __del__(self):
        ask("__del__")

iterators = []
atexit.register(ask, "last handler")

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset
from shardio.transforms import CenterCrop

dataset = ShardMapDataset(sys.argv[1], transform=CenterCrop(32))
endless = DataLoader(ShardDataset(sys.argv[1], transform=CenterCrop(32)), batch_size=1)
begun = threading.Event()

def keep_asking():
    try:
        while True:
            for _ in endless:
                begun.set()
    except RuntimeError as error:
        print("thread", error, flush=True)

if __name__ == "__main__":
    for options in ({}, {"persistent_workers": True}, {"worker_init_fn": id}, {"num_workers": 0}):
        options = {"num_workers": 1, "prefetch_factor": 1, **options}
        options["prefetch_factor"] = options["prefetch_factor"] if options["num_workers"] else None
        iterators.append(iter(DataLoader(dataset, sampler=EpochSampler(dataset), batch_size=1, **options)))
    iterators.append(iter(DataLoader(dataset, shuffle=True, batch_size=1, num_workers=1)))
    iterators.append(iter(DevicePrefetcher(DataLoader(dataset, shuffle=True, batch_size=1, num_workers=1), "cpu")))
    for iterator in iterators:
        next(iterator)
    builtins.last = Last()
    threading.Thread(target=keep_asking, daemon=True).start()
    begun.wait()
"""


def test_no_thread_waits_for_a_batch_when_python_ends(packed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, script, packed], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert "thread Python is shutting down, so no batch can be made: read all batches before the program ends" in said
    assert [line for line in said if line.startswith("last handler")] == ["last handler RuntimeError"] * 6
    assert sum(line.startswith("__del__") for line in said) in (0, 6), "the interpreter may never call it"
