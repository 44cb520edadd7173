"""Any sequence of operations on a store does what it does on a dict."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from shardio.storage import ReplacedError, StoredFile
from tests.storage.conftest import BACKENDS

KEYS = st.sampled_from(["a", "b.x", "f/a", "f/b", "f/g/a", "fa/a", "é/ü", ".h", "f/.h/a"])
"""None of them lies below another one: a file system cannot have both."""
FOLDERS = ["f", "f/g", "fa", "é", "f/.h", "missing"]
CONTENTS = st.binary(max_size=50) | st.integers(0, 200_000).map(bytes)


class StoreMachine(RuleBasedStateMachine):
    """A store, and a dict that holds the same."""

    backend: str

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.root = BACKENDS[self.backend](Path(self.directory.name))
        self.model = dict[str, bytes]()
        self.open = list[tuple[StoredFile, bytes]]()

    def teardown(self) -> None:
        for file, _ in self.open:
            file.close()
        self.directory.cleanup()

    @rule(key=KEYS, content=CONTENTS)
    def write(self, key: str, content: bytes) -> None:
        with (self.root / key).write_whole() as file:
            file.write(content[:10])
            file.write(content[10:])
        self.model[key] = content

    @rule(key=KEYS, content=CONTENTS)
    def fail_to_write(self, key: str, content: bytes) -> None:
        with suppress(ZeroDivisionError), (self.root / key).write_whole() as file:
            file.write(content)
            raise ZeroDivisionError

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        (self.root / key).remove()
        self.model.pop(key, None)

    @rule(key=KEYS)
    def read(self, key: str) -> None:
        if key in self.model:
            assert (self.root / key).read_whole() == self.model[key]
        else:
            with pytest.raises((FileNotFoundError, NotADirectoryError)):
                (self.root / key).read_whole()

    @rule(key=KEYS)
    def open_object(self, key: str) -> None:
        if key in self.model:
            self.open.append(((self.root / key).open(), self.model[key]))

    @rule(data=st.data())
    def read_open_object(self, data: st.DataObject) -> None:
        if not self.open:
            return
        file, content = data.draw(st.sampled_from(self.open))
        assert file.size == len(content)
        bounds = st.integers(0, len(content))
        ranges = np.array(data.draw(st.lists(st.tuples(bounds, bounds).map(sorted), max_size=9)), np.int64)
        starts, stops = ranges.reshape(-1, 2).T
        with suppress(ReplacedError, FileNotFoundError):  # Else it is what it was when it was opened.
            expected = [content[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            assert file.read_many(starts, stops) == expected

    @invariant()
    def the_store_holds_what_the_dict_holds(self) -> None:
        visible = {key for key in self.model if not any(part.startswith(".") for part in key.split("/"))}
        assert sorted(self.root.walk()) == sorted((self.root / key).key for key in visible)
        for key, content in self.model.items():
            assert (self.root / key).exists()
            assert (self.root / key).stat().size == len(content)
        for folder in ["", *FOLDERS]:
            location, prefix = (self.root / folder, f"{folder}/") if folder else (self.root, "")
            below = [key.removeprefix(prefix) for key in self.model if key.startswith(prefix)]
            names = {head + slash for head, slash, _ in (key.partition("/") for key in below)}
            listed = location.list()
            assert listed == sorted(set(listed))
            assert names <= set(listed)
            for name in set(listed) - names:  # Some stores keep folders that are empty.
                assert name.endswith("/")
                assert list((location / name.rstrip("/")).walk()) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_is_a_dict(backend: str) -> None:
    """The rules and the invariant of the machine assert it; the first one that fails is raised here."""
    machine = type("Machine", (StoreMachine,), {"backend": backend})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))
