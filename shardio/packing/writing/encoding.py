"""Encode values as the contents of fields."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from shardio.packing.jpegs import DEFAULT_QUALITY
from shardio.packing.names import check_key, check_name
from shardio.sample import Sample
from shardio.shards import MAX_MEMBER, TOO_LARGE
from shardio.values import check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEncoder:
    """Encodes values by the last suffix of the field's name. Bytes are stored as they are.

    Attributes:
        classes: The class names by label; empty if labels have no names.
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
                f"field {field!r} of sample {key!r} would be pickled, and a pickle can run any code when it is read: "
                "store the value as json, npy or txt, or pass bytes that you have pickled"
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
    """Return a sample with the contents of its fields.

    Args:
        encoder: Encodes the values.
        sample: The key, as ``__key__``, and the values by field. Other names that start with ``__`` are ignored.

    Raises:
        TypeError: If a field cannot hold its value.
        ValueError: If the key or the name of a field would be read differently, or a value is out of range.
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
    """Encode uint8 [height, width, 3], or for PNG also uint16 and [height, width]."""
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
            raise ValueError(f"{value!r} is not one of the {len(classes)} classes: add it to classes=")
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
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()


_PILLOW_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}

_PICKLES = {"pkl", "pickle", "pyd", "pth", "pt"}
"""Suffixes under which other tools pickle values."""

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
"""For each suffix, a function that encodes a value, and what it takes."""
