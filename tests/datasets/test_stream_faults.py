"""A stream that fails is never mistaken for a shorter one, and leaves no process behind."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader, FormatError, ShardioError, StreamDataset, streams
from shardio.errors import StoreError
from shardio.storage import ReplacedError
from tests.files import find_open_files
from tests.raising import assert_raises
from tests.servers.stores import WebServer
from tests.tars import by_key, write_tar

KEYS = [f"sample-{number:02d}" for number in range(20)]


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{key}.bin", key.encode() * 100) for key in KEYS])
    return path


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FIRST_WAIT_S", 0.001)


def stream(command: str, **options: Any) -> StreamDataset:
    return StreamDataset(f"pipe:{command}", **{"fields": "key", "retries": 2, **options})


def read_until_error(dataset: StreamDataset) -> tuple[list[str], ShardioError]:
    """Return the samples delivered before an error, and the error. The next call must not raise StopIteration."""
    found, samples = list[str](), iter(dataset)
    caught = assert_raises(ShardioError, None, found.extend, samples)
    assert_raises(RuntimeError, "ended before its last batch", next, samples)
    return found, caught


CUT = "head -c 9000 {tar}"
FAILURES = [
    (
        "false",
        StoreError,
        r"from its beginning .*at attempt 3\): the command ended with exit status 1 and printed no err",
    ),
    ("cat {tar}; echo lost >&2; exit 3", StoreError, r"first 19 samples.* sample-18 .*status 3 and printed: lost"),
    ("cat {tar} | (cat; kill -PIPE $$)", StoreError, r"ended by signal 13"),
    ("cat {tar}; exit 141", StoreError, r"exit status 141"),
    ("no-program {tar}", StoreError, r"at attempt 1\): the command ended with exit status 127 and printed.*found"),
    (CUT, FormatError, r"first 4 samples.*\(near byte 9000, at attempt 3\): it is not a complete"),
    ("head -c 8192 {tar}", FormatError, r"not a complete tar"),
    (f"{CUT}; exit 5", StoreError, r"exit status 5"),
    ("TOKEN=secret true --header secret {tar}", FormatError, r"pipe:true … a\.tar.* from its beginning.*empty file"),
    ("cat {tar}; exec >&-; sleep 1000", StoreError, r"closed its output, but did not end within 0.3 s"),
    (f"{CUT}; sleep 1000", StoreError, r"no bytes arrived for 0.3 s"),
]


@pytest.mark.parametrize(("command", "kind", "message"), FAILURES, ids=range(len(FAILURES)))
def test_a_failing_command_is_an_error(tar: Path, command: str, kind: type[Exception], message: str) -> None:
    source = command.replace("{tar}", shlex.quote(str(tar)))
    found, error = read_until_error(stream(source, timeout_s=0.3 if "sleep" in command else 300))
    assert type(error) is kind
    assert re.search(message, str(error)), error
    assert found == KEYS[: len(found)]
    assert "secret" not in str(error)


def fail_twice(tar: Path, counter: Path, *, first: str) -> str:
    """Return a command that runs ``first`` instead of reading the tar, but only twice."""
    counter.write_text("")
    count = f"echo >> {counter}; n=$(wc -l < {counter})"
    return f'{count}; if [ "$n" -le 2 ]; then {first}; else cat {tar}; fi'


@pytest.mark.parametrize(
    ("first", "shuffle"), [(CUT, False), ("cat {tar}; exit 1", False), ("exit 1", False), (f"{CUT}; exit 1", True)]
)
def test_a_third_attempt_that_works_delivers_each_sample_once(
    tar: Path, tmp_path: Path, first: str, shuffle: bool
) -> None:
    command = fail_twice(tar, tmp_path / "counter", first=first.replace("{tar}", str(tar)))
    found = list(stream(command, shuffle=shuffle, buffer=7))
    assert (found if not shuffle else sorted(found), (tmp_path / "counter").read_text()) == (KEYS, "\n" * 3)


def test_attempts_are_counted_from_the_last_sample(tar: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("")
    command = f"echo >> {counter}; n=$(wc -l < {counter}); head -c $((n * 3072)) {tar}; [ $n -gt 10 ]"  # Two samples.
    assert (list(stream(command, retries=1)), len(counter.read_text())) == (KEYS, 11)


@pytest.mark.parametrize("names", [["other", *KEYS[1:]], KEYS[:3], [*KEYS[:3], "new", *KEYS[3:]]])
def test_another_content_of_a_reopened_stream_is_noticed(tar: Path, tmp_path: Path, names: list[str]) -> None:
    write_tar(tmp_path / "b.tar", [(f"{name}.bin", name.encode() * 100) for name in names])
    command = fail_twice(tmp_path / "b.tar", tmp_path / "counter", first=f"head -c 9000 {tar}; exit 1")
    found = list[str]()
    assert_raises(ReplacedError, "does not begin with the same 4 samples", found.extend, stream(command))
    assert not found  # The 4 samples were read ahead, but not yet delivered.


def test_a_stored_tar_is_not_read_again(tmp_path: Path, tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FIRST_WAIT_S", 1000.0)  # A retry would take a long time.
    (tmp_path / "cut.tar").write_bytes(tar.read_bytes()[:9000])
    _, error = read_until_error(StreamDataset(tmp_path / "cut.tar", fields="key"))
    assert isinstance(error, FormatError)
    assert re.search(r"cut\.tar after its first 4 samples.*\(near byte 9000\)", str(error))


@pytest.fixture
def living(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a command prefix that makes its processes open a FIFO, and a function that asserts that all have ended."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def assert_all_ended() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(20_000) == [(descriptor, select.POLLHUP)]

    yield f"exec 9> {fifo}; ", assert_all_ended
    os.close(descriptor)


@pytest.mark.parametrize(
    ("rest", "how"),
    [
        *(("sleep 1000 & cat {tar}; sleep 1000", how) for how in ("close", "collect", "error")),
        ("cat {tar} {tar} {tar} | (cat; sleep 1000)", "close"),
        ("trap '' TERM; cat {tar} /dev/zero", "error"),
        ("(trap '' TERM; cat {tar}; sleep 1000); true", "collect"),
        ("trap '' TERM PIPE; cat {tar}; while true; do sleep 1000; done", "close"),
    ],
)
def test_stopping_ends_the_command(
    tar: Path, living: tuple[str, Any], rest: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.streams.TERMINATION_S", 0.1)
    before, assert_all_ended = living

    def fail(sample: Any) -> Any:
        raise KeyboardInterrupt

    files = find_open_files()
    options: dict[str, Any] = {
        "transform_sample": fail if how == "error" else None,
        "fields": ("key",),
        "missing": None,
    }
    samples = iter(stream(before + rest.replace("{tar}", str(tar)), shuffle=True, buffer=2, **options))
    if how == "error":
        assert_raises(KeyboardInterrupt, None, next, samples)
    else:
        next(samples)
    if how == "close":
        samples.close()
    del samples
    assert_all_ended()
    assert find_open_files() <= files


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_workers_that_stop_early_end_their_commands(tar: Path, living: tuple[str, Any], method: Any) -> None:
    before, assert_all_ended = living
    commands = [f"pipe:{before} : {number}; cat {tar}; sleep 1000" for number in range(2)]
    dataset = StreamDataset(commands, fields="key", shuffle=True, buffer=2)
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=2, worker_method=method))
    next(batches)
    del batches
    assert_all_ended()


def test_a_fork_does_not_end_the_command(tar: Path, tmp_path: Path) -> None:
    """The child has a copy of the iterator, which it may free at any time."""
    os.mkfifo(fifo := tmp_path / "may-continue")
    command = f"head -c 9000 {tar}; read line < {fifo}; tail -c +9001 {tar}"
    samples = iter(stream(command, shuffle=True, buffer=2, retries=0))
    found = [next(samples)]
    child = os.fork()
    if not child:
        samples.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    descriptor = os.open(fifo, os.O_RDWR)
    os.write(descriptor, b"\n")
    assert sorted([*found, *samples]) == KEYS
    os.close(descriptor)


def test_a_finished_epoch_leaves_nothing_open_and_a_command_has_no_input(tar: Path, living: tuple[str, Any]) -> None:
    before, assert_all_ended = living
    files = find_open_files()
    dataset = stream(f"{before} cat; cat {tar}")
    assert list(dataset) == list(dataset) == KEYS
    assert_all_ended()
    assert find_open_files() <= files


def test_a_web_server_is_read_by_curl(nginx_server: WebServer, packed: Path) -> None:
    folder = Path(shutil.copytree(packed, nginx_server.files / uuid.uuid4().hex))
    url = f"{nginx_server.server.url}/{folder.name}"
    expected = list(by_key(*sorted(packed.glob("*.tar"))))
    for source in (f"{url}/shard-{{000000..000004}}.tar", f"pipe:curl -sf {url}/shard-{{000000..000004}}.tar"):
        assert list(StreamDataset(source, fields="key")) == expected
    _, error = read_until_error(StreamDataset(f"{url}/none.tar?token=secret", fields="key", retries=1))
    assert re.search(r"none\.tar from its beginning .* the command ended with exit status 22", str(error))
    assert "secret" not in str(error)
