"""Open or write a shard, which is a tar and its index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple, NoReturn

import numpy as np
import xxhash

from shardio.errors import FormatError, SampleError, StaleIndexError
from shardio.process import let_through
from shardio.sample import Sample
from shardio.shards.index import (
    INDEX_FORMAT,
    INDEX_SUFFIX,
    SCATTERED_FORMAT,
    IndexHeader,
    decode_key,
    find_scattered,
    index_location,
    read_header,
)
from shardio.shards.manifest import ShardEntry, make_entry
from shardio.shards.shard_index import ShardIndex, TarHeaders, digest_headers
from shardio.shards.tar import (
    BLOCK,
    GZIP_ERRORS,
    TOO_LARGE,
    Ints,
    StoredSample,
    TarWriter,
    decompress,
    header_fits,
    join_name,
    make_header,
    split_name,
)
from shardio.storage import PIECE, Location, StoredFile, parse_location, read_pieces

PACKED_NAME = re.compile(r"shard-([0-9]{5}-)?[0-9]{6,}\.tar")
"""The names that ``pack`` and ``ShardWriter`` give to shards."""

GZIP = "gzip"
"""The value of an index's ``compression`` if the tar is compressed."""

_COMPRESSED_NAME = re.compile(r".+\.(tar\.gz|tgz)", re.IGNORECASE)

MAX_FIELDS = 1024
"""The maximum number of fields. A tar with more fields does not follow WebDataset's naming."""

MAX_EMPTY = 64
"""The maximum number of entries in an index per member of its tar. Surplus entries stand for missing fields."""

MAX_CELLS = 2**18
"""The number of entries that an index may always have, however few members its tar has."""


def describe_offset(tar: StoredFile, offset: int) -> str:
    """Return the location of a byte as text."""
    return f"{tar.location} at byte {offset}"


