"""Many shards are read with fewer file descriptors than there are shards."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

import pytest

import shardio
from tests.processes import run_python
from tests.sources import encode

NUM_SHARDS = 300

SCRIPT = """
import json
import resource
import sys

import shardio


def main(packed, how):
    # Before anything is read, and inherited by the workers.
    resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
    options = {"fields": "key", "shuffle": True, "lanes": 7, "window": 300, "remainder": "keep"}
    if how == "in sequence":
        samples = shardio.ShardDataset(packed, fields=("key", "image"))
        shuffled = shardio.ShardDataset(packed, **options)
        numbered = shardio.ShardMapDataset(packed, fields="key")
        keys = {
            "unshuffled": [key for key, image in samples if image.shape == (3, 4, 4)],
            "shuffled": list(shuffled),
            "again, before another has ended": [pair[0] for pair in zip(shuffled, iter(shuffled))],
            "by number": [numbered[number] for number in range(len(numbered))],
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
    """A sample a shard."""
    root = tmp_path_factory.mktemp("many")
    folder = root / "source" / "class"
    folder.mkdir(parents=True)
    image = encode(0, width=4, height=4)
    for number in range(NUM_SHARDS):
        (folder / f"{number:03d}.jpg").write_bytes(image)
    manifest = shardio.pack(root / "source", root / "out", max_shard_samples=1)
    assert len(manifest.shards) == NUM_SHARDS
    (root / "read.py").write_text(SCRIPT)
    return root


@pytest.mark.parametrize("how", ["in sequence", "by workers"])
def test_more_shards_are_read_than_there_are_descriptors(how: str, many: Path) -> None:
    done = run_python(many / "read.py", many / "out", how, prepare=partial(warnings.simplefilter, "error"))
    assert done.returncode == 0, done.stderr
    expected = [f"class/{number:03d}" for number in range(NUM_SHARDS)]
    for name, keys in json.loads(done.stdout).items():
        assert sorted(keys) == expected, name
