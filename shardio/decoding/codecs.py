"""Decode the bytes of stored fields, each by the extension of its name, and verify datasets.

To add a codec, add a line to :data:`DECODERS`, and to :data:`UNBOUNDED` if it parses integers of any size.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SampleError, mark_sample
from shardio.images import (
    IMAGE_FIELDS,
    IMAGE_FORMATS,
    decode_image,
    decode_unconverted,
    decode_unconverted_pil,
    holds_images,
)
from shardio.order import Words
from shardio.process import let_through
from shardio.reading import StoredSamples
from shardio.shards import LABEL_FIELD
from shardio.transforms import Calls
from shardio.values import check_optional_integer, count

if TYPE_CHECKING:
    from shardio.decoding.fields import FieldDecoder
    from shardio.shards import DatasetSource, Problem
    from shardio.storage import StorageOptions


FieldCodec = Callable[[bytes], Any]
"""A function that decodes the bytes of a field to a value that depends only on these bytes.

If the bytes are damaged, the function raises an Exception, and does not allocate far more memory than the bytes occupy.
Users pass such functions as ``decoders=``. :mod:`shardio.testing.samples` has tests of codecs.
"""

Missing = Literal["error"] | None
"""The result for a sample that lacks a field: an error, or the value None."""

_LONG = re.compile(rb"[0-9]{19}")
"""A pattern for 19 consecutive digits. Text without a match holds no integer of more than 64 bits."""


_STORED_FIELDS: dict[str, tuple[str, ...]] = {"image": IMAGE_FIELDS, "label": (LABEL_FIELD,), "key": ()}
"""The stored fields that may hold a value, for each value that is not named after its stored field."""


def stored_fields_of(name: str) -> tuple[str, ...]:
    """Return the stored fields that may hold a value."""
    return _STORED_FIELDS.get(name, (name,))


def check_present(names: Sequence[str], present: Sequence[str], where: str) -> None:
    """Check that the samples of a dataset, which have the fields ``present``, can provide the named values.

    Raises:
        ValueError: If a field is missing.
    """
    for name in names:
        choices = stored_fields_of(name) or present
        if not set(choices) & set(present):
            derived = [value for value, stored in _STORED_FIELDS.items() if not stored or set(stored) & set(present)]
            raise ValueError(
                f"no sample of {where} has the field {name!r}: choose fields=... from "
                f"{', '.join((*sorted(derived), *present))}"
            )


def open_images(samples: StoredSamples, name: str, open_one: Callable[[bytes], Any]) -> list[Any]:
    """Open one image for each sample, from the first image field that is not empty.

    Args:
        samples: n samples.
        name: The name of the images' field: ``image`` for images of any format.
        open_one: A function that opens an image, or raises ValueError if the image is damaged.

    Raises:
        SampleError: If an image is missing, empty or damaged.
    """
    columns = [samples.columns[field] for field in stored_fields_of(name) if field in samples.columns]
    return [
        _open_image(samples, name, row, contents, open_one) for row, contents in enumerate(zip(*columns, strict=True))
    ]


def _open_image(
    samples: StoredSamples, name: str, row: int, contents: Sequence[bytes | None], open_one: Callable[[bytes], Any]
) -> Any:
    content = next(filter(None, contents), None)
    if content is None and b"" in contents:
        raise undecodable(samples, name, row, "it is empty (0 bytes)")
    if content is None:
        key, where = samples.describe(row)
        fields = stored_fields_of(name)
        lacking = f"none of the fields {', '.join(fields)}" if len(fields) > 1 else f"it lacks the field {name!r}"
        message = f"sample {key} in {where} has no image: {lacking}{samples.remedy}"
        raise SampleError(message, row=row, key=key, where=where)
    try:
        return open_one(content)
    except ValueError as error:
        let_through(error)
        raise undecodable(samples, name, row, error) from error


def undecodable(
    samples: StoredSamples, name: str, row: int, why: Exception | str, kind: str = "the image"
) -> SampleError:
    """Return the error for a sample whose image or other value cannot be decoded."""
    fields = [field for field in stored_fields_of(name) if field in samples.columns]
    present = [field for field in fields if samples.columns[field][row] is not None]
    opened = [field for field in present if samples.columns[field][row]] or present
    key, where = samples.describe(row, opened[:1])
    named = kind if name == "image" else f"{kind} {name!r}"
    message = f"{named} of sample {key} in {where} cannot be decoded: {str(why) or repr(why)}"
    return SampleError(message, row=row, key=key, where=where, stage="decode")


def check_decoders(decoders: object, names: Sequence[str]) -> None:
    """Check the argument ``decoders``, given the names of a sample's values.

    Raises:
        TypeError: If ``decoders`` is not a mapping from names to callables.
        ValueError: If a name is not a requested field, or not a stored field.
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