class Shard:
    """A tar and its index, open for reading. The context manager closes both files.

    Args:
        tar: The location of the tar.
        index: The location of the tar's index.

    Raises:
        FileNotFoundError: If the tar does not exist.
        FormatError: If the index does not exist or is damaged.
        StaleIndexError: If the index belongs to a different tar.
    """

    def __init__(self, tar: Location, index: Location) -> None:
        self.tar = open_tar(tar, read_header(index)) if is_compressed(tar) else tar.open()
        try:
            self.index = ShardIndex(index, self.tar)
        except BaseException:  # Ctrl-C must not leave the tar open.
            self.tar.close()
            raise
        self._names_are_plain = True

    @property
    def entry(self) -> ShardEntry:
        """The shard's entry in a manifest."""
        return make_entry(self.tar.location.name, self.index.header)

    def describe(self, sample: int, fields: Iterable[str]) -> tuple[str, str]:
        """Return a sample's key, and the sample's location as text."""
        starts, _, _ = self.index.locate(np.array([sample]), tuple(fields))
        found = starts[starts >= 0]
        return self.index.key(sample), describe_offset(self.tar, int(found.min()) if len(found) else 0)

    def let_store_errors_through(self, error: OSError | EOFError) -> None:
        """Raise the error if its cause is a failing store or an unwritable cache, not a damaged sample."""
        if not self.tar.is_local and not isinstance(error, FileNotFoundError | EOFError):
            raise error

    def discard(self, sample: int, fields: Sequence[str]) -> bool:
        """Remove a damaged sample from the cache. Return whether another read may return different bytes."""
        starts, stops, _ = self.index.locate(np.array([sample]), tuple(fields))
        found = False
        for start, stop in zip(starts[starts >= 0].tolist(), stops[starts >= 0].tolist(), strict=True):
            found |= self.tar.discard(start - BLOCK, stop)
        return found

    def raise_too_large(self, sample: int, row: int, field: str, num_bytes: int) -> NoReturn:
        """Raise SampleError for a field that is too large to be read."""
        key, origin = self.describe(sample, (field,))
        message = f"field {field!r} of sample {key} in {origin} has {num_bytes} bytes, {TOO_LARGE}"
        raise SampleError(message, row=row, key=key, where=origin)

    def find_unreadable(self, samples: Ints, fields: Sequence[str], first_row: int) -> None:
        """Read samples one by one, and raise SampleError for the first sample that cannot be read.

        Args:
            samples: int64 [n], indices in the shard.
            fields: The names of the fields to read.
            first_row: The row of the first sample in a request.
        """
        starts, stops, _ = self.index.locate(samples, tuple(fields))
        for row, field_index in np.argwhere(starts >= 0).tolist():
            try:
                self.tar.read(int(starts[row, field_index]) - BLOCK, int(stops[row, field_index]))
            except (OSError, EOFError) as error:  # noqa: PERF203  # The first error ends the loop.
                let_through(error)
                self.let_store_errors_through(error)
                key, origin = self.describe(int(samples[row]), fields)
                message = f"sample {key} cannot be read from {origin}: {error}"
                raise SampleError(message, row=first_row + row, key=key, where=origin) from error

    def compare(
        self, row: int, start: int, key: bytes, field: str, header: bytes, content: bytes, expected_hash: int
    ) -> None:
        """Compare a field of a sample with the index after a quick comparison has failed.

        Args:
            row: The sample's row in a request.
            start: The offset of the content in the tar.
            key: The sample's key.
            field: The name of the field.
            header: The tar header before the content.
            content: The content.
            expected_hash: The xxh3-64 of the content according to the index.

        Raises:
            SampleError: If the sample is damaged.
            StaleIndexError: If the tar has a different member at the indexed offset.
        """
        if not header_fits(header, key, f".{field}".encode(errors="surrogateescape"), len(content)):
            self._doubt_name(row, start, len(content), key, field, header)
        if (found := xxhash.xxh3_64_intdigest(content)) != expected_hash:
            raise self._damaged(
                row,
                key,
                start,
                f"field {field!r} of sample {{}} is damaged: its {len(content)} bytes have xxh3-64 {found:016x}, "
                f"expected {expected_hash:016x} from {self.index.location}. Download the shard again, or pack the "
                "dataset again. If shardio did not pack this tar, and it was changed on purpose, delete its index",
            )

    def _damaged(self, row: int, raw_key: bytes, start: int, message: str) -> SampleError:
        """Return an error with ``{}`` in the message replaced by the sample's key and location."""
        key, where = decode_key(raw_key), describe_offset(self.tar, start)
        return SampleError(message.replace("{}", f"{key} in {where}", 1), row=row, key=key, where=where)

    def _doubt_name(self, row: int, start: int, num_bytes: int, raw_key: bytes, field: str, header: bytes) -> None:
        if not self._names_are_plain:  # Some archivers write an extended header for every member.
            return
        from shardio.shards.tar_scan import find_member, is_header  # tar_scan imports tarfile (4 ms).

        member, parts = find_member(self.tar, start), (decode_key(raw_key), field)
        has_name = member is not None and split_name(member[0]) == parts
        if has_name and member is not None and member[1] == num_bytes:
            self._names_are_plain = False
            return
        if member is None and not is_header(header):
            message = (
                f"the tar header before field {field!r} of sample {{}} is damaged: download the shard again, or pack "
                "the dataset again"
            )
            raise self._damaged(row, raw_key, start, message)
        found = "a different member" if member is None else member[0]
        sizes = f" with {member[1]} bytes instead of {num_bytes}" if has_name and member is not None else ""
        raise StaleIndexError(
            f"field {field!r} of sample {decode_key(raw_key)} is expected in {describe_offset(self.tar, start)}, but "
            f"the tar holds {found} there{sizes}: it has changed since {self.index.location} was created. "
            "Download the shard and its index again, or pack the dataset again. If shardio did not pack this tar, "
            "delete the index instead"
        )

    def close(self) -> None:
        """Close both files."""
        self.index.close()
        self.tar.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_index(
    location: Location,
    tar: TarHeaders,
    samples: Sequence[StoredSample],
    digest: str,
    version: str | None = None,
    compression: str | None = None,
) -> None:
    """Write the index of a tar.

    Args:
        location: The location of the index.
        tar: The finished tar, or the headers that the index needs.
        samples: The tar's samples, in the order of their first members.
        digest: xxh3-128 of the tar, in hexadecimal.
        version: The tar's version, if shardio did not pack it.
        compression: ``gzip`` if the tar is compressed.

    Raises:
        FormatError: If the tar has more fields than an index can hold.
        OSError: If the index cannot be written.
    """
    import safetensors.numpy  # Reading samples does not need safetensors.

    fields = tuple(sorted({field for sample in samples for field in sample.fields}))
    if len(fields) > MAX_FIELDS:
        raise FormatError(
            f"{tar.location} has {len(fields)} different fields, but an index holds at most {MAX_FIELDS}: name its "
            "members key.field, as WebDataset expects"
        )
    field_indices = {field: i for i, field in enumerate(fields)}
    members = [
        (field_indices[name], row, field) for row, sample in enumerate(samples) for name, field in sample.fields.items()
    ]
    shape = len(fields), len(samples)
    if shape[0] * shape[1] > MAX_EMPTY * len(members) + MAX_CELLS:
        raise FormatError(
            f"{tar.location} has {shape[0]} different fields, but a sample has only {len(members) / shape[1]:.1f} "
            "of them on average: its index would be too large. Name its members key.field, as WebDataset expects"
        )
    offset, size = np.full(shape, -1, "<i8"), np.full(shape, -1, "<i8")
    content_hash = np.zeros(shape, "<u8")
    if members:
        places = tuple(np.array(each) for each in zip(*((i, row) for i, row, _ in members), strict=True))
        offset[places] = [field.offset for _, _, field in members]
        size[places] = [field.size for _, _, field in members]
        content_hash[places] = np.array([field.hash for _, _, field in members], "<u8")
    keys = [sample.key.encode(errors="surrogateescape") for sample in samples]
    num_scattered = int(np.count_nonzero(find_scattered(offset)))
    has_format_1 = version is None and not num_scattered
    header = IndexHeader(
        format=INDEX_FORMAT if has_format_1 else SCATTERED_FORMAT,
        fields=fields,
        num_samples=len(samples),
        num_bytes=tar.size,
        digest=digest,
        header_digest=digest_headers(tar, [offset[:, 0], offset[:, -1]] if samples else []),
        version=version,
        compression=compression,
        num_scattered=None if has_format_1 else num_scattered,
    )
    tensors = {
        "offset": offset,
        "size": size,
        "hash": content_hash,
        "key_stop": np.cumsum([len(key) for key in keys], dtype="<i8"),
        "key_bytes": np.frombuffer(b"".join(keys), dtype=np.uint8),
    }
    values = {name: value for name, value in asdict(header).items() if value is not None}
    metadata = {"shardio": json.dumps(values, sort_keys=True, separators=(",", ":"))}
    with location.write_whole() as file:
        file.write(safetensors.numpy.save(tensors, metadata))


