"""Truncating a dataset's file while it is read raises an error that names the file, and kills no process."""

from __future__ import annotations

import json
from pathlib import Path

from shardio.sample import Sample
from shardio.shards import write_shard
from shardio.storage import parse_location
from tests.processes import run_python

NUM_SAMPLES = 8000

SCRIPT = """
import json
import os
import sys

import torch.utils.data

import shardio


def read(make_loader, num_workers, path):
    content = open(path, "rb").read()
    keys = []
    try:
        for batch in make_loader(num_workers):
            keys += batch
            if len(keys) == 16:
                os.truncate(path, 1000)
    except shardio.ShardioError as error:
        return len(keys), type(error).__name__, str(error)
    finally:
        with open(path, "r+b") as file:
            file.write(content)


def load_with_ours(num_workers):
    dataset = shardio.ShardDataset(tar, fields=("key", "txt"))
    options = {"num_workers": num_workers, "timeout": 60 if num_workers else 0}
    return (keys for keys, _ in shardio.DataLoader(dataset, batch_size=16, **options))


def load_with_torchs(num_workers):
    dataset = shardio.ShardDataset(tar, fields=("key", "txt"), batch_size=16)
    return (keys for keys, _ in torch.utils.data.DataLoader(dataset, batch_size=16, num_workers=num_workers))


if __name__ == "__main__":
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # Torch waits so long for workers whose queue is gone.
    tar = sys.argv[1]
    found = {
        f"{path} {name} {num_workers}": read(make_loader, num_workers, path)
        for path in (tar + ".idx", tar)
        for name, make_loader in (("ours", load_with_ours), ("torch's", load_with_torchs))
        for num_workers in (0, 1)
    }
    json.dump(found, sys.stdout)
"""


def test_a_process_outlives_the_truncation_of_what_it_reads(tmp_path: Path) -> None:
    tar = tmp_path / "shard-000000.tar"
    samples = (Sample(key=f"{i:04d}", fields={"txt": b"%d" % i}, origin="") for i in range(NUM_SAMPLES))
    write_shard(parse_location(tar), samples)
    (tmp_path / "read.py").write_text(SCRIPT)
    done = run_python(tmp_path / "read.py", tar)
    assert done.returncode == 0, (done.returncode, done.stderr)
    found = json.loads(done.stdout)
    assert len(found) == 8
    for case, outcome in found.items():
        assert outcome is not None, case
        num_read, kind, message = outcome
        path = case.split()[0]
        assert 16 <= num_read < NUM_SAMPLES, case
        assert kind == ("FormatError" if path.endswith(".idx") else "SampleError"), (case, message)
        assert f"{path} ends at byte 1000" in message, (case, message)
