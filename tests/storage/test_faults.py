"""With any network fault, either the content is right or an error says what failed. Wrong names also raise errors."""

from __future__ import annotations

import os
import re
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.errors import LocationError, StoreError
from shardio.storage import Location, make_access, parse_location
from shardio.storage.locations import split_url
from tests.faults.proxy import KINDS, FaultProxy, Script
from tests.raising import assert_raises
from tests.servers.server import Server
from tests.servers.stores import SECRET_ACCESS_KEY
from tests.storage.conftest import at_server, put

CONTENT = np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def root(behind: Server) -> Location:
    return at_server(behind, uuid.uuid4().hex, timeout_s=0.3, retries=100)


@pytest.mark.parametrize("kind", KINDS)
def test_content_is_right_in_spite_of_any_fault(root: Location, proxy: FaultProxy, kind: str) -> None:
    location = put(root / "a", CONTENT)
    with closing(location.open()) as file:
        proxy.set(Script(faults={kind: 0.3}))
        for start in range(0, len(CONTENT), 500_000):
            found = file.read(start, start + 500_000)
            if kind != "corrupt":  # Only a hash reveals corruption.
                assert found == CONTENT[start : start + 500_000]
    assert proxy.counts().num_faults[kind]
    if kind in ("too_long", "wrong_range"):
        return
    proxy.set(Script())
    locations = [put(root / str(i), CONTENT[: 1000 * i]) for i in range(1, 9)]
    proxy.set(Script(faults={kind: 0.3}))
    proxy.reset()
    assert [each.read_whole() for each in locations] == [CONTENT[: 1000 * i] for i in range(1, 9)]
    assert proxy.counts().num_faults[kind]


def test_a_transfer_is_resumed_where_it_broke(root: Location, proxy: FaultProxy) -> None:
    location = put(root / "a", CONTENT)
    # Unlike a reset, truncation loses no bytes that have arrived.
    proxy.set(Script(faults={"truncated": 1.0}, max_faults=5))
    proxy.reset()
    with closing(location.open()) as file:
        assert file.read(0, len(CONTENT)) == CONTENT
    starts = [int(found[1]) for each in proxy.requests() if (found := re.match(r"bytes=(\d+)-", each.range or ""))]
    assert starts == sorted(starts)
    assert max(starts) > 0, "a request begins in the middle of the object"


@pytest.mark.parametrize("kind", ["status_500", "status_429", "reset_before", "stall_before"])
@pytest.mark.parametrize("num_bytes", [1000, pytest.param(20_000_000, marks=pytest.mark.slow)])
def test_uploads_are_right_in_spite_of_faults(root: Location, proxy: FaultProxy, kind: str, num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    proxy.set(Script(faults={kind: 0.2}, methods=("PUT", "POST", "GET", "HEAD")))
    location = put(root / "a", content)
    proxy.set(Script())
    assert (location.read_whole(), root.list()) == (content, ["a"])


def test_a_store_that_keeps_failing_is_an_error_that_says_what_was_tried(behind: Server, proxy: FaultProxy) -> None:
    location = put(at_server(behind, uuid.uuid4().hex, retries=2), CONTENT)
    with closing(location.open()) as file:
        proxy.set(Script(faults={"status_503": 1.0}))
        said = rf"^cannot read bytes 10 to 1000 of {location} after 3 attempts in \d+ s: the server answered 503 .*Slow"
        caught = assert_raises(StoreError, rf"{said}Down.*\. Check the network and the server$", file.read, 10, 1000)
    assert SECRET_ACCESS_KEY not in str(caught)
    proxy.set(Script(faults={"expired_token": 1.0}))
    with pytest.raises(StoreError, match=r"ExpiredToken.*\. The credentials have expired: renew them"):
        at_server(behind, "a", retries=1).read_whole()


CHECK = r"cannot read s3://shardio/a after 4 attempts .* Check the URL, the endpoint"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"secret_access_key": "a-wrong-secret"}, PermissionError, "shardio/a: .*SignatureDoesNotMatch.*Check the"),
        ({"regoin": "x"}, ValueError, r"s3://shardio: .*regoin.*Check the storage options"),
        ({"endpoint": "http://127.0.0.1:9"}, StoreError, CHECK),
        ({"endpoint": "http://no-such-server.invalid:80"}, StoreError, CHECK),
    ],
)
def test_errors_and_locations_do_not_show_secrets(
    seaweedfs_server: Server, options: dict[str, str], error: type[Exception], message: str
) -> None:
    began = time.monotonic()
    location = at_server(seaweedfs_server, "a", retries=99, **options)
    caught = assert_raises(error, message, location.stat)
    assert not re.search(f"a-wrong-secret|{SECRET_ACCESS_KEY}", f"{caught} {location} {location!r} {location.store!r}")
    assert "retries=99" in repr(location)
    assert time.monotonic() - began < 60, "a server that does not exist is not retried ten times"


