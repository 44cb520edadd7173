"""A dataset can be read from any web server that sends the dataset's bytes. With any other server, reading fails
immediately."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import shardio
from shardio import DataLoader, ShardDataset, ShardWriter
from shardio.errors import FormatError, LocationError, StoreError
from shardio.storage import Location, RemoteAccess, ReplacedError, make_access, make_direct_access, parse_location
from shardio.storage.backends import FailedRequestError, RequestFailure
from shardio.storage.locations import RemoteOptions
from shardio.storage.operations import Attempts
from tests.raising import assert_raises
from tests.servers.stores import WebServer
from tests.servers.web_folder import WebFolder, serve_folder
from tests.sources import write_images
from tests.storage.conftest import storage_process_id

CONTENT = np.random.default_rng(0).bytes(300_000)
MODIFIED = ("Last-Modified", "Mon, 02 Mar 2026 10:00:00 GMT")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("web")
    write_images(root / "images")
    shardio.pack(root / "images", root / "packed", max_shard_samples=5)
    return root


def read_all(source: str | Path, num_workers: int = 0, **settings: Any) -> list[tuple[list[str], list[int], list[int]]]:
    dataset = ShardDataset(source, shuffle=True, fields=("key", "label", "image"), **settings)
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers)
    return [(keys, labels.tolist(), images.flatten(1).sum(1).tolist()) for keys, labels, images in loader]


def kind(**methods: Any) -> type[WebFolder]:
    return type("Kind", (WebFolder,), methods)


def check_that_files_are_read_by_ranges(root: Location, folder: Path) -> None:
    (folder / "a b%20é.tar").write_bytes(CONTENT)
    location = root / "a b%20é.tar"
    assert (location.exists(), location.read_whole()) == (True, CONTENT)
    with closing(location.open()) as file:
        assert (file.size, file.version) == (len(CONTENT), location.stat().version)
        for start, stop in [(0, 1), (7, 70_000), (0, len(CONTENT)), (len(CONTENT), len(CONTENT))]:
            assert file.read(start, stop) == CONTENT[start:stop]
        assert_raises(EOFError, "ends at byte 300000", file.read, 5, 300_001)
        (folder / "a b%20é.tar").write_bytes(CONTENT[::-1][:1000])
        assert_raises(ReplacedError, "was replaced", file.read, 0, 10)
    assert not (root / "a").exists()
    assert_raises(FileNotFoundError, "a", (root / "a").read_whole)
    (folder / "f").mkdir()
    (folder / "f" / "a").write_bytes(CONTENT)
    assert not (root / "f").is_folder()
    assert_raises(LocationError, r"cannot list .*: a web server does not list its files. Name", (root / "f").list)


def test_files_are_read_by_ranges(tmp_path: Path) -> None:
    with serve_folder(tmp_path) as (url, _):
        check_that_files_are_read_by_ranges(parse_location(url), tmp_path)


@pytest.mark.slow
def test_nginx_is_read_by_ranges(nginx_server: WebServer, root: Path) -> None:
    check_that_files_are_read_by_ranges(parse_location(nginx_server.server.url), nginx_server.files)
    (nginx_server.files / "packed").symlink_to(root / "packed")
    assert read_all(f"{nginx_server.server.url}/packed") == read_all(root / "packed")


def answer_unless_head(self: WebFolder, path: str, answer: Any) -> None:
    answer() if self.command == "HEAD" else WebFolder.answer_path(self, path)


KINDS: dict[str, type[WebFolder]] = {
    # Servers that compress responses where possible send weak ETags.
    "weak ETags": kind(describe=lambda self, content: [("ETag", f'W/"{hash(content):x}"'), MODIFIED]),
    "dates": kind(describe=lambda self, content: [MODIFIED]),
    "no versions": kind(describe=lambda self, content: []),
    "no HEAD": kind(answer_path=lambda self, path: answer_unless_head(self, path, lambda: self.answer(405, b""))),
    "no length": kind(answer_path=lambda self, path: answer_unless_head(self, path, lambda: self.answer_head(200))),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_dataset_is_read_like_the_local_one(root: Path, name: str) -> None:
    with serve_folder(root, KINDS[name]) as (url, _):
        for source in ("packed", "packed/shardio.json"):
            assert read_all(f"{url}/{source}", 1 if name == "dates" else 0) == read_all(root / source)


class PythonsOwn(SimpleHTTPRequestHandler, WebFolder):
    """A server like ``python -m http.server``, which ignores ranges and sends no ETags."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=str(self.root))

    def do_GET(self) -> None:
        self.requests.append((self.command, self.path))
        super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


class UnknownTotals(WebFolder):
    """A server that sends parts of a file without the file's size."""

    def answer_range(self, content: bytes, first: int, last: int) -> None:
        self.answer(206, content[first : last + 1], ("Content-Range", f"bytes {first}-{last}/*"))


