"""Web servers differ. A dataset is read from all that send its bytes; from the others, the reason is given at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from shardio import DataLoader, ShardDataset
from shardio.errors import FormatError, StoreError
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, write_manifest, write_shard
from shardio.storage import RemoteAccess, make_access, parse_location
from shardio.storage.options import make_options
from shardio.storage.remote.client import client, read_process_id
from tests.servers.web_folder import WebFolder, serve_folder
from tests.sources import write_images
from tests.storage.packing_images import pack_images

MODIFIED = ("Last-Modified", "Mon, 02 Mar 2026 10:00:00 GMT")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packed dataset ``packed``."""
    root = tmp_path_factory.mktemp("web")
    write_images(root / "images")
    pack_images(root / "images", root / "packed")
    return root


def read_all(source: str | Path, num_workers: int = 0, **settings: Any) -> list[tuple[list[str], list[int], list[int]]]:
    """Return the keys, the labels and the sums of the images of each batch."""
    dataset = ShardDataset(source, shuffle=True, fields=("key", "label", "image"), **settings)
    return [
        (keys, labels.tolist(), images.flatten(1).sum(1).tolist())
        for keys, labels, images in DataLoader(dataset, batch_size=4, num_workers=num_workers)
    ]


class WeakETags(WebFolder):
    """As of servers that compress what they can."""

    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return [("ETag", f'W/"{hash(content):x}"'), MODIFIED]


class Dates(WebFolder):
    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return [MODIFIED]


class Unversioned(WebFolder):
    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return []


class NoHead(WebFolder):
    def answer_path(self, path: str) -> None:
        self.answer(405, b"") if self.command == "HEAD" else super().answer_path(path)


class HeadWithoutLength(WebFolder):
    def answer_path(self, path: str) -> None:
        self.answer_head(200) if self.command == "HEAD" else super().answer_path(path)


@pytest.mark.parametrize(
    ("kind", "num_workers"), [(WeakETags, 2), (Dates, 0), (Unversioned, 2), (NoHead, 0), (HeadWithoutLength, 0)]
)
def test_a_dataset_is_read_like_the_local_one(root: Path, kind: type[WebFolder], num_workers: int) -> None:
    with serve_folder(root, kind) as (url, _):
        assert read_all(f"{url}/packed", num_workers) == read_all(root / "packed")


