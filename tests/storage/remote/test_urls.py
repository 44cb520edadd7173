"""URLs are divided into a store and a key, and what no store can name is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardio.errors import LocationError
from shardio.storage import make_access, parse_location
from shardio.storage.remote.messages import split_url


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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://server/a.tar", "the scheme ftp:// is not supported"),
        ("s3:///a.tar", "names no bucket"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/../b", "empty part"),
        ("hf://datasets/r", "names no dataset repository"),
        ("hf://datasets/r@v1/train", "names no dataset repository"),
        ("hf://datasets/u/r@", "names no dataset repository"),
        ("hf://datasets/u/r#x/train", "names no dataset repository"),
        ("hf://datasets/../x", "names no dataset repository"),
        ("hf://datasets/u/../x", "names no dataset repository"),
        ("hf://datasets/./x/y", "names no dataset repository"),
        ("hf://datasets/u/-r", "names no dataset repository"),
        ("hf://datasets/u/r@../x", "names no dataset repository"),
        ("hf://datasets/u/r@a%2F..%2Fb/x", "names no dataset repository"),
        ("hf://datasets/u/r@a%0Ab/x", "names no dataset repository"),
        ("s3://bucket/a\nb", r"has the character '\\n', which cannot be requested"),
        ("https://example.org/a%00b", r"has the character '\\x00', which cannot be requested"),
        ("hf://user/model/train", "shardio reads dataset repositories of the Hugging Face Hub, not models"),
        ("hf://datasets/u/r/a//b", "empty part"),
        ("https://user:secret@server/a.tar", "contains a user name or a password, but shardio does not log in"),
        ("https://server/a.tar?X-Amz-Signature=secret", "has a query"),
    ],
)
def test_a_url_that_no_store_can_name_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        split_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"retries": -1}, ValueError),
        ({"retries": "3"}, TypeError),
        ({"timeout_s": 0}, ValueError),
        ({"timeout_s": float("inf")}, ValueError),
        ({"secret_access_key": b"x"}, TypeError),
        ("retries=3", TypeError),
    ],
)
def test_invalid_options_are_refused(options: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="storage_options"):
        make_access(options)  # type: ignore[arg-type]  # That is what is tested.


def test_a_cache_is_a_local_folder_of_some_size() -> None:
    with pytest.raises(ValueError, match="cache must be a local folder, got s3://bucket/cache"):
        make_access(cache="s3://bucket/cache")
    with pytest.raises(ValueError, match="cache_size must be a size"):
        make_access(cache_size="large")


def test_credentials_are_not_shown() -> None:
    location = parse_location("s3://bucket/a", make_access({"secret_access_key": "hidden", "retries": 3}))
    assert "hidden" not in f"{location!r} {location} {location.store!r}"
    assert "retries=3" in repr(location)


def test_a_name_from_a_manifest_that_no_store_can_request_is_an_error_that_says_so() -> None:
    folder = parse_location("memory://bucket/data")
    for name in ("a\nb.tar", "..", "a//b"):
        with pytest.raises(LocationError, match="cannot be requested: rename the object"):
            (folder / name).stat()
