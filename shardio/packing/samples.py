"""Create samples that readers recover unchanged: check keys and field names, encode values, and find duplicate keys."""

from __future__ import annotations

import io
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from unicodedata import category

import numpy as np

from shardio.sample import Sample
from shardio.shards import MAX_MEMBER, TOO_LARGE, ShardTable, join_name, read_keys, split_name
from shardio.storage import Location
from shardio.values import check_integer, count

DEFAULT_QUALITY = 90
"""The default quality of encoded JPEGs and WebPs."""

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""The modes that Pillow stores losslessly in a PNG. Pillow stores most other modes losslessly in a TIFF."""


def check_name(key: object, field: object) -> tuple[str, str]:
    """Check that readers of the tar recover a key and a field name unchanged, and return them.

    Raises:
        TypeError: If the key or the field name is not a string.
        ValueError: If readers would split the member's name differently, or the key is not a relative path. The message
            suggests a valid name.
    """
    key = check_key(key)
    return key, check_field(key, field)


def check_field(key: str, field: object) -> str:
    """Check that readers recover a key and a field name unchanged, and return the field name.

    Args:
        key: The sample's key, which may come from another tool.
        field: The field name.

    Raises:
        TypeError: If the field name is not a string.
        ValueError: If the field name is invalid.
    """
    if not isinstance(field, str):
        raise TypeError(f"the field names of sample {key!r} must be strings such as 'jpg', got {field!r}")
    if not field or "/" in field or not _is_printable(field):
        raise ValueError(
            f"the field name {field!r} of sample {key!r} is empty, or contains a slash, a control character or a "
            "surrogate: use a file suffix such as 'jpg' or 'seg.png'"
        )
    if field != field.lower():
        raise ValueError(
            f"the field name {field!r} of sample {key!r} contains capital letters, which readers convert to lower "
            f"case: use {field.lower()!r}"
        )
    if split_name(join_name(key, field)) != (key, field):
        raise ValueError(f"field {field!r} of sample {key!r} would be read as {split_name(join_name(key, field))}")
    return field


def check_key(key: object) -> str:
    """Check a key and return it.

    Raises:
        TypeError: If the key is not a string.
        ValueError: If the key is invalid.
    """
    if not isinstance(key, str):
        raise TypeError(f"__key__ must be a string such as 'cats/0001', got {key!r}")
    folder, _, base = key.rpartition("/")
    if not base:
        raise ValueError(f"the key {key!r} is empty or ends in a slash: use a name such as 'cats/0001'")
    if "." in base:
        raise ValueError(
            f"the key {key!r} has a dot after its last slash. A key ends at the first such dot, so the rest would be "
            f"read as part of the field's name: use {folder + '/' * bool(folder) + base.replace('.', '_')!r}"
        )
    if not _is_printable(key):
        raise ValueError(f"the key {key!r} contains a control character or a surrogate: remove it")
    if key.startswith("/") or {"", ".", ".."} & set(key.split("/")):
        raise ValueError(f"the key {key!r} is not a plain relative path: use a key such as 'cats/0001'")
    if split_name(join_name(key, "x")) is None:
        raise ValueError(f"the key {key!r} starts with a name such as __meta__, which readers skip: use another name")
    return key


def _is_printable(text: str) -> bool:
    return (text.isascii() and text.isprintable()) or not any(category(letter) in ("Cc", "Cs") for letter in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEncoder:
    """An encoder of values according to the last suffix of the field's name. Bytes are stored as they are.

    Attributes:
        classes: The class names, indexed by label, or () if labels have no names.
        quality: The quality of JPEG and WebP images, 1 to 100.
    """

    classes: tuple[str, ...] = ()
    quality: int = DEFAULT_QUALITY

    def encode(self, key: str, field: str, value: Any) -> bytes:
        """Return the content of a field.

        Args:
            key: The sample's key, for messages.
            field: The field's name.
            value: Bytes, or a value that the field's last suffix allows.

        Raises:
            TypeError: If the field cannot hold the value.
            ValueError: If the value is out of range, or the content is too large.
        """
        content = self._encode(key, field, value)
        if len(content) > MAX_MEMBER:
            raise ValueError(f"field {field!r} of sample {key!r} has {len(content)} bytes, {TOO_LARGE}")
        return content

    def _encode(self, key: str, field: str, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        suffix = field.rpartition(".")[2]
        if suffix in _PICKLES:
            raise TypeError(
                f"field {field!r} of sample {key!r} would be pickled, and a pickle can run arbitrary code when it is "
                "read: store the value as json, npy or txt, or pass bytes that you have pickled yourself"
            )
        if suffix not in _ENCODERS:
            _refuse(key, field, value, f"pass bytes, or use one of the suffixes {', '.join(_ENCODERS)}")
        encode, takes = _ENCODERS[suffix]
        try:
            return encode(self, suffix, value)
        except TypeError as error:
            _refuse(key, field, value, f"pass {takes}, or bytes", error)
        except ValueError as error:
            raise ValueError(f"field {field!r} of sample {key!r}: {error}") from error


def encode_sample(encoder: ValueEncoder, sample: Mapping[str, Any]) -> Sample:
    """Encode the values of a sample, and return the sample with the contents of its fields.

    Args:
        encoder: Encodes the values.
        sample: The key, as ``__key__``, and the values by field. Other names that start with ``__`` are ignored.

    Raises:
        TypeError: If a field cannot hold its value.
        ValueError: If readers would read the key or a field name differently, or a value is out of range.
    """
    if "__key__" not in sample:
        raise ValueError(f"a sample needs '__key__', a name such as 'cats/0001', got {', '.join(sample)}")
    key = check_key(sample["__key__"])
    names = [name for name in sample if not str(name).startswith("__")]
    if not names:
        raise ValueError(f"sample {key!r} has no fields: add one, such as 'jpg'")
    fields = {name: encoder.encode(*check_name(key, name), sample[name]) for name in names}
    return Sample(key=key, fields=dict(sorted(fields.items())), origin=key)


def _refuse(key: str, field: str, value: Any, remedy: str, cause: Exception | None = None) -> NoReturn:
    of_array = f" of {value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else ""
    why = f" ({cause})" if cause is not None and str(cause) else ""
    raise TypeError(
        f"field {field!r} of sample {key!r} cannot hold a value of type {type(value).__name__}{of_array}{why}: {remedy}"
    ) from cause


def _encode_image(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    """Encode an array: uint8 [height, width, 3], and for PNG also uint16 and [height, width]."""
    if not isinstance(value, np.ndarray) or value.dtype not in (np.uint8, np.uint16):
        raise TypeError
    if not (value.ndim == 3 and value.shape[2] == 3) and not (value.ndim == 2 and suffix == "png"):
        raise TypeError
    if value.dtype == np.uint16:
        if suffix != "png":
            raise TypeError
        from shardio.images import encode_png

        return encode_png(value)
    from PIL import Image

    file = io.BytesIO()
    options: dict[str, Any] = {} if suffix == "png" else {"quality": encoder.quality}
    Image.fromarray(np.ascontiguousarray(value)).save(file, _PILLOW_FORMATS[suffix], **options)
    return file.getvalue()


def _encode_label(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    classes = encoder.classes
    if isinstance(value, str):
        if not classes:
            raise TypeError("class names need classes=")
        if value not in classes:
            raise ValueError(
                f"{value!r} is not among the {count(len(classes), 'class', 'classes')}: add it to classes="
            )
        return b"%d" % classes.index(value)
    return b"%d" % check_integer("the label", value, at_least=0, below=len(classes) or None)


def _encode_json(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    return json.dumps(value).encode()


def _encode_text(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return value.encode()


def _encode_array(encoder: ValueEncoder, suffix: str, value: Any) -> bytes:
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError
    return encode_array(value)


_PILLOW_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}

_PICKLES = {"pkl", "pickle", "pyd", "pth", "pt"}
"""Suffixes that other tools use for pickled values."""

_IMAGE = "an array, uint8 [height, width, 3]"

_ENCODERS: Mapping[str, tuple[Callable[[ValueEncoder, str, Any], bytes], str]] = {
    "jpg": (_encode_image, _IMAGE),
    "jpeg": (_encode_image, _IMAGE),
    "png": (_encode_image, "an array, uint8 or uint16, [height, width, 3] or [height, width]"),
    "webp": (_encode_image, _IMAGE),
    "cls": (_encode_label, "an integer, or a class name if you pass classes="),
    "json": (_encode_json, "a value that json.dumps accepts"),
    "txt": (_encode_text, "a string"),
    "npy": (_encode_array, "a numpy array without Python objects"),
}
"""For each suffix, a function that encodes a value, and a description of the values that it accepts."""


def dump_json(values: Mapping[str, Any]) -> bytes:
    """Return values as JSON in UTF-8. Dates become ISO 8601 text, arrays become lists, and NaN becomes null.

    Raises:
        ValueError: If a value has no JSON form.
    """
    return json.dumps(_plain("", values), ensure_ascii=False, allow_nan=False).encode()


def _plain(name: str, value: Any) -> Any:
    match value:
        case float():
            return None if math.isnan(value) else value
        case None | bool() | int() | str():
            return value
        case Mapping():
            return {str(key): _plain(f"{name}.{key}" if name else str(key), each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(name, each) for each in value]
        case np.ndarray() | np.generic():
            return _plain(name, value.tolist())
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise ValueError(f"{name!r} has a value of type {type(value).__name__}, which has no JSON form")


def encode_pixels(image: Any) -> bytes:
    """Return a Pillow image as a PNG, or as a TIFF if PNG does not support its mode. Both formats are lossless.

    Raises:
        OSError: If neither format supports the image's mode.
    """
    file = io.BytesIO()
    image.save(file, "PNG" if image.mode in _PNG_MODES else "TIFF")
    return file.getvalue()


def encode_array(array: Any) -> bytes:
    """Return an array as a ``.npy`` file.

    Raises:
        ValueError: If the array holds Python objects.
    """
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def encode_tokens(values: Any, dtype: str) -> bytes:
    """Return tokens as a ``.npy`` file.

    Args:
        values: A sequence of integers.
        dtype: The type of the tokens in the file, ``uint16`` or ``int32``.

    Raises:
        ValueError: If the values are not a sequence of integers, or a token does not fit in the type.
    """
    tokens = np.asarray(values)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(
            f"tokens must be a one-dimensional sequence of integers, got {type(values).__name__} of shape "
            f"{tokens.shape} and dtype {tokens.dtype}"
        )
    limits = np.iinfo(dtype)
    if tokens.size and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
        wrong = tokens[(tokens < limits.min) | (tokens > limits.max)][0]
        remedy = "--token-dtype int32 (token_dtype='int32')" if dtype == "uint16" else "smaller numbers"
        raise ValueError(f"the token {wrong} does not fit in {dtype}: use {remedy}")
    return encode_array(tokens.astype(dtype, copy=False))


_START = 1024


class KeyHashes:
    """A set of 64-bit hashes that uses 16 to 32 bytes for each hash, whereas a Python set uses about 70 bytes."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * _START))  # Open addressing. 0 means empty.
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, key_hash: int) -> bool:
        """Add a hash. Return whether the hash is new."""
        if 2 * self._num >= len(self._table):
            self._grow()
        if not _place(self._table, key_hash or 1):
            return False
        self._num += 1
        return True

    def _grow(self) -> None:
        table = array("Q", bytes(16 * len(self._table)))
        for value in self._table:
            if value:
                _place(table, value)
        self._table = table