def choose_decoder(field: str, settings: FieldDecoder) -> FieldCodec | None:
    """Return the decoder of a stored field under a dataset's settings; None if the field remains bytes."""
    if field == LABEL_FIELD and settings.labels is not None:
        return partial(_renumber, settings.labels)
    if holds_images(field):
        decode = decode_unconverted_pil if settings.decode == "pil" else decode_unconverted
        return partial(decode, orientation=settings.orientation, max_pixels=settings.max_pixels)
    return (TRUSTED_DECODERS if settings.trusted else DECODERS).get(extension_of(field))


def decode_values(samples: StoredSamples, field: str, decode: FieldCodec | None, missing: Missing) -> list[Any]:
    """Return the values of a field.

    Args:
        samples: n samples.
        field: The stored field.
        decode: shardio's decoder of the field; None returns the bytes.
        missing: If a sample lacks the field, ``error`` raises an error, and None returns the value None.

    Raises:
        SampleError: If the field is missing or cannot be decoded.
    """
    contents = _contents(samples, field, missing)
    if decode is None:
        return contents
    values = list[Any]()
    try:
        values.extend(None if content is None else decode(content) for content in contents)
    except Exception as error:  # Each decoder raises its own errors.
        let_through(error)
        if isinstance(error, MemoryError):  # The sample is not necessarily at fault.
            key, where = samples.describe(len(values), (field,))
            raise MemoryError(f"out of memory while decoding field {field!r} of sample {key} in {where}") from error
        raise undecodable(samples, field, len(values), error, "field") from error
    return values


def call_decoder(
    decode: FieldCodec, samples: StoredSamples, field: str, missing: Missing, calls: Calls, rng_keys: Words
) -> list[Any]:
    """Return the values that a user decoder returns for a field.

    Args:
        decode: The decoder.
        samples: n samples.
        field: The stored field.
        missing: The effect of a missing field, as for :func:`decode_values`.
        calls: The object that makes the calls.
        rng_keys: uint64 [n], the rng keys that seed the decoder's random generators.

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


def find_wide(value: Any) -> int | None:
    """Return an integer of more than 64 bits in a value parsed from JSON, or None if there is none."""
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**63 else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((wide for part in parts if (wide := find_wide(part)) is not None), None)


def refuse_wide(samples: StoredSamples, field: str, values: Sequence[Any]) -> None:
    """Raise SampleError if the field of a sample holds an integer of more than 64 bits."""
    if extension_of(field) not in UNBOUNDED:
        return
    for row, (content, value) in enumerate(zip(samples.columns[field], values, strict=True)):
        if content is not None and _LONG.search(content) and (wide := find_wide(value)) is not None:
            key, where = samples.describe(row, (field,))
            message = (
                f"field {field!r} of sample {key} in {where} holds the integer {wide}, which does not fit in 64 bits "
                "(signed), so a tensor cannot hold it: store it as a string, or pass a collate_fn that does not "
                "convert it"
            )
            raise SampleError(message, row=row, key=key, where=where)


def extension_of(field: str) -> str:
    """Return the last extension in a field's name: ``npy`` for ``mask.npy``."""
    return field.rpartition(".")[2]