@pytest.mark.parametrize(("kind", "num_workers"), [(PythonsOwn, 1), (UnknownTotals, 0)])
def test_shards_are_fetched_as_a_whole_once_if_the_server_sends_no_parts(
    root: Path, tmp_path: Path, kind: type[WebFolder], num_workers: int
) -> None:
    expected = read_all(root / "packed")
    with serve_folder(root, kind) as (url, requests):
        with pytest.warns(RuntimeWarning, match=rf"{url} does not send parts of packed/shard-\d+.tar.* nginx"):
            assert read_all(f"{url}/packed", num_workers, cache=tmp_path, cache_size="100MB") == expected
        requests.clear()
        assert read_all(f"{url}/packed", cache=tmp_path, cache_size="100MB") == expected
        assert not [path for method, path in requests if method == "GET" and path.endswith(".tar")]


def test_a_server_that_sends_no_parts_needs_a_cache_that_holds_a_shard(root: Path, tmp_path: Path) -> None:
    with serve_folder(root, PythonsOwn) as (url, _):
        small = make_access(cache=tmp_path, cache_size=9000)
        for access, message in (
            (small, r"more than the cache of 8\.789 KiB\. Set a larger cache_size"),
            (RemoteAccess(), r"cannot read bytes 0 to 9 .* does not support HTTP range requests .* nginx"),
        ):
            file = parse_location(f"{url}/packed/shard-000000.tar", access).open()
            assert_raises(StoreError, message, file.read, 0, 9)


class NoLength(WebFolder):
    """A server that sends no lengths, like servers that compress or generate responses."""

    def answer_file(self, content: bytes) -> None:
        self.answer_head(200, ("Connection", "close"))
        if self.command != "HEAD":
            self.wfile.write(content)


class FillingCache(NoLength):
    """A server that, like a cache, knows a file's length only after it has fetched the whole file."""

    def answer_file(self, content: bytes) -> None:
        is_early = self.requests.count(self.requests[-1]) <= 3 and "Range" not in self.headers
        NoLength.answer_file(self, content) if is_early else WebFolder.answer_file(self, content)


def test_a_cache_that_does_not_know_yet_how_long_files_are_is_asked_again(root: Path, tmp_path: Path) -> None:
    with serve_folder(root, FillingCache) as (url, _):
        assert read_all(f"{url}/packed", cache=tmp_path, cache_size="100MB") == read_all(root / "packed")
    with serve_folder(root, FillingCache) as (url, _):
        manifest = root / "packed" / "shardio.json"
        assert parse_location(f"{url}/packed/shardio.json").read_whole() == manifest.read_bytes()


def compress(self: WebFolder, content: bytes) -> None:
    self.answer(200, content if self.command == "HEAD" else content[:99], ("Content-Encoding", "gzip"))


def answering(code: int) -> type[WebFolder]:
    return kind(answer_file=lambda self, content: self.answer(code, b""))


LOGIN = b"<!DOCTYPE html><html>Please log in</html>"
YESTERDAY = kind(describe=lambda self, content: [("Last-Modified", "yesterday")])
CIRCLE = kind(answer_path=lambda self, path: self.answer(302, b"", ("Location", path)))


@pytest.mark.parametrize(
    ("server", "error", "message"),
    [
        (CIRCLE, StoreError, r"the server redirects in a loop\. Check the URL"),
        (answering(302), StoreError, r"the server's redirect has no target \(no Location\)\. Check the URL"),
        (NoLength, StoreError, r"not say how long the file is \(no Content-Length\)\. Configure it to send files"),
        (kind(answer_file=compress), StoreError, r"sent 99 bytes, .*, because it compresses .*gzip\)\. Configure"),
        (YESTERDAY, StoreError, r"invalid date \(Last-Modified: yesterday\)\. Correct the server's settings"),
        # A network that requires a login answers with a web page.
        (kind(answer_path=lambda self, path: self.answer(200, LOGIN)), FormatError, r"it is a web page.*log in"),
        (answering(400), StoreError, r"the server answered 400 Bad Request\. Check the URL"),
        (answering(401), PermissionError, r"the server answered 401 Unauthorized\. shardio does not log in"),
        (answering(403), PermissionError, r"the server answered 403 Forbidden\. shardio does not log in"),
        (answering(405), StoreError, r"the server answered 405 Method Not Allowed\. Check the URL"),
        (answering(410), FileNotFoundError, r"packed"),
        (answering(501), StoreError, r"the server answered 501 Not Implemented\. Check the URL"),
        (answering(511), StoreError, r"the server answered 511 Network Authentication Required\. Check the URL"),
    ],
)
def test_what_is_hopeless_fails_at_once(
    root: Path, server: type[WebFolder], error: type[Exception], message: str
) -> None:
    with serve_folder(root, server) as (url, requests):
        assert_raises(error, message, read_all, f"{url}/packed")
        num_hops = 11 if server is CIRCLE else 5 if server is NoLength else 2
        assert len(requests) <= 4 * num_hops, "only requests for a size that the server may know later are repeated"


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        (True, r"certificate is not valid \(\w+\)\. Check .*root_certificate"),
        (False, r"does not use TLS on this port\. Check the port, or use http://"),
    ],
)
def test_a_server_without_a_good_certificate_is_an_error_at_once(root: Path, tls: bool, message: str) -> None:
    access = make_direct_access({"retries": 999, "deadline_s": 1e6})
    with serve_folder(root, tls=tls) as (url, _):
        location = parse_location(f"https://{url.partition('://')[2]}/packed/shardio.json", access)
        assert "attempts" not in str(assert_raises(StoreError, message, location.stat))


