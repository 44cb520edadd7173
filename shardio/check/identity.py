"""Identity: which sample is which, as one uint64 a sample.

A key is an integer, which is its own identity, or a string, whose identity is its xxh3-64. Where a batch
carries no keys, the content serves: xxh3-64 over all that the batch holds of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Ids = NDArray[np.uint64]

Key = Callable[[Any], Iterable[Hashable]] | str | int | None
"""How keys are found in a batch: a function of the batch, a field's name or place, or None."""


def key_ids(keys: Iterable[Hashable]) -> Ids:
    """Return the identities of keys, uint64 [n]. Integers are their own, all else is hashed as text."""
    if isinstance(keys, np.ndarray | range):
        return np.asarray(keys).astype(np.uint64)
    return np.array([_key_id(key) for key in keys], dtype=np.uint64)


def keys_in(batch: Any, key: Key) -> list[Hashable] | None:
    """Return the keys of a batch, or None if it has none: no ``key`` is given, and it is not made of keys alone.

    Raises:
        TypeError: If ``key`` does not fit the batch.
    """
    if key is None:
        return _as_keys(batch)
    try:
        found = key(batch) if callable(key) else batch[key]
    except (KeyError, IndexError, TypeError) as error:
        raise TypeError(
            f"there is nothing at key={key!r} in a batch that is a {type(batch).__name__}: give the place of its keys, "
            "their name, or a function of the batch"
        ) from error
    return list(found.tolist() if hasattr(found, "tolist") else found)


def content_ids(batch: Any) -> Ids:
    """Return the identities of a batch's samples by all their contents, uint64 [n].

    Args:
        batch: Tensors or arrays with the samples along their first dimension, and lists of values, nested in
            tuples, lists and dicts.
    """
    columns = list(_columns(batch))
    if not columns:
        raise TypeError(f"a batch that is a {type(batch).__name__} holds nothing to know samples by: give key=")
    ids = []
    for sample in range(len(columns[0])):
        digest = xxhash.xxh3_64()
        for column in columns:
            digest.update(_to_bytes(column[sample]))
        ids.append(digest.intdigest())
    return np.array(ids, dtype=np.uint64)


def _key_id(key: Hashable) -> int:
    if isinstance(key, int | np.integer):
        return int(key) % 2**64
    return xxhash.xxh3_64_intdigest(key if isinstance(key, bytes) else str(key).encode(errors="surrogateescape"))


def _as_keys(batch: Any) -> list[Hashable] | None:
    """Return a batch of strings or integers alone as keys."""
    if hasattr(batch, "tolist") and hasattr(batch, "ndim"):
        is_whole = batch.ndim == 1 and "int" in str(batch.dtype)
        return list(batch.tolist()) if is_whole else None
    if isinstance(batch, list | tuple) and all(isinstance(value, str | bytes | int) for value in batch):
        return list(batch)
    return None


def _columns(batch: Any) -> Iterator[Sequence[Any]]:
    """Yield what a batch holds, column by column, each with one value a sample."""
    if isinstance(batch, dict):
        for name in batch:
            yield from _columns(batch[name])
    elif hasattr(batch, "shape"):
        if batch.ndim > 0:
            yield batch
    elif isinstance(batch, list | tuple):
        if batch and all(isinstance(value, str | bytes | int | float | bool) for value in batch):
            yield batch
        else:
            for value in batch:
                yield from _columns(value)


def _to_bytes(value: Any) -> bytes:
    if hasattr(value, "numpy"):
        value = value.detach().cpu().contiguous().numpy()
    return value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
