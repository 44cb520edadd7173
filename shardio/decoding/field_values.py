"""The values of fields other than the image: from a column of bytes to a column of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from shardio.errors import SampleError, mark_sample
from shardio.interruptions import let_through
from shardio.order import Words
from shardio.reading import StoredSamples
from shardio.transforms import Calls

Missing = Literal["error"] | None


def check_decoders(decoders: object, names: Sequence[str]) -> None:
    """Check the argument ``decoders``, given the names of a sample's values.

    Raises:
        TypeError: If it is not a mapping from names to callables.
        ValueError: If a name is not a requested field, or not one that has a decoder.
    """
    if not isinstance(decoders, Mapping) or not all(map(callable, decoders.values())):
        raise TypeError(f"decoders must map fields to functions, such as {{'flac': decode}}, got {decoders!r}")
    for name in decoders:
        if name in ("image", "label", "key"):
            raise ValueError(
                f"decoders has a function for {name!r}, which is not a stored field: request and decode the field by "
                "its extension, such as fields=('jpg',)"
            )
        if name not in names:
            raise ValueError(f"decoders has a function for {name!r}, but fields={tuple(names)!r} does not name it")


def decode_values(
    samples: StoredSamples, field: str, decode: Callable[[bytes], Any] | None, missing: Missing
) -> list[Any]:
    """Return the values of a field.

    Args:
        samples: n samples.
        field: The stored field.
        decode: shardio's decoder of the field; None returns the bytes.
        missing: ``error`` raises an error if a sample lacks the field; None gives it the value None.

    Raises:
        SampleError: If the field is missing or cannot be decoded.
    """
    values = list[Any]()
    contents = _contents(samples, field, missing)
    if decode is None:
        return contents
    try:
        values.extend(None if content is None else decode(content) for content in contents)
    except Exception as error:  # Each decoder raises its own errors.
        let_through(error)
        raise _undecodable(samples, len(values), field, error) from error
    return values


def call_decoder(
    decode: Callable[[bytes], Any], samples: StoredSamples, field: str, missing: Missing, calls: Calls, rng_keys: Words
) -> list[Any]:
    """Return the values that the user's own decoder makes of a field.

    Args:
        decode: The decoder.
        samples: n samples.
        field: The stored field.
        missing: As for :func:`decode_values`.
        calls: Makes the calls.
        rng_keys: uint64 [n], for the generators that the decoder draws from.

    Raises:
        SampleError: If the field is missing.
    """
    contents = _contents(samples, field, missing)
    try:
        return calls.call([lambda content: None if content is None else decode(content)], contents, rng_keys)
    except Exception as error:
        if calls.failed_row is not None:
            key, where = samples.describe(calls.failed_row, (field,))
            mark_sample(error, "decode", calls.failed_row, key, where, f"while decoding field {field!r} of sample")
        raise


def _contents(samples: StoredSamples, field: str, missing: Missing) -> list[bytes | None]:
    column = samples.columns[field]
    if missing == "error" and None in column:
        row = column.index(None)
        key, where = samples.describe(row)
        message = (
            f"sample {key} in {where} has no field {field!r}: request only fields that every sample has, or set "
            f"missing=None to get None instead{samples.remedy}"
        )
        raise SampleError(message, row=row, key=key, where=where)
    return list(column)


def _undecodable(samples: StoredSamples, row: int, field: str, error: Exception) -> Exception:
    key, where = samples.describe(row, (field,))
    if isinstance(error, MemoryError):  # The sample is not necessarily at fault.
        return MemoryError(f"out of memory while decoding field {field!r} of sample {key} in {where}")
    message = f"field {field!r} of sample {key} in {where} cannot be decoded: {str(error) or repr(error)}"
    return SampleError(message, row=row, key=key, where=where, stage="decode")
