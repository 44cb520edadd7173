"""The laws of hostile tars and indexes: reading raises one of shardio's errors, or returns what tarfile reads."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import xxhash

import shardio
from shardio.errors import ShardioError
from shardio.reading import KeyedShards
from shardio.shards import Shard, find_problems, open_compressed, read_shards
from shardio.shards.index import IndexColumns, read_columns, read_header, read_keys
from shardio.shards.indexing import TarContents, index_tar, scan_contents
from shardio.shards.repairing import find_complete, repair, write_complete
from shardio.shards.tar import fits_plain_header, is_added_by_macos, split_name
from shardio.shards.tar_scan import find_member, list_names
from shardio.shards.verifying import ShardVerification
from shardio.storage import Location, parse_location
from tests.memory_store import MemoryStore
from tests.shards.hostile import WEIGHTS, HostileShard, fit, good_shards, write_index_of
from tests.tars import change_metadata

T = TypeVar("T")
MAX_SAMPLES = 64


class LawBrokenError(AssertionError):
    """Reading a hostile file breaks a law."""


class Laws:
    """A reader of hostile files that reads them in every way, checks the laws and counts the outcomes.

    A test can limit the time of a read: ``before`` is called with the files' total size, and ``after`` at the end.
    """

    def __init__(
        self, before: Callable[[int], object] = lambda _: None, after: Callable[[], object] = lambda: None
    ) -> None:
        self.outcomes = Counter[str]()
        self._before, self._after = before, after

    def check(self, shard: HostileShard, rng: random.Random) -> None:
        """Read a shard from memory, and raise LawBrokenError if a law does not hold."""
        name = "a.tar.gz" if shard.is_compressed else "a.tar"
        store = MemoryStore({name: shard.tar})
        if shard.is_compressed:
            self._check_compressed(store, shard)
        elif shard.index is None:
            self._check_tar(store, shard, rng)
        else:
            store.objects["a.tar.idx"] = shard.index
            self._check_index(store, shard, rng)
        if not store.objects.keys() <= {name, f"{name}.idx", "new.tar"}:
            raise LawBrokenError(f"reading wrote {sorted(store.objects)}")

    def check_folder(self, shard: HostileShard, folder: Path) -> None:
        """Read a shard from a folder on disk with the functions that users call."""
        name = "shard-000000.tar" + (".gz" if shard.is_compressed else "")
        with TemporaryDirectory(dir=folder) as path:
            tar, index = Path(path) / name, Path(path) / f"{name}.idx"
            tar.write_bytes(shard.tar)
            if shard.index is not None:
                index.write_bytes(shard.index)
            ways: dict[str, Callable[[], object]] = {
                "folder: verify": lambda: list(find_problems(tar, num_workers=1)),
                "folder: open": lambda: _open(tar),
                "folder: index": lambda: index_tar(parse_location(tar)),
                "folder: verify again": lambda: list(find_problems(path, num_workers=1)),
                "folder: repair": lambda: repair(parse_location(path)),
                "folder: open the repaired": lambda: _open(Path(path)),
            }
            for what, function in ways.items():
                self._attempt(what, shard, function, allowed=FileNotFoundError)
            if not (names := {each.name for each in Path(path).iterdir()}) <= {name, index.name, "shardio.json"}:
                raise LawBrokenError(f"reading wrote {sorted(names)}")

    def _attempt(
        self, what: str, shard: HostileShard, function: Callable[[], T], allowed: type[Exception] = ShardioError
    ) -> T | None:
        """Call a function that may raise one of shardio's errors. Return its result, or None after an error."""
        self._before(shard.num_bytes)
        try:
            found = function()
        except (ShardioError, allowed) as error:
            if not str(error).strip():
                raise LawBrokenError(f"{what}: an error has no message: {error!r}") from error
            self.outcomes[f"{what}: {type(error).__name__}"] += 1
            return None
        except LawBrokenError:
            raise
        except Exception as error:
            raise LawBrokenError(f"{what}: {type(error).__name__}: {error!s:.200}") from error
        finally:
            self._after()
        self.outcomes[f"{what}: done"] += 1
        return found

    def _check_tar(self, store: MemoryStore, shard: HostileShard, rng: random.Random) -> None:
        tar = store.at("a.tar")
        with closing(store.open("a.tar")) as file:
            contents = self._attempt("index", shard, lambda: write_index_of(store))
            if rng.random() < 0.3:
                self._attempt("list", shard, lambda: list_names(file))
                offset = 512 * rng.randrange(len(shard.tar) // 512 + 2)
                self._attempt("find member", shard, lambda: find_member(file, offset))
            if contents is not None:
                self._check_contents(store, shard, contents, rng)
                return
            cut = self._attempt("find the cut", shard, lambda: find_complete(file, None))
            if cut is not None and cut.num_samples:
                write_complete(store.at("new.tar"), file, cut.end)
                with closing(store.open("new.tar")) as new:
                    again = self._attempt("index the complete part", shard, lambda: scan_contents(new))
                if again is None or len(again.samples) != cut.num_samples:
                    raise LawBrokenError(f"the complete part of a tar should have {cut.num_samples} samples")
            if rng.random() < 0.2:  # Verify the tar against another tar's index.
                other = rng.choices(good_shards(), WEIGHTS)[0][1]
                store.objects["a.tar.idx"] = fit(other, len(shard.tar))
                self._check_index(store, HostileShard(tar=shard.tar, index=store.objects["a.tar.idx"]), rng)
        assert tar.exists(), "reading does not remove the tar"

    def _check_contents(
        self, store: MemoryStore, shard: HostileShard, contents: TarContents, rng: random.Random
    ) -> None:
        """Compare a tar's contents with those that tarfile reads, and read the tar with the new index."""
        members = read_by_tarfile(shard.tar)
        if members is None:
            raise LawBrokenError("tarfile refuses a tar that was indexed")
        expected = [
            (*parts, offset, size)
            for name, offset, size in members
            if (parts := split_name(name)) is not None and not is_added_by_macos(name)
        ]
        fields = [(each.key, name, field) for each in contents.samples for name, field in each.fields.items()]
        found = [(key, name, field.offset, field.size) for key, name, field in fields]
        if sorted(found, key=lambda each: each[2]) != expected:
            raise LawBrokenError(f"the contents are {found!s:.500}, but tarfile reads {expected!s:.500}")
        firsts = [min(field.offset for field in each.fields.values()) for each in contents.samples]
        if firsts != sorted(firsts):
            raise LawBrokenError(f"the samples are not in the order of their first members: {firsts!s:.500}")
        for key, name, field in fields:
            content = shard.tar[field.offset : field.offset + field.size]
            if len(content) != field.size or xxhash.xxh3_64_intdigest(content) != field.hash:
                raise LawBrokenError(f"field {name} of {key} has different content, or is outside the tar")
        problems, read = self._check_index(store, shard, rng)
        if problems:
            raise LawBrokenError(f"a tar that was just indexed has problems: {problems[0]!s:.300}")
        few_fields = len({name for _, name, _ in fields}) <= MAX_SAMPLES
        if read is None or (few_fields and (read != found[: len(read)] or (found and not read))):
            raise LawBrokenError(f"read {read!s:.500}, indexed {found!s:.500}")

    def _check_index(
        self, store: MemoryStore, shard: HostileShard, rng: random.Random
    ) -> tuple[list[str] | None, list[tuple[str, str, int, int]] | None]:
        """Read an index in every way. Return the problems, and the key, field, offset and size of each item read."""
        index = store.at("a.tar.idx")
        if rng.random() < 0.2:  # These attempts are rare: the reads below also read the header and the keys.
            self._attempt("read the index's header", shard, lambda: read_header(index))
            self._attempt("read keys", shard, lambda: read_keys(index).hash_all())
        columns = self._attempt("read columns", shard, lambda: read_columns(index))
        problems = None
        with closing(store.open("a.tar")) as file:
            if columns is not None:
                problems = self._attempt("verify", shard, lambda: _verify(file, columns))
                if shard.index is not None and rng.random() < 0.2:
                    self._attempt("find the cut with an index", shard, lambda: find_complete(file, columns))
        read = self._attempt("read", shard, lambda: self._read(store.at("a.tar"), index, shard))
        return problems, read

    def _read(self, tar: Location, index: Location, files: HostileShard) -> list[tuple[str, str, int, int]]:
        found = list[tuple[str, str, int, int]]()
        with Shard(tar, index) as shard:
            header = shard.index.header
            fields = header.fields[:MAX_SAMPLES]
            count = min(header.num_samples, MAX_SAMPLES)
            samples = np.arange(count)
            if files.index is not None:  # Choose samples from all parts of the index.
                samples = np.unique(np.linspace(0, max(0, header.num_samples - 1), min(count, 4)).astype(np.int64))
            if not count or not fields:
                return found
            columns = read_shards([(shard, samples)], fields, np.ones(len(samples), np.bool_))
            starts, stops, hashes = shard.index.locate(samples, fields)
            keys = shard.index.keys(samples)
            for row in range(len(samples)):
                for i, field in sorted(enumerate(fields), key=lambda pair: int(starts[row, pair[0]])):
                    start, stop, content = int(starts[row, i]), int(stops[row, i]), columns[i][row]
                    if content is None:
                        continue
                    if not 0 <= start <= stop <= len(files.tar) or files.tar[start:stop] != content:
                        raise LawBrokenError(f"bytes {start} to {stop} of the tar were read with different content")
                    if xxhash.xxh3_64_intdigest(content) != int(hashes[row, i]):
                        raise LawBrokenError(f"bytes {start} to {stop} were read, but do not have the index's hash")
                    found.append((keys[row], field, start, stop - start))
        if files.index is not None:  # Compare these with the tar's members if plain headers hold the names.
            members = {offset: (name, size) for name, offset, size in read_by_tarfile(files.tar) or ()}
            for key, field, start, size in found:
                name, num_bytes = members.get(start, ("\xff", 0))
                is_plain = fits_plain_header(f"{key}.{field}", size) and name.isascii()
                if is_plain and (split_name(name), num_bytes) != ((key, field), size):
                    raise LawBrokenError(f"{name} was read as field {field} of {key} with {size} bytes")
        return found

    def _check_compressed(self, store: MemoryStore, shard: HostileShard) -> None:
        tar = store.at("a.tar.gz")
        if shard.index is None:
            report = self._attempt("index compressed", shard, lambda: index_tar(tar))
            if report is None:
                return
        else:  # Without the tar's version, the index would be stale.
            store.objects["a.tar.gz.idx"] = shard.index
            with suppress(ValueError, KeyError, TypeError, RecursionError, AttributeError):
                store.objects["a.tar.gz.idx"] = change_metadata(
                    shard.index, lambda values: values.update(version=tar.stat().version)
                )
        read = self._attempt("read compressed", shard, lambda: _read_compressed(tar))
        if read is None or shard.index is not None:
            return
        content = gzip.decompress(shard.tar)
        members = [(split_name(name), offset, offset + size) for name, offset, size in read_by_tarfile(content) or ()]
        for key, fields in read.items():
            for field, value in fields.items():
                if not any(name == (key, field) and content[start:stop] == value for name, start, stop in members):
                    raise LawBrokenError(f"field {field} of {key} has content that tarfile does not read")


def _verify(file: Any, columns: IndexColumns) -> list[str]:
    return [str(problem) for problem in ShardVerification(file, columns, lambda *_: None).find_problems()]


def _open(source: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Files that macOS added cause a warning.
        with shardio.open(source) as samples:
            return sum(len(samples[key]) for key in islice(samples, 8))


def _read_compressed(tar: Location) -> dict[str, dict[str, bytes]]:
    with KeyedShards(open_compressed(tar)) as samples:
        found = {key: samples[key] for key in islice(samples, 4)}
    return {key: {name: value for name, value in fields.items() if name != "__key__"} for key, fields in found.items()}


def read_by_tarfile(content: bytes) -> list[tuple[str, int, int]] | None:
    """Return the name, offset and size of each regular file in a tar, or None if tarfile rejects the tar."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            return [(info.name, info.offset_data, info.size) for info in tar if info.isreg()]
    except (tarfile.TarError, ValueError, EOFError, IndexError, OverflowError):
        return None