def write_shard(tar: Location, samples: Iterable[Sample]) -> tuple[ShardEntry, tuple[str, ...]]:
    """Write samples to a tar in the given order, and write the tar's index next to the tar.

    Each file is written atomically. The index is written last. The written files are not read back.

    Returns:
        The shard's entry for the manifest, and the names of the samples' fields.
    """
    with tar.write_whole() as file:
        writer = TarWriter(file)
        for sample in samples:
            writer.add(sample)
        writer.end()
    return write_index_of(tar, writer)


def write_index_of(tar: Location, writer: TarWriter) -> tuple[ShardEntry, tuple[str, ...]]:
    """Write the index of a tar that a writer has finished, and return the same result as :func:`write_shard`."""
    samples = writer.stored
    written = _WrittenTar(location=tar, size=writer.num_bytes, headers={**writer.headers_of_first, **writer.headers})
    write_index(index_location(tar), written, samples, writer.digest)
    entry = ShardEntry(name=tar.name, num_bytes=writer.num_bytes, num_samples=len(samples), digest=writer.digest)
    return entry, tuple(sorted({field for sample in samples for field in sample.fields}))


class _WrittenTar(NamedTuple):
    location: Location
    size: int
    headers: dict[int, bytes]  # The plain headers of the first and last samples' members, by the contents' offsets.

    def read_many(self, starts: Ints, stops: Ints) -> list[bytes]:
        return [self.headers[stop] for stop in stops.tolist()]


def was_packed(tar: Location) -> bool:
    """Return whether ``pack`` wrote a tar's index. The tar need not exist.

    An index that was created on first use contains the tar's version, unless an early version of shardio created it. So
    the tar must also have a name like those that ``pack`` assigns and no time or owner in its first member's header.

    Raises:
        FormatError: If the index is damaged.
    """
    index = index_location(tar)
    if not index.exists() or not PACKED_NAME.fullmatch(tar.name) or read_header(index).version is not None:
        return False
    return not tar.exists() or _has_packs_header(tar, index)


