"""Sources that change after they were scanned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardio import PackError
from shardio.packing import PackSettings, pack_source
from shardio.progress import WorkProgress


def assert_change_is_refused(source: Path, out: Path, change: Callable[[Path], object], message: str) -> None:
    """Change a source after its scan, and check that the pack is refused with a message, which is a pattern."""

    class Change(WorkProgress):
        def start(self, total: int, num_bytes: int | None = None) -> None:
            change(source)

    with pytest.raises(PackError, match=message):
        pack_source(source, out, PackSettings(max_shard_size=1 << 20), progress=Change())
