"""Many shards need fewer file descriptors than there are shards."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

import pytest

import shardio
from tests.processes import run_python
from tests.sources import encode

NUM_SHARDS = 200

SCRIPT = """
import json
import resource
import sys

import shardio


def main(packed, how):
    # The workers inherit the limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    options = {"fields": "key", "shuffle": True, "lanes": 7, "window": 300, "remainder": "keep"}
    if how == "in sequence":
        samples = shardio.ShardDataset(packed, fields=("key", "image"))
        shuffled = shardio.ShardDataset(packed, **options)
        by_index = shardio.ShardMapDataset(packed, fields="key")
        keys = {
            "unshuffled": [key for key, image in samples if image.shape == (3, 4, 4)],
            "shuffled": list(shuffled),
            "two iterators in turns": [pair[0] for pair in zip(shuffled, iter(shuffled))],
            "by index": [by_index[index] for index in range(len(by_index))],
        }
    else:
        loader = shardio.DataLoader(shardio.ShardDataset(packed, **options), batch_size=16, num_workers=2)
        keys = {"loader": [key for batch in loader for key in batch]}
    json.dump(keys, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset that has one sample per shard."""
    root = tmp_path_factory.mktemp("many")
    folder = root / "source" / "class"
    folder.mkdir(parents=True)
    image = encode(0, width=4, height=4)
    for i in range(NUM_SHARDS):
        (folder / f"{i:03d}.jpg").write_bytes(image)
    manifest = shardio.pack(root / "source", root / "out", max_shard_samples=1)
    assert len(manifest.shards) == NUM_SHARDS
    (root / "read.py").write_text(SCRIPT)
    return root


@pytest.mark.parametrize("how", ["in sequence", "by workers"])
def test_more_shards_than_descriptors_are_read(how: str, many: Path) -> None:
    done = run_python(many / "read.py", many / "out", how, prepare=partial(warnings.simplefilter, "error"))
    assert done.returncode == 0, done.stderr
    expected = [f"class/{i:03d}" for i in range(NUM_SHARDS)]
    for name, keys in json.loads(done.stdout).items():
        assert sorted(keys) == expected, name
