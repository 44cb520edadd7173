"""Every defect of a JSON text is a ValueError, and valid texts are read."""

from __future__ import annotations

import json

import pytest

from shardio.values import parse_json

WRONG = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep-object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "name-twice": b'{"a": 1, "b": {"c": 2, "c": 2}}',
    "name-twice-of-many": b"{" + b"".join(b'"%d":0,' % i for i in range(100_000)) + b'"99999":0}',
    "nan": b'{"a": NaN}',
    "infinity": b"[-Infinity]",
    "utf-16": "{}".encode("utf-16"),
    "latin-1": '{"ä": 1}'.encode("latin-1"),
    "cut": b'{"a": ',
    "nothing": b"",
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_every_defect_of_a_text_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(content)


@pytest.mark.parametrize("value", [None, {"ä": [1, -2.5, True, {}], "b": "é"}, [[[]]], 2**64])
def test_a_written_value_is_read(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert parse_json(text) == parse_json(text.encode()) == parse_json(b"\xef\xbb\xbf" + text.encode()) == value