def make_listing(keys: Sequence[str], token: str = "") -> bytes:
    contents = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-03-02T10:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag>"
        "<Size>3</Size></Contents>"
        for key in keys
    )
    more = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{token}"
    return f"<ListBucketResult>{more}{contents}</ListBucketResult>".encode()


def in_bucket(url: str) -> Location:
    options: dict[str, str | bool] = {"endpoint": url, "skip_signature": True, "allow_http": True}
    return parse_location("s3://bucket/images", make_direct_access(options))


@pytest.mark.parametrize("key", ["images//a.jpg", "images/./a.jpg", "images/../a.jpg", "images/a&#10;b.jpg"])
def test_an_object_that_cannot_be_requested_is_named(key: str) -> None:
    shown = re.escape(key.replace("&#10;", "\\n"))
    bucket = kind(answer_path=lambda self, path: self.answer(200, make_listing(["images/good.jpg", key])))
    with serve_folder(Path(), bucket) as (url, _):
        message = rf'cannot be requested: "{shown}"\. .*Rename or remove'
        assert "attempts" not in str(assert_raises(StoreError, message, in_bucket(url).list))
        assert_raises(StoreError, "cannot be requested", lambda: list(in_bucket(url).walk()))


def test_a_listing_goes_on_after_its_storage_process_has_died(tmp_path: Path) -> None:
    keys = [f"images/{number:04d}.jpg" for number in range(1200)]
    killed = list[int]()

    class Bucket(WebFolder):
        def answer_path(self, path: str) -> None:
            query = parse_qs(urlsplit(self.path).query)
            if "continuation-token" in query and not killed:
                killed.append(storage_process_id())
                os.kill(killed[0], signal.SIGKILL)
                return
            after = keys[999] if "continuation-token" in query else query.get("start-after", [""])[0]
            rest = [key for key in keys if key > after]
            token = "<NextContinuationToken>t</NextContinuationToken>" if len(rest) == len(keys) else ""
            self.answer(200, make_listing(rest[:1000] if token else rest, token))

    with serve_folder(tmp_path, Bucket) as (url, _):
        assert list(in_bucket(url).walk()) == keys
    assert killed


@pytest.mark.slow
def test_few_descriptors_suffice(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_shard_samples=20) as writer:
        for number in range(200):
            writer.write({"__key__": str(number), "txt": "x" * 600})
    program = textwrap.dedent("""
        import sys
        import shardio
        dataset = shardio.ShardDataset(sys.argv[1], shuffle=True, fields=("txt", "key"))
        print(len({key for _, keys in shardio.DataLoader(dataset, batch_size=4) for key in keys}))
    """)
    command = ["sh", "-c", 'ulimit -n 48 && exec "$@"', "sh", sys.executable, "-W", "ignore", "-c", program]
    with serve_folder(tmp_path) as (url, _):
        assert int(subprocess.check_output([*command, url], text=True)) == 200


@pytest.mark.parametrize(("problem", "num_calls"), [("unclear", 8), ("transient", 51)])
def test_answers_that_do_not_fit_are_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, problem: Any, num_calls: int
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fail = Mock(side_effect=FailedRequestError(RequestFailure(kind=problem, cause="it is odd")))
    message = rf"^cannot read memory://x/it after {num_calls} attempts in 0 s: it is odd\. Check the (server$|network)"
    with pytest.raises(StoreError, match=message):
        Attempts("memory://x", RemoteOptions(retries=50)).make("read", "it", fail)
    assert fail.call_count == num_calls


class Overloaded(WebFolder):
    num_parts: int
    ranges: Counter[str]

    def answer_path(self, path: str) -> None:
        if path.endswith(".tar") and "Range" in self.headers:
            self.ranges[f"{path} {self.headers['Range']}"] += 1
            if self.ranges.total() > self.num_parts:
                self.answer(429, b"")
                return
        super().answer_path(path)


@pytest.mark.parametrize("num_parts", [0, 2])
def test_a_store_that_keeps_failing_is_not_asked_again_before_the_user_knows(root: Path, num_parts: int) -> None:
    """Each attempt may wait for a long time, so the error is raised after one request per worker."""
    ranges = Counter[str]()
    server = type("Kind", (Overloaded,), {"num_parts": num_parts, "ranges": ranges})
    with serve_folder(root, server) as (url, _), pytest.raises(StoreError, match="after 2 attempts"):
        read_all(f"{url}/packed", num_workers=2, storage_options={"retries": 1})
    assert max(ranges.values()) <= 2 * 2 + num_parts, ranges
