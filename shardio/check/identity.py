"""Identity: which sample is which, as one uint64 a sample.

An integer key from 0 to 2**63 - 1 is its own identity. All other keys are hashed into the upper half, so that no text
has the identity of an integer. Keys that are equal in Python (1 and 1.0) have one identity, and so have a string and
its bytes. Where a batch carries no keys, the content serves: xxh3-64 over all that the batch holds of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import IdentityError

Ids = NDArray[np.uint64]

Key = Callable[[Any], Iterable[Hashable]] | str | int | None
"""How keys are found in a batch: a function of the batch, a field's name or place, or None."""

HASHED = 2**63
"""The bit that all identities have that are hashes."""


def key_ids(keys: Iterable[Hashable]) -> Ids:
    """Return the identities of keys, uint64 [n].

    Raises:
        IdentityError: If a key cannot tell samples apart: None, NaN, a truth value, or an object without a text of its
            own.
    """
    if isinstance(keys, range):
        keys = np.arange(keys.start, keys.stop, keys.step)
    keys = keys.tolist() if isinstance(keys, np.ndarray) and keys.dtype.kind not in "iu" else keys
    if not isinstance(keys, np.ndarray | list):
        keys = list(keys)
    kinds = {type(key) for key in keys} if isinstance(keys, list) else {int}
    if kinds == {str}:
        return np.array([_hash_text(key) for key in keys], dtype=np.uint64)  # type: ignore[arg-type]  # all are strings
    if kinds == {int}:
        numbers = np.asarray(keys)
        if numbers.dtype.kind in "iu" and (not len(numbers) or (numbers.min() >= 0 and numbers.max() < HASHED)):
            return numbers.astype(np.uint64)
    return np.array([_key_id(key) for key in keys], dtype=np.uint64)


def keys_in(batch: Any, key: Key) -> list[Hashable] | None:
    """Return the keys of a batch, or None if it has none: no ``key`` is given, and it is not made of keys alone.

    Raises:
        IdentityError: If ``key`` does not fit the batch.
    """
    if key is None:
        return _as_keys(batch)
    try:
        found = key(batch) if callable(key) else _look_up(batch, key)
    except (KeyError, IndexError, TypeError) as error:
        raise IdentityError(
            f"there is nothing at key={key!r} in a batch that is a {type(batch).__name__}: give the place of its keys, "
            "their name, or a function of the batch"
        ) from error
    return _as_list(found, key)


def _look_up(batch: Any, key: str | int) -> Any:
    """Return what lies at a place or a name in a batch, which may be a namedtuple."""
    if isinstance(key, str) and isinstance(batch, tuple) and hasattr(batch, key):
        return getattr(batch, key)
    return batch[key]


def content_ids(batch: Any, *, is_collated: bool = False) -> Ids:
    """Return the identities of a batch's samples by all their contents, uint64 [n].

    Args:
        batch: Tensors or arrays with the samples along their first dimension, and lists of values, nested in
            tuples, lists and dicts.
        is_collated: Whether the batch is known to hold columns. Otherwise a list of equal images may also be a list of
            samples.

    Raises:
        IdentityError: If it cannot be seen where the samples lie in the batch.
    """
    columns: list[Any] = []
    _add_columns(batch, columns)
    if not columns:
        _refuse_layout(f"a batch that is a {type(batch).__name__} holds nothing to know samples by")
    if not is_collated and len(columns) > 1 and isinstance(batch, list | tuple) and all(map(_is_image_like, batch)):
        _refuse_layout(
            f"a {type(batch).__name__} of {len(batch)} arrays may hold that many samples or that many fields"
        )
    lengths = sorted({len(column) for column in columns})
    if len(lengths) > 1:
        _refuse_layout(f"the fields of a batch have different lengths ({', '.join(map(str, lengths))})")
    ids = []
    for sample in range(lengths[0]):
        digest = xxhash.xxh3_64()
        for column in columns:
            content = _to_bytes(column[sample])
            digest.update(b"%d:" % len(content))  # So that ("ab", "c") is not ("a", "bc").
            digest.update(content)
        ids.append(digest.intdigest())
    return np.array(ids, dtype=np.uint64)


def _refuse_layout(what: str) -> NoReturn:
    raise IdentityError(f"{what}, so samples cannot be known by their content: give key=")