def _has_packs_header(tar: Location, index: Location) -> bool:
    with Shard(tar, index) as shard:
        fields = shard.index.header.fields
        if not shard.index.header.num_samples:
            return True
        starts, stops, _ = shard.index.locate(np.array([0]), fields)
        first = int(np.where(starts[0] < 0, np.iinfo(np.int64).max, starts[0]).argmin())
        start, stop = int(starts[0, first]), int(stops[0, first])
        header = make_header(join_name(shard.index.key(0), fields[first]), stop - start)
        return shard.tar.read(start - BLOCK, start) == header[-BLOCK:]


def cached_index_location(tar: Location) -> Location:
    """Return the location, in the user's cache folder, of the index of a tar in a read-only folder."""
    import platformdirs

    name = xxhash.xxh3_128_hexdigest(os.fsencode(tar.resolve()))
    return parse_location(platformdirs.user_cache_path("shardio") / "indexes" / (name + INDEX_SUFFIX))


def is_compressed(tar: Location) -> bool:
    """Return whether a tar's name ends in ``.tar.gz`` or ``.tgz``, in lower or upper case."""
    return _COMPRESSED_NAME.fullmatch(tar.name) is not None


def open_tar(tar: Location, header: IndexHeader) -> StoredFile:
    """Open a tar, which may be compressed, given the metadata of its index."""
    return tar.open() if header.compression is None else DecompressedFile(tar, header.num_bytes)


class DecompressedFile(StoredFile):
    """A gzip-compressed tar that is read as if it were not compressed.

    Threads cannot share this object. Reading backward decompresses the file again from its beginning.

    Args:
        location: The location of the compressed tar.
        size: The size of the decompressed tar in bytes. By default, the tar is decompressed once to find its size.

    Raises:
        FormatError: If the file is not a complete gzip file.
        OSError: If the file cannot be read.
    """

    def __init__(self, location: Location, size: int | None = None) -> None:
        self.location = location
        self._file = location.open()
        self.version = self._file.version
        self._known: Mapping[int, bytes] = {}
        try:
            self._restart()
            self.size = self._measure() if size is None else size
        except BaseException:  # Ctrl-C must not leave the file open.
            self.close()
            raise

    def remember(self, headers: Mapping[int, bytes]) -> None:
        """Keep blocks in memory, keyed by their end offsets, to avoid decompressing them again."""
        self._known = headers

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the decompressed tar."""
        if stop - start == BLOCK and stop in self._known:
            return self._known[stop]
        content = bytearray()
        # Read piece by piece, because a damaged index may claim any size.
        while (position := start + len(content)) < stop:
            piece = bytearray(min(PIECE, stop - position))
            self.read_into([position], [memoryview(piece)])
            content += piece
        return bytes(content)

    def read_many(self, starts: Ints, stops: Ints) -> list[bytes]:
        """Return the contents of many ranges. Read the ranges in the order of their starts."""
        contents = [b""] * len(starts)
        for i in np.argsort(starts, kind="stable").tolist():
            contents[i] = self.read(int(starts[i]), int(stops[i]))
        return contents

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with the bytes that begin at the corresponding start position."""
        for start, buffer in zip(starts, buffers, strict=True):
            if start < self._position:
                self._restart()
            skipped = memoryview(bytearray(min(PIECE, start - self._position)))
            while self._position < start:
                self._fill(skipped[: start - self._position])
            self._fill(buffer)

    def discard(self, start: int, stop: int) -> bool:
        """Return False: nothing is cached."""
        return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _restart(self) -> None:
        self._stream = decompress(read_pieces(self._file))
        self._position = 0

    def _measure(self) -> int:
        buffer = memoryview(bytearray(PIECE))
        while self._read_some(buffer):
            pass
        return self._position

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            num_read = self._read_some(buffer)
            if not num_read:
                raise EOFError(f"{self.location} ends at byte {self._position} of the decompressed tar")
            buffer = buffer[num_read:]

    def _read_some(self, buffer: memoryview) -> int:
        try:
            num_read = self._stream.readinto(buffer)
        except GZIP_ERRORS as error:
            raise FormatError(
                f"{self.location} is not a complete gzip file: {error} (after {self._position} decompressed bytes). "
                "Download or create it again"
            ) from error
        self._position += num_read
        return num_read
