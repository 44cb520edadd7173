"""Conformance tests of a field codec: the values of a field, its errors, and the memory that it uses."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import pytest

from shardio.decoding import FieldDecoder, find_wide
from shardio.decoding.codecs import UNBOUNDED, extension_of
from shardio.errors import SampleError
from shardio.reading import StoredSamples

MAX_WASTED_BYTES = 10 * 2**20
"""The maximum memory that decoding a damaged field may use in addition to ten times the size of the field."""


def check_types(found: Any, value: Any) -> None:
    """Raise AssertionError if two equal values, or equal parts of them, have different types."""
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype.newbyteorder("="), "torch accepts no other byte order"
        if value.dtype == object:
            check_types(found.tolist(), value.tolist())
    elif isinstance(value, Mapping):
        check_types(set(found), set(value))
        for key in value:
            check_types(found[key], value[key])
    elif isinstance(value, Set):
        assert {(type(each), each) for each in found} == {(type(each), each) for each in value}
    elif isinstance(value, list | tuple):
        for one, other in zip(found, value, strict=True):
            check_types(one, other)


def changeable_parts(value: Any) -> list[Any]:
    """Return the mutable arrays and containers in a value, including the value itself."""
    own = [value] if isinstance(value, np.ndarray | dict | list | set | bytearray) else []
    inner: Iterable[Any]
    if isinstance(value, np.ndarray):
        inner = value.flat if value.dtype == object else ()
    else:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return own + [part for each in inner for part in changeable_parts(each)]


class FieldCodecTests:
    """The tests of one field codec: a function from the bytes of a field to its value.

    Subclass it and override :meth:`field`, :meth:`content`, :meth:`value` and :meth:`damaged`; for a function that is
    passed as ``decoders=``, also :meth:`settings`::

        class TestFlac(FieldCodecTests):
            @pytest.fixture
            def settings(self) -> dict[str, Any]:
                return {"decoders": {"flac": decode_flac}}

            @pytest.fixture
            def field(self) -> str:
                return "flac"
            ...
    """

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        """Return the dataset's settings for decoding the field, such as ``{"trusted": True}``."""
        return {}

    @pytest.fixture
    def field(self) -> str:
        """Return the name of the stored field, such as ``left.npy``."""
        raise NotImplementedError

    @pytest.fixture
    def content(self) -> bytes:
        """Return the bytes of an undamaged field."""
        raise NotImplementedError

    @pytest.fixture
    def value(self) -> Any:
        """Return the value that :meth:`content` stores."""
        raise NotImplementedError

    @pytest.fixture
    def damaged(self) -> Sequence[bytes]:
        """Return damaged contents, which must raise errors."""
        raise NotImplementedError

    @pytest.fixture
    def decode(self, field: str, settings: Mapping[str, Any]) -> Callable[..., list[Any]]:
        """Return a function that decodes the field of samples ``k0``, ``k1``, … as a dataset does."""

        def decode(*contents: bytes | None, **others: Any) -> list[Any]:
            samples = StoredSamples(
                {field: list(contents)},
                len(contents),
                describe=lambda row, fields: (f"k{row}", "a.tar"),
                list_keys=lambda: [f"k{row}" for row in range(len(contents))],
            )
            decoder = FieldDecoder(fields=field, **{**settings, **others})
            (column,) = decoder.decode_columns(samples, np.arange(len(contents), dtype=np.uint64), decoder.make_calls())
            return column

        return decode

    def test_the_value_depends_only_on_the_bytes(
        self, decode: Callable[..., list[Any]], content: bytes, value: Any
    ) -> None:
        for found in decode(content, bytes(bytearray(content)), content):
            np.testing.assert_equal(found, value)
            check_types(found, value)

    def test_values_can_be_changed_and_share_nothing(self, decode: Callable[..., list[Any]], content: bytes) -> None:
        parts = [part for value in (*decode(content, content), *decode(content)) for part in changeable_parts(value)]
        assert len(set(map(id, parts))) == len(parts), "a sample's transform may change its value"
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        assert all(array.flags.writeable for array in arrays), "torch.from_numpy warns about read-only arrays"
        assert not any(itertools.starmap(np.shares_memory, itertools.combinations(arrays, 2)))

    @pytest.mark.parametrize("content", [b"%d" % 2**64, b'{"a": [%d]}' % 2**64, b"[%d]" % 2**64])
    def test_a_codec_of_integers_of_any_size_is_unbounded(
        self, decode: Callable[..., list[Any]], field: str, content: bytes
    ) -> None:
        try:
            (value,) = decode(content)
        except Exception:  # Each decoder raises its own errors.
            return
        assert find_wide(value) is None or extension_of(field) in UNBOUNDED

    def test_a_missing_field_is_an_error_or_none(
        self, decode: Callable[..., list[Any]], field: str, content: bytes, value: Any
    ) -> None:
        found, missing = decode(content, None, missing=None)
        np.testing.assert_equal(found, value)
        assert missing is None
        with pytest.raises(SampleError, match=f"sample k1 in a.tar has no field '{field}'") as caught:
            decode(content, None)
        assert caught.value.row == 1

    def test_damaged_bytes_are_an_error_that_names_the_sample_and_take_little_memory(
        self, decode: Callable[..., list[Any]], field: str, content: bytes, damaged: Sequence[bytes], settings: Any
    ) -> None:
        error = Exception if "decoders" in settings else SampleError  # User decoders raise their own errors.
        for each in damaged:
            tracemalloc.start()
            try:
                with pytest.raises(error) as caught:
                    decode(content, each)
                assert tracemalloc.get_traced_memory()[1] < MAX_WASTED_BYTES + 10 * len(each)
            finally:
                tracemalloc.stop()
            shown = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert f"'{field}' of sample k1 in a.tar" in shown
