"""A cache whose folder cannot be used, or whose disk is full, is an error that names the folder and a remedy."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from shardio import ShardDataset
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, write_manifest, write_shard
from shardio.storage import parse_location

FILL_AND_READ = """
import sys
from errno import ENOSPC
from pathlib import Path

import shardio
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, write_manifest, write_shard
from shardio.storage import parse_location

data, disk, num_free = parse_location("memory://x/data"), Path(sys.argv[1]), int(sys.argv[2])
samples = [Sample(key=str(i), fields={"txt": b"x" * 2000}, origin="") for i in range(100)]
write_manifest(data / MANIFEST_NAME, Manifest(shards=(write_shard(data / "a.tar", samples)[0],), fields=("txt",)))
(disk / "other").write_bytes(bytes(2**20 - 4096 - num_free))
try:
    for _ in shardio.DataLoader(shardio.ShardDataset(str(data), fields=("txt",), cache=disk, cache_size="100MB")):
        pass
except OSError as error:
    assert error.errno == ENOSPC, error
    print(error)
"""


@pytest.mark.parametrize("num_free", [0, 4096, 8192, 16384, 57344])
def test_a_full_disk_is_named_whatever_is_written(tmp_path: Path, num_free: int) -> None:
    script = 'mount -t tmpfs -o size=1m,mode=700 none "$0" && "$@"'
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(tmp_path)]
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system does not let users mount file systems")
    fill = [*mount, sys.executable, "-c", FILL_AND_READ, str(tmp_path), str(num_free)]
    found = subprocess.check_output(fill, text=True)
    remedy = "Free some space, set cache_size, or set cache to a folder on another disk"
    assert found == f"[Errno 28] No space left on device: cannot write to the cache {tmp_path}. {remedy}\n"


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_folder_that_cannot_be_a_cache_is_not_an_error_of_the_manifest(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = parse_location(f"memory://{uuid.uuid4().hex}/data")
    entry, _ = write_shard(folder / "a.tar", [Sample(key="0", fields={"txt": b"0"}, origin="")])
    write_manifest(folder / MANIFEST_NAME, Manifest(shards=(entry,), fields=("txt",)))
    with pytest.raises(
        OSError, match=rf"cannot write to the cache {tmp_path / name}\. Set cache to a folder"
    ) as caught:
        ShardDataset(str(folder), fields=("txt",), cache=tmp_path / name)
    assert "manifest" not in str(caught.value)
