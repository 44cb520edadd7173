"""Field codecs: the functions that decode a field's bytes, by the last extension in the field's name.

To add a codec, add a line to :data:`DECODERS`, and to :data:`UNBOUNDED` if it parses integers of any size.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from shardio.decoding.arrays import decode_npy, decode_npz
from shardio.images import decode_unconverted, decode_unconverted_pil, holds_images
from shardio.shards import LABEL_FIELD

if TYPE_CHECKING:
    from shardio.decoding.settings import FieldSettings


def decode_label(content: bytes) -> int:
    """Return a label from its ASCII digits.

    Raises:
        ValueError: If the content is not an integer, or does not fit in 64 bits.
    """
    if not re.fullmatch(rb"-?[0-9]+", content.strip()):
        raise ValueError(f"a label must be an integer in ASCII digits, got {content[:20]!r}")
    label = int(content)
    if not -(2**63) <= label < 2**63:
        raise ValueError(f"a label must fit in a signed 64-bit integer, got {content[:40]!r}")
    return label


def decode_msgpack(content: bytes) -> Any:
    """Return the value in a MessagePack file.

    Raises:
        ValueError: If it is damaged.
    """
    import msgpack  # It takes 2 ms.

    return msgpack.unpackb(content, strict_map_key=False)


def decode_safetensors(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays in a safetensors file.

    Raises:
        safetensors.SafetensorError: If it is damaged.
        ValueError: If it holds numbers of a type that numpy lacks.
    """
    import safetensors.numpy  # It takes 1 ms.

    try:
        return safetensors.numpy.load(content)
    except KeyError as error:  # Of safetensors' table of types.
        raise ValueError(
            f"it holds numbers of type {error.args[0]}, which numpy lacks: pass decoders= with safetensors.torch.load "
            "for this field"
        ) from error


DECODERS: dict[str, Callable[[bytes], Any]] = {
    LABEL_FIELD: decode_label,
    "json": json.loads,
    "txt": bytes.decode,
    "npy": decode_npy,
    "npz": decode_npz,
    "safetensors": decode_safetensors,
    "msgpack": decode_msgpack,
    "msg": decode_msgpack,
    "mp": decode_msgpack,
}
"""The decoder of each field, by the last extension in the field's name.

Image formats have decoders, too, which depend on the dataset's settings. Fields without a decoder stay bytes.
"""

UNBOUNDED = frozenset({"json"})
"""Fields whose values may contain integers of more than 64 bits, which tensors cannot hold."""

TRUSTED_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **DECODERS,
    "npy": partial(decode_npy, trusted=True),
    "npz": partial(decode_npz, trusted=True),
    "pkl": pickle.loads,
    "pickle": pickle.loads,
    "pyd": pickle.loads,
}
"""The decoders for data that is trusted to run code. The field names of pickles are WebDataset's."""


def choose_decoder(field: str, settings: FieldSettings) -> Callable[[bytes], Any] | None:
    """Return the decoder of a stored field, as a dataset's settings demand; None if it stays bytes."""
    if field == LABEL_FIELD and settings.labels is not None:
        return partial(_renumber, settings.labels)
    if holds_images(field):
        decode = decode_unconverted_pil if settings.decode == "pil" else decode_unconverted
        return partial(decode, orientation=settings.orientation, max_pixels=settings.max_pixels)
    return (TRUSTED_DECODERS if settings.trusted else DECODERS).get(extension_of(field))


def extension_of(field: str) -> str:
    """Return the last extension in a field's name: ``npy`` for ``mask.npy``."""
    return field.rpartition(".")[2]


def _renumber(labels: tuple[int, ...], content: bytes) -> int:
    label = decode_label(content)
    if not 0 <= label < len(labels):
        raise ValueError(f"label {label} is outside the dataset's {len(labels)} classes")
    return labels[label]