class PythonsOwn(SimpleHTTPRequestHandler, WebFolder):
    """As of ``python -m http.server``, which ignores ranges and sends no ETags."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=str(self.root))

    def do_GET(self) -> None:
        self.requests.append((self.command, self.path))
        super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


class UnknownTotals(WebFolder):
    """Sends parts, but not the size of the file with them."""

    def answer_range(self, content: bytes, first: int, last: int) -> None:
        self.answer(206, content[first : last + 1], ("Content-Range", f"bytes {first}-{last}/*"))


@pytest.mark.parametrize(("kind", "num_workers"), [(PythonsOwn, 2), (UnknownTotals, 0)])
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


def test_a_shard_that_does_not_fit_into_the_cache_is_not_fetched_as_a_whole(root: Path, tmp_path: Path) -> None:
    with serve_folder(root, PythonsOwn) as (url, _):
        access = make_access(cache=tmp_path, cache_size=9000)
        file = parse_location(f"{url}/packed/shard-000000.tar", access).open()
        with pytest.raises(StoreError, match=r"more than the cache of 9000\. Set a larger cache_size"):
            file.read(0, 9)


def test_without_a_cache_a_server_that_sends_no_parts_is_an_error(root: Path) -> None:
    with serve_folder(root, PythonsOwn) as (url, _):
        file = parse_location(f"{url}/packed/shard-000000.tar").open()
        with pytest.raises(StoreError, match=r"cannot read bytes 0 to 9 .* does not send parts .* nginx"):
            file.read(0, 9)


@pytest.mark.parametrize("is_new_run", [True, False])
def test_without_versions_a_cached_manifest_is_not_believed(tmp_path: Path, is_new_run: bool) -> None:
    one, two = (pack_images_that_end_with(last, tmp_path / name) for last, name in enumerate(("a", "b")))
    sizes = [{path.name: path.stat().st_size for path in folder.iterdir()} for folder in (one, two)]
    assert sizes[0] == sizes[1], "nothing else tells them apart"
    served = tmp_path / "served"
    served.mkdir()
    with serve_folder(served, Unversioned) as (url, _):
        one.rename(served / "packed")
        read = partial(read_all, f"{url}/packed", cache=tmp_path / "cache", cache_size="100MB")
        before = read()
        (served / "packed").rename(one)
        two.rename(served / "packed")
        if is_new_run:
            client().close()
        assert read() == read_all(served / "packed") != before


def pack_images_that_end_with(last: int, folder: Path) -> Path:
    """Pack four images that end with a value. Those with other values have files of the same sizes."""
    write_images(folder / "images", classes=1, per_class=4, suffix="bmp")
    for path in (folder / "images").rglob("*.bmp"):
        path.write_bytes(path.read_bytes()[:-1] + bytes([last]))
    pack_images(folder / "images", folder / "packed")
    return folder / "packed"


class Circle(WebFolder):
    def answer_path(self, path: str) -> None:
        self.answer(302, b"", ("Location", path))


class Nowhere(WebFolder):
    def answer_file(self, content: bytes) -> None:
        self.answer(302, b"")


class NoLength(WebFolder):
    """As of servers that compress or generate answers."""

    def answer_file(self, content: bytes) -> None:
        self.answer_head(200, ("Connection", "close"))
        if self.command != "HEAD":
            self.wfile.write(content)


class FillingCache(NoLength):
    """As of a cache in front of a server: it knows how long a file is when it has fetched all of it."""

    num_early = 3

    def answer_file(self, content: bytes) -> None:
        is_early = self.requests.count(self.requests[-1]) <= self.num_early and "Range" not in self.headers
        NoLength.answer_file(self, content) if is_early else WebFolder.answer_file(self, content)


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_cache_that_does_not_know_yet_how_long_files_are_is_asked_again(
    root: Path, tmp_path: Path, has_cache: bool
) -> None:
    with serve_folder(root, FillingCache) as (url, _):
        if has_cache:
            assert read_all(f"{url}/packed", cache=tmp_path, cache_size="100MB") == read_all(root / "packed")
        else:
            content = parse_location(f"{url}/packed/shardio.json").read_whole()
            assert content == (root / "packed" / "shardio.json").read_bytes()


class Compressing(WebFolder):
    def answer_file(self, content: bytes) -> None:
        self.answer(200, content if self.command == "HEAD" else content[:99], ("Content-Encoding", "gzip"))


class StrangeDates(WebFolder):
    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return [("Last-Modified", "yesterday")]


def answering(code: int) -> type[WebFolder]:
    """Return a server that answers with an error."""

    class Answering(WebFolder):
        def answer_file(self, content: bytes) -> None:
            self.answer(code, b"")

    return Answering


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Circle, StoreError, r"the server redirects in a circle\. Check the URL"),
        (Nowhere, StoreError, r"the server redirects to nowhere \(no Location\)\. Check the URL"),
        (NoLength, StoreError, r"does not say how long the file is \(no Content-Length\)\. Let it send files as they"),
        (
            Compressing,
            StoreError,
            r"sent 99 bytes, .*, because it compresses .*gzip\)\. Let it send files as",
        ),
        (StrangeDates, StoreError, r"invalid date \(Last-Modified: yesterday\)\. Correct the server's settings"),
        (answering(400), StoreError, r"the server answered 400 Bad Request\. Check the URL"),
        (answering(401), PermissionError, r"the server answered 401 Unauthorized\. shardio does not log in"),
        (answering(403), PermissionError, r"the server answered 403 Forbidden\. shardio does not log in"),
        (answering(405), StoreError, r"the server answered 405 Method Not Allowed\. Check the URL"),
        (answering(410), FileNotFoundError, r"packed"),
        (answering(501), StoreError, r"the server answered 501 Not Implemented\. Check the URL"),
        (answering(511), StoreError, r"the server answered 511 Network Authentication Required\. Check the URL"),
    ],
)
def test_what_cannot_succeed_fails_at_once_and_says_why(
    root: Path, kind: type[WebFolder], error: type[Exception], message: str
) -> None:
    with serve_folder(root, kind) as (url, requests):
        with pytest.raises(error, match=message):
            read_all(f"{url}/packed")
        num_hops = 11 if kind is Circle else 5 if kind is NoLength else 1
        assert len(requests) <= 4 * num_hops, "nothing is repeated, except for sizes that may be known soon"


def test_a_certificate_that_nobody_trusts_is_an_error_at_once(root: Path) -> None:
    with serve_folder(root, tls=True) as (url, _):
        location = parse_location(f"{url}/packed/shardio.json", retrying_for_ever())
        with pytest.raises(StoreError, match=r"certificate is not valid \(\w+\)\. Check .*root_certificate") as caught:
            location.stat()
        assert "attempts" not in str(caught.value)


def test_a_port_without_tls_is_an_error_at_once(root: Path) -> None:
    with serve_folder(root) as (url, _):
        location = parse_location(f"https{url.removeprefix('http')}/packed/shardio.json", retrying_for_ever())
        with pytest.raises(StoreError, match=r"does not use TLS at this port\. Check the port, or use http://"):
            location.stat()


def retrying_for_ever() -> RemoteAccess:
    return RemoteAccess(options=make_options({"retries": 999, "deadline_s": 1e6}))


class LoginPage(WebFolder):
    """As of a network that wants a login first."""

    def answer_path(self, path: str) -> None:
        self.answer(200, b"<!DOCTYPE html><html>Please log in</html>")


def test_a_page_instead_of_a_manifest_is_called_one(root: Path) -> None:
    with serve_folder(root, LoginPage) as (url, _), pytest.raises(FormatError, match=r"it is a web page.*log in"):
        read_all(f"{url}/packed")


@contextlib.contextmanager
def serve_bucket(*keys: str) -> Iterator[RemoteAccess]:
    """Serve the listing of a bucket. Yield how it is reached."""
    contents = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-03-02T10:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag>"
        "<Size>3</Size></Contents>"
        for key in keys
    )
    body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()

    class Bucket(WebFolder):
        def answer_path(self, path: str) -> None:
            self.answer(200, body)

    with serve_folder(Path(), Bucket) as (url, _):
        options: dict[str, str | bool] = {
            "endpoint": url,
            "access_key_id": "a",
            "secret_access_key": "b",
            "allow_http": True,
        }
        yield RemoteAccess(options=make_options(options))


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("images//a.jpg", r"images//a\.jpg"),
        ("images/./a.jpg", r"images/\./a\.jpg"),
        ("images/../a.jpg", r"images/\.\./a\.jpg"),
        ("images/a&#10;b.jpg", r"images/a\\nb\.jpg"),
    ],
)
def test_an_object_that_cannot_be_requested_is_named(key: str, shown: str) -> None:
    with serve_bucket("images/good.jpg", key) as access:
        folder = parse_location("s3://bucket/images", access)
        with pytest.raises(StoreError, match=rf'cannot be requested: "{shown}"\. .*Rename or remove') as caught:
            folder.list()
        assert "attempts" not in str(caught.value)
        with pytest.raises(StoreError, match="cannot be requested"):
            list(folder.walk())


def test_a_listing_goes_on_after_its_storage_process_has_died(tmp_path: Path) -> None:
    keys = [f"images/{number:04d}.jpg" for number in range(1200)]
    killed = list[int]()

    class Bucket(WebFolder):
        def answer_path(self, path: str) -> None:
            query = parse_qs(urlsplit(self.path).query)
            if "continuation-token" in query and not killed:
                folder = client().folder
                assert folder is not None
                process_id = read_process_id(folder)
                assert process_id is not None
                os.kill(process_id, signal.SIGKILL)
                killed.append(process_id)
                return
            after = keys[999] if "continuation-token" in query else query.get("start-after", [""])[0]
            rest = [key for key in keys if key > after]
            page, is_cut = rest[:1000], len(rest) == len(keys)
            contents = "".join(
                f"<Contents><Key>{key}</Key><LastModified>2026-03-02T10:00:00.000Z</LastModified>"
                "<ETag>&quot;x&quot;</ETag><Size>3</Size></Contents>"
                for key in (page if is_cut else rest)
            )
            token = "<NextContinuationToken>t</NextContinuationToken>" if is_cut else ""
            truncated = str(is_cut).lower()
            body = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{token}{contents}</ListBucketResult>"
            self.answer(200, body.encode())

    with serve_folder(tmp_path, Bucket) as (url, _):
        options: dict[str, str | bool] = {"endpoint": url, "skip_signature": True, "allow_http": True}
        access = RemoteAccess(options=make_options(options))
        assert list(parse_location("s3://bucket/images", access).walk()) == keys
    assert killed


def test_few_descriptors_suffice(tmp_path: Path) -> None:
    samples = [Sample(key=str(i), fields={"txt": b"x" * 600}, origin="") for i in range(200)]
    folder = parse_location(tmp_path)
    entries = [write_shard(folder / f"{i}.tar", samples[20 * i : 20 * i + 20])[0] for i in range(10)]
    write_manifest(folder / MANIFEST_NAME, Manifest(shards=tuple(entries), fields=("txt",)))
    program = textwrap.dedent("""
        import sys
        import shardio
        dataset = shardio.ShardDataset(sys.argv[1], shuffle=True, fields=("txt", "key"))
        print(len({key for _, keys in shardio.DataLoader(dataset, batch_size=4) for key in keys}))
    """)
    command = ["sh", "-c", 'ulimit -n 32 && exec "$@"', "sh", sys.executable, "-W", "ignore", "-c", program]
    with serve_folder(tmp_path) as (url, _):
        assert int(subprocess.check_output([*command, url], text=True)) == 200


def test_answers_that_do_not_fit_their_requests_are_given_up_soon() -> None:
    program = textwrap.dedent("""
        import time
        from shardio.errors import StoreError
        from shardio.storage.remote.backends import Attempts
        from shardio.storage.remote.failures import FailedRequestError, RequestFailure
        from shardio.storage.options import RemoteOptions
        time.sleep = lambda seconds: None
        def count(kind):
            calls = []
            def fail(backend):
                calls.append(backend)
                raise FailedRequestError(RequestFailure(kind=kind, cause="it is odd"))
            try:
                Attempts("memory://x", RemoteOptions(retries=50)).make("read it", fail)
            except StoreError as error:
                print(len(calls), error)
        count("unclear")
        count("transient")
    """)
    unclear, transient = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert unclear == "8 cannot read it after 8 attempts in 0 s: it is odd. Check the server"
    assert transient.startswith("51 cannot read it after 51 attempts")


class Overloaded(WebFolder):
    """Sends a few parts of tars, and then no more."""

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
    """Each attempt may wait for a long time, so the error comes after one request of each worker."""
    ranges = Counter[str]()
    kind = type("Kind", (Overloaded,), {"num_parts": num_parts, "ranges": ranges})
    with serve_folder(root, kind) as (url, _), pytest.raises(StoreError, match="after 2 attempts"):
        read_all(f"{url}/packed", num_workers=2, storage_options={"retries": 1})
    assert max(ranges.values()) <= 2 * 2 + num_parts, ranges
