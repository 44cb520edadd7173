"""Identities of samples: one uint64 per sample.

An integer key from 0 to 2**63 - 1 is its own identity. All other keys are hashed to 2**63 and above, so the two kinds
never collide. Equal numbers (1 and 1.0) have the same identity, and so do a string and its UTF-8 bytes. A sample
without a key is identified by its content: the xxh3-64 hash of all its fields.
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
"""The way to find the keys in a batch: a function of the batch, or a field's name or index.

If None, the values of a batch of strings or integers are its keys, and the samples of other batches are identified by
their content.
"""

HASHED = 2**63
"""The bit that is set in the identity of every hashed key."""

ASK_FOR_KEY = "To identify samples, pass key= (--key) where their batches are read or recorded"

_REMEDY = "use an integer, a string, or a tuple of these"


def key_ids(keys: Iterable[Hashable]) -> Ids:
    """Return the identities of keys, uint64 [n].

    Raises:
        IdentityError: If a key cannot identify a sample, such as None, NaN or a bool.
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
    """Return the keys of a batch; None if ``key`` is None and the batch holds more than keys.

    Raises:
        IdentityError: If ``key`` does not fit the batch.
    """
    if key is None:
        return _as_keys(batch)
    try:
        found = key(batch) if callable(key) else _look_up(batch, key)
    except (KeyError, IndexError, TypeError) as error:
        raise IdentityError(
            f"found nothing at key={key!r} in a batch of type {type(batch).__name__}: pass the name or index of the "
            "field that holds the keys, or a function of the batch"
        ) from error
    return _as_list(found, key)


def _look_up(batch: Any, key: str | int) -> Any:
    """Return the field of a batch, which may be a namedtuple."""
    if isinstance(key, str) and isinstance(batch, tuple) and hasattr(batch, key):
        return getattr(batch, key)
    return batch[key]


def content_ids(batch: Any, *, is_collated: bool = False) -> Ids:
    """Return the identities of a batch's samples from their content, uint64 [n].

    Args:
        batch: Tensors or arrays whose first dimension is the sample, and lists of values, nested in tuples, lists and
            dicts.
        is_collated: Whether the batch is known to hold columns. If False, a list of images may be a list of samples.

    Raises:
        IdentityError: If the batch cannot be split into samples.
    """
    columns: list[Any] = []
    _add_columns(batch, columns)
    if not columns:
        _refuse_layout(f"a batch of type {type(batch).__name__} holds no data")
    if not is_collated and len(columns) > 1 and isinstance(batch, list | tuple) and all(map(_is_image_like, batch)):
        _refuse_layout(
            f"a {type(batch).__name__} of {len(batch)} arrays may hold {len(batch)} samples or {len(batch)} fields"
        )
    lengths = sorted({len(column) for column in columns})
    if len(lengths) > 1:
        _refuse_layout(f"the fields of a batch have different lengths ({', '.join(map(str, lengths))})")
    ids = []
    for sample in range(lengths[0]):
        digest = xxhash.xxh3_64()
        for column in columns:
            content = _to_bytes(column[sample])
            digest.update(b"%d:" % len(content))  # To tell ("ab", "c") from ("a", "bc").
            digest.update(content)
        ids.append(digest.intdigest())
    return np.array(ids, dtype=np.uint64)


def _refuse_layout(what: str) -> NoReturn:
    raise IdentityError(f"{what}, so samples cannot be identified by their content. {ASK_FOR_KEY}")


def _hash_text(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape")) | HASHED


def _key_id(key: Any) -> int:
    if getattr(key, "ndim", None) == 0:  # A scalar of numpy or torch.
        key = key.item()
    match key:
        case None | bool():
            raise IdentityError(f"{key} cannot be a sample's key, because it does not identify the sample: {_REMEDY}")
        case int():
            return key if 0 <= key < HASHED else xxhash.xxh3_64_intdigest(b"int %d" % key) | HASHED
        case float():
            if key != key:
                raise IdentityError(f"NaN cannot be the key of a sample, because it does not equal itself: {_REMEDY}")
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
        raise IdentityError(f"a {kind.__name__} cannot be the key of a sample: {_REMEDY}")
    return _hash_text(str(key))


def _as_keys(batch: Any) -> list[Hashable] | None:
    """Return the values of a batch of strings or integers as keys; None for other batches."""
    if isinstance(batch, str | bytes) or type(batch) is int:
        return [batch]  # One sample that is not collated.
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
    return type(value) is int or (getattr(value, "ndim", None) == 0 and "int" in str(value.dtype))


def _as_list(found: Any, key: Key) -> list[Hashable]:
    if isinstance(found, list):
        return found
    if isinstance(found, str | bytes | int | float):
        return [found]  # The key of one sample that is not collated.
    if hasattr(found, "tolist") and hasattr(found, "ndim"):
        if found.ndim == 2 and "int" in str(found.dtype):
            return [tuple(row) for row in found.tolist()]
        if found.ndim > 1:
            raise IdentityError(
                f"the values at key={key!r} have shape {list(found.shape)} and dtype {found.dtype}: a key must be one "
                "value per sample"
            )
        return [found.item()] if found.ndim == 0 else list(found.tolist())
    if isinstance(found, Mapping) or not isinstance(found, Iterable):
        raise IdentityError(f"the value at key={key!r} is a {type(found).__name__}: a key must be one value per sample")
    return list(found)


def _add_columns(batch: Any, columns: list[Any]) -> None:
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
        _refuse_layout(f"a batch holds a single {type(batch).__name__}, which is not one value per sample")


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
