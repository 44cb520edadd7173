"""Objects are called when their process forks, for as long as they live, and in the order of os.register_at_fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardio

PACKAGE = Path(shardio.__file__).parent

FORK = """
import os, sys
from shardio.forks import _watches, call_at_fork

class Owner:
    def __init__(self, name):
        self.name = name
        call_at_fork(self, before=Owner.before, after_in_parent=Owner.in_parent, after_in_child=Owner.in_child)

    def before(self):
        os.write(1, f"before {self.name}\\n".encode())

    def in_parent(self):
        os.write(parent, f"parent {self.name}\\n".encode())

    def in_child(self):
        os.write(1, f"child {self.name}\\n".encode())

here, parent = os.pipe()
owners = [Owner(name) for name in "abc"]
call_at_fork(owners[0], after_in_child=lambda owner: os.write(1, b"child again\\n"))
del owners[1]
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
print(os.read(here, 100).decode(), end="", flush=True)
owners.clear()
assert not _watches
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_objects_are_called_while_they_live() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    before, child, parent = ["before c", "before a"], ["child a", "child c", "child again"], ["parent a", "parent c"]
    assert done.stdout.splitlines() == [*before, *child, *parent]


def test_one_module_registers_with_the_operating_system() -> None:
    found = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "os.register_at_fork(" in path.read_text()
    }
    assert found == {"forks.py"}