def _renumber(labels: tuple[int, ...], content: bytes) -> int:
    label = decode_label(content)
    if not 0 <= label < len(labels):
        raise ValueError(f"label {label} is outside the dataset's {count(len(labels), 'class', 'classes')}")
    return labels[label]


def decode_npy(content: bytes, *, trusted: bool = False) -> Any:
    """Return the array in an npy file, in native byte order, which torch requires.

    Unlike ``np.load``, this function refuses zip archives and bare pickles, and checks that the file holds all declared
    values before it allocates the array.

    Args:
        content: The bytes of the file.
        trusted: Whether objects may be unpickled.

    Raises:
        ValueError: If the file is damaged, or holds objects and is not trusted.
    """
    start = 10 + int.from_bytes(content[8:10], "little")
    if content[6:7] != b"\1":  # Versions 2 and 3 have a longer length field.
        start = 12 + int.from_bytes(content[8:12], "little")
    shape, is_fortran, dtype = _read_npy_header(content[:start])
    if dtype.hasobject:
        if not trusted:
            raise ValueError(
                "it holds Python objects, which can run code when unpickled: set trusted=True to unpickle them"
            )
    elif min(shape, default=0) < 0 or math.prod(shape) * max(dtype.itemsize, 1) > len(content) - start:
        raise ValueError(
            f"it declares an array of shape {shape!s:.200} and dtype {dtype!s:.200}, but only "
            f"{len(content) - start} bytes follow: the file is damaged or truncated"
        )
    num_values = math.prod(shape)
    is_plain = num_values * dtype.itemsize > 0 and not dtype.hasobject and dtype.subdtype is None
    if not is_plain or content[6:8] not in (b"\1\0", b"\2\0"):  # Version 3 encodes field names differently.
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=trusted)
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    array = np.frombuffer(content, dtype, num_values, start).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="))  # Unlike the file's bytes, a copy is writable.


def copy_arrays(contents: Sequence[bytes | None], destination: NDArray[Any]) -> bool:
    """Copy the arrays of npy files to the rows of an array, if the files have equal headers that fit the rows.

    Args:
        contents: The bytes of n files; None for a missing file.
        destination: [n, ...], with native byte order.

    Returns:
        Whether the arrays were copied. If not, :func:`decode_npy` decodes the files or says what is wrong.
    """
    if not contents or (first := contents[0]) is None or first[6:8] != b"\1\0":
        return False
    start = 10 + int.from_bytes(first[8:10], "little")
    header, size = first[:start], start + destination[0].nbytes
    if any(content is None or len(content) != size or not content.startswith(header) for content in contents):
        return False
    try:
        shape, is_fortran, dtype = _read_npy_header(header)
    except Exception as error:  # numpy evaluates the header.
        let_through(error)
        return False
    if is_fortran or dtype != destination.dtype or shape != destination.shape[1:]:
        return False
    strides = (size, *np.empty(shape, dtype).strides) if len(shape) else (size,)
    destination[...] = np.ndarray(destination.shape, dtype, b"".join(filter(None, contents)), start, strides)
    return True