# URLs and options


@pytest.mark.parametrize(
    ("url", "text", "name", "folder"),
    [
        ("s3://bucket/train/a.tar", "s3://bucket/train/a.tar", "a.tar", "s3://bucket/train"),
        ("gs://bucket/a b%20.tar", "gs://bucket/a b%20.tar", "a b%20.tar", "gs://bucket/"),
        ("az://container/é/", "az://container/é", "é", "az://container/"),
        ("https://example.org/a%20b.tar", "https://example.org/a b.tar", "a b.tar", "https://example.org/"),
        ("http://127.0.0.1:8080/x/y", "http://127.0.0.1:8080/x/y", "y", "http://127.0.0.1:8080/x"),
        ("hf://datasets/u/r/a b%20.tar", "hf://datasets/u/r/a b%20.tar", "a b%20.tar", "hf://datasets/u/r/"),
        ("hf://datasets/u/r@main/x/y@1", "hf://datasets/u/r/x/y@1", "y@1", "hf://datasets/u/r/x"),
        ("hf://datasets/u/r@a%2Fb/x/", "hf://datasets/u/r@a%2Fb/x", "x", "hf://datasets/u/r@a%2Fb/"),
        ("hf://datasets/u/r@refs/pr/3/x", "hf://datasets/u/r@refs/pr/3/x", "x", "hf://datasets/u/r@refs/pr/3/"),
        (Path("s3://bucket/train"), "s3://bucket/train", "train", "s3://bucket/"),
    ],
)
def test_a_url_names_a_location(url: str | Path, text: str, name: str, folder: str) -> None:
    location = parse_location(url)
    assert (str(location), location.name, str(location.folder)) == (text, name, folder)


NOT_REPOSITORIES = "r r@v1/train u/r@ u/r#x/train ../x u/../x ./x/y u/-r u/r@../x u/r@a%2F..%2Fb/x u/r@a%0Ab/x"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///a.tar", "names no bucket"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/../b", "empty part"),
        *((f"hf://datasets/{name}", "names no dataset repository") for name in NOT_REPOSITORIES.split()),
        ("s3://bucket/a\nb", r"contains '\\n', so it cannot be requested"),
        ("https://example.org/a%00b", r"contains '\\x00', so it cannot be requested"),
        ("hf://user/model/train", "shardio reads dataset repositories of the Hugging Face Hub, not models"),
        ("hf://datasets/u/r/a//b", "empty part"),
        ("https://user:secret@server/a.tar", "contains a user name or a password, but shardio does not log in"),
        ("https://server/a.tar?X-Amz-Signature=secret", "has a query"),
    ],
)
def test_a_url_that_no_store_can_name_is_refused(url: str, message: str) -> None:
    assert "secret" not in str(assert_raises(ValueError, message, split_url, url))


@pytest.mark.parametrize("name", ["a\nb.tar", "..", "a//b"])
def test_a_name_that_no_store_can_request_is_an_error_that_says_so(name: str) -> None:
    location = parse_location("memory://bucket/data") / name
    assert_raises(LocationError, "cannot be requested: rename the object", location.stat)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"storage_options": {"retries": -1}}, ValueError, "storage_options"),
        ({"storage_options": {"retries": "3"}}, TypeError, "storage_options"),
        ({"storage_options": {"timeout_s": 0}}, ValueError, "storage_options"),
        ({"storage_options": {"timeout_s": float("inf")}}, ValueError, "storage_options"),
        ({"storage_options": {"secret_access_key": b"x"}}, TypeError, "storage_options"),
        ({"storage_options": "retries=3"}, TypeError, "storage_options"),
        ({"cache": "s3://bucket/cache"}, ValueError, "cache must be a local folder, got s3://bucket/cache"),
        ({"cache_size": "large"}, ValueError, "cache_size must be a size"),
    ],
)
def test_invalid_options_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    assert_raises(error, message, make_access, **arguments)
