"""shardio's DataLoader takes the place of torch's, by name, in programs that cannot be edited."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_python


def test_libraries_use_the_loader_that_is_swapped_in(packed: Path) -> None:
    """They subclass it without calling its constructor, iterate datapipes and copy loaders."""
    run = run_python(Path(__file__).with_name("swapped_in.py"), packed)
    assert (run.stdout.splitlines()[-1:], run.stderr, run.returncode) == (["all is well"], "", 0)