def read_npy_header(content: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Return the offset, shape and dtype of the values in an npy file, given the file's first bytes.

    Raises:
        ValueError: If the file is not an npy file, or its header is damaged.
    """
    start = 10 + int.from_bytes(content[8:10], "little")
    shape, _, dtype = _read_npy_header(content[:start])
    return start, shape, dtype


@lru_cache(maxsize=256)
def _read_npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the first index varies fastest, and the dtype. Many files have the same header."""
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    # Version 3 differs from version 2 only in how it encodes field names.
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    return shape, is_fortran, dtype


def decode_npz(content: bytes, *, trusted: bool = False) -> dict[str, Any]:
    """Return the arrays in an npz file, by name. Arguments and errors are as in :func:`decode_npy`."""
    import zipfile  # The import takes 1 ms.

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return {
                name.removesuffix(".npy"): decode_npy(archive.read(name), trusted=trusted)
                for name in archive.namelist()
            }
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, EOFError) as error:
        # zipfile raises NotImplementedError for compression methods that it does not support.
        raise ValueError(f"it is not an intact npz file: {error}") from error


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
        ValueError: If the file is damaged.
    """
    import msgpack  # The import takes 2 ms.

    return msgpack.unpackb(content, strict_map_key=False)


def decode_safetensors(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays in a safetensors file.

    Raises:
        safetensors.SafetensorError: If the file is damaged.
        ValueError: If the file holds numbers of a type that numpy lacks.
    """
    import safetensors.numpy  # The import takes 1 ms.

    try:
        return safetensors.numpy.load(content)
    except KeyError as error:  # numpy has no type of this name.
        raise ValueError(
            f"it holds numbers of type {error.args[0]}, which numpy lacks: pass decoders= with safetensors.torch.load "
            "for this field"
        ) from error


DECODERS: dict[str, FieldCodec] = {
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

Decoders of image formats depend on the dataset's settings, so they are omitted. Fields without a decoder remain bytes.
"""

UNBOUNDED = frozenset({"json"})
"""Fields whose values may contain integers of more than 64 bits, which tensors cannot hold."""

TRUSTED_DECODERS: dict[str, FieldCodec] = {
    **DECODERS,
    "npy": partial(decode_npy, trusted=True),
    "npz": partial(decode_npz, trusted=True),
    "pkl": pickle.loads,
    "pickle": pickle.loads,
    "pyd": pickle.loads,
}
"""The decoders for trusted data only: decoding may run code. WebDataset uses the same field names for pickles."""


def verify(
    source: DatasetSource,
    *,
    deep: bool = False,
    num_workers: int | None = None,
    storage_options: StorageOptions | None = None,
) -> list[Problem]:
    """Compare a dataset's manifest, indexes and tars, and return all problems. Nothing is written.

    Each tar is read once: its size and digest, and each member's header and content hash, are compared with the tar's
    index. The result also names keys that occur twice, tars missing from the manifest, and unfinished packs.

    >>> problems = shardio.verify("out")  # doctest: +SKIP
    >>> for problem in problems:  # doctest: +SKIP
    ...     print(problem.kind, problem)

    Args:
        source: A packed directory, a manifest, a tar, a pattern of tars, a directory of tars, or a list of tars. Tars
            need indexes: create missing ones with ``shardio index``.
        deep: Whether to also decode every image.
        num_workers: The number of shards to read at a time; by default, up to 4.
        storage_options: Settings of the store of a remote source, as for :class:`shardio.ShardDataset`.

    Returns:
        The problems; an empty list if there are none.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
        ValueError: If ``num_workers`` is not positive, or a storage option is invalid.
    """
    # Imported here so that worker processes, which import this folder, start faster.
    from shardio.shards import find_problems
    from shardio.storage import make_direct_access

    num_workers = check_optional_integer("num_workers", num_workers, at_least=1)
    access = make_direct_access(storage_options)
    check_content = check_image if deep else None
    return list(find_problems(source, access, check_content=check_content, num_workers=num_workers))


def check_image(field: str, content: bytes) -> str | None:
    """Return the reason why an image cannot be decoded; None if it can be, or if the field does not hold images."""
    if not holds_images(field):
        return None
    # A mask is read with its stored values, because conversion to RGB may be impossible.
    decode = decode_image if field in IMAGE_FORMATS else decode_unconverted
    try:
        decode(content)
    except ValueError as error:
        let_through(error)
        return f"the image cannot be decoded: {error}"
    return None