def _place(table: array[int], value: int) -> bool:
    """Insert a value into a table. Return False if the table already contains the value."""
    mask = len(table) - 1
    place = value & mask
    while found := table[place]:
        if found == value:
            return False
        place = (place + 1) & mask
    table[place] = value
    return True


def find_duplicate(tables: Sequence[ShardTable]) -> tuple[str, Location, Location] | None:
    """Return a key that two samples in the datasets share, and their tars, or None if all keys differ.

    Only the indexes are read. The hash of each key uses 8 bytes of memory, and 16 bytes during sorting.

    Raises:
        FormatError: If an index is damaged.
    """
    tars = [tar for table in tables for tar in table.tars]
    indexes = [index for table in tables for index in table.indexes]
    hashes = [read_keys(index).hash_all() for index in indexes]
    together = np.sort(np.concatenate([np.zeros(0, np.uint64), *hashes]))
    suspects = np.unique(together[1:][together[1:] == together[:-1]])
    if not len(suspects):
        return None
    first = dict[str, Location]()
    for tar, index, of_shard in zip(tars, indexes, hashes, strict=True):
        rows = np.flatnonzero(np.isin(of_shard, suspects)).tolist()
        if not rows:
            continue
        keys = read_keys(index)
        for row in rows:
            key = keys.text(row)
            if key in first:
                return key, first[key], tar
            first[key] = tar
    return None