def _hash_text(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape")) | HASHED


def _key_id(key: Any) -> int:
    if getattr(key, "ndim", None) == 0:  # A number of numpy's or torch's.
        key = key.item()
    match key:
        case None | bool():
            raise IdentityError(f"{key} is given as the key of a sample, but does not identify it: {_REMEDY}")
        case int():
            return key if 0 <= key < HASHED else xxhash.xxh3_64_intdigest(b"int %d" % key) | HASHED
        case float():
            if key != key:
                raise IdentityError(f"NaN is given as the key of a sample, and equals nothing: {_REMEDY}")
            return _key_id(int(key)) if key.is_integer() else xxhash.xxh3_64_intdigest(repr(key).encode()) | HASHED
        case str():
            return _hash_text(key)
        case bytes():
            return xxhash.xxh3_64_intdigest(key) | HASHED
        case tuple():
            parts = np.array([_key_id(part) for part in key], dtype=np.uint64).tobytes()
            return xxhash.xxh3_64_intdigest(b"tuple " + parts) | HASHED
    kind = type(key)
    texts: tuple[Any, ...] = (kind.__str__, kind.__repr__)
    if not isinstance(key, Hashable) or texts == (object.__str__, object.__repr__):
        raise IdentityError(f"a {kind.__name__} is given as the key of a sample, and is none: {_REMEDY}")
    return _hash_text(str(key))


_REMEDY = "give keys that are integers, text or tuples of these, one a sample"


def _as_keys(batch: Any) -> list[Hashable] | None:
    """Return a batch of strings or integers alone as keys."""
    if isinstance(batch, str | bytes) or type(batch) is int:
        return [batch]  # One sample, not collated.
    if hasattr(batch, "tolist") and hasattr(batch, "ndim"):
        name = str(batch.dtype)
        is_key = "int" in name or getattr(batch.dtype, "kind", "") in ("S", "U")
        return _as_list(batch, None) if is_key and batch.ndim <= 1 else None
    if isinstance(batch, list | tuple):
        kinds = {type(value) for value in batch}
        if all(issubclass(kind, str | bytes) for kind in kinds) or kinds == {int} or all(map(_is_integer, batch)):
            return list(batch)
    return None


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer of Python's, or a single one of numpy's or torch's."""
    return type(value) is int or (getattr(value, "ndim", None) == 0 and "int" in str(value.dtype))


def _as_list(found: Any, key: Key) -> list[Hashable]:
    """Return what was found at ``key`` as one key a sample."""
    if isinstance(found, list):
        return found
    if isinstance(found, str | bytes | int | float):
        return [found]  # The key of one sample, not collated.
    if hasattr(found, "tolist") and hasattr(found, "ndim"):
        if found.ndim == 2 and "int" in str(found.dtype):
            return [tuple(row) for row in found.tolist()]
        if found.ndim > 1:
            raise IdentityError(
                f"what lies at key={key!r} has the shape {list(found.shape)} and the type {found.dtype}: a key is one "
                f"value "
                "a sample"
            )
        return [found.item()] if found.ndim == 0 else list(found.tolist())
    if isinstance(found, Mapping) or not isinstance(found, Iterable):
        raise IdentityError(f"what lies at key={key!r} is a {type(found).__name__}: a key is one value a sample")
    return list(found)


def _add_columns(batch: Any, columns: list[Any]) -> None:
    """Add what a batch holds, column by column, each with one value a sample."""
    if isinstance(batch, Mapping):
        for name in batch:
            _add_columns(batch[name], columns)
    elif hasattr(batch, "shape") and batch.ndim > 0:
        columns.append(batch)
    elif isinstance(batch, list | tuple):
        kinds = {type(value) for value in batch}
        is_number = bool(kinds) and all(issubclass(kind, int | float) for kind in kinds)
        if is_number or (kinds and all(issubclass(kind, str | bytes) for kind in kinds)):
            columns.append(batch)
        else:
            for value in batch:
                _add_columns(value, columns)
    elif batch is not None:
        _refuse_layout(f"a batch holds a single {type(batch).__name__} beside or in place of columns")


def _is_image_like(value: Any) -> bool:
    return hasattr(value, "shape") and value.ndim > 1


def _to_bytes(value: Any) -> bytes:
    if hasattr(value, "numpy"):
        value = value.detach().cpu().contiguous()
        value = (value.view(dtype=_int16()) if "bfloat16" in str(value.dtype) else value).numpy()
    return value.tobytes() if hasattr(value, "tobytes") else repr(value).encode(errors="surrogateescape")


def _int16() -> Any:
    import torch

    return torch.int16
