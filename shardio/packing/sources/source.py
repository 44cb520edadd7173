"""The interface of a pack source: how it is recognised and scanned, its samples, and the table of all kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.packing.sources.files import FileProblem
from shardio.sample import Sample

if TYPE_CHECKING:
    from shardio.packing.pack_call import PackOptions

SourceKind = Literal["auto", "files", "lmdb", "litdata", "mds", "parquet", "saved", "table", "tars"]
"""The kind of a source. ``files``: a directory of images, or of other files. ``saved``: a directory that
``save_to_disk`` of ``datasets`` wrote. ``table``: a table of paths. ``auto``: recognised by its files."""

SOURCES: Mapping[SourceKind, str] = {
    "saved": "hugging_face:SavedDataset",
    "table": "path_tables:TableOfPaths",
    "parquet": "hugging_face:ParquetFiles",
    "mds": "mds:MdsShards",
    "litdata": "litdata:LitDataChunks",
    "tars": "tars:Tars",
    "lmdb": "lmdb:LmdbEnvironment",
    "files": "directory:Directory",
}
"""The module in this folder and the :class:`PackSource` of each kind, in the order in which they are looked for."""

COLUMNS = ("image_column", "label_column", "key_column")

OPTIONS_OF_KINDS = ("prefix_keys", "layout", "source_split", "fields", *COLUMNS)
"""The options that apply only to some kinds of sources."""


class Evidence(NamedTuple):
    """A file that shows the kind of a source, and whether it holds samples. If not, the caller must choose the kind."""

    file: Path
    holds_samples: bool = True


class PackSource(ABC):
    """A kind of dataset that can be packed: the interface that each module in this folder implements.

    To add one, write a module with a subclass, and add its name to :data:`SourceKind` and :data:`SOURCES`.
    :class:`shardio.testing.pack_source.PackSourceTests` checks it.

    Attributes:
        what: Its name in messages, such as ``MDS shards``.
        takes: The options that apply to it, among those that apply only to some kinds: see
            :data:`OPTIONS_OF_KINDS`. A pack with another of these options is refused.
    """

    what: ClassVar[str]
    takes: ClassVar[Collection[str]] = COLUMNS

    @abstractmethod
    def find(self, src: Path) -> Evidence | None:
        """Return a file that shows that a path is such a dataset; None if it is another.

        It must be quick, and must not fail if the path does not exist, or its files are damaged.

        Args:
            src: A file, a directory, or a pattern of files.
        """

    @abstractmethod
    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Find the samples of a dataset, without reading the contents of their fields if possible.

        Two scans of an unchanged dataset with the same options find the same samples, in the same order. Most kinds
        return :func:`~shardio.packing.sources.records.scan_records` of their records.

        Args:
            src: The dataset, which ``find`` has recognised.
            options: The options of the pack.

        Raises:
            PackError: If it cannot be packed. The message says what the user can do.
        """


class SourceSample(Protocol):
    """A sample before packing. It can be pickled, and read in another process."""

    @property
    def key(self) -> str:
        """Its key."""

    def read(self) -> Sample:
        """Return the sample with its fields.

        Raises:
            FileChangedError: If the source has changed since the scan.
            PackError: If it cannot be read.
        """

    def problem(self, field: str, what: str) -> FileProblem:
        """Return a problem of a field, with the place in the source that the field comes from."""


class SourceTable(Protocol):
    """The samples of a source, in the order in which they are packed without shuffling."""

    @property
    def root(self) -> str:
        """The prefix of the names of files in messages, which ends in a slash."""

    @property
    def keys(self) -> Sequence[str]:
        """Their keys, all different."""

    @property
    def num_bytes(self) -> int:
        """The size of all samples in the source, in bytes."""

    def __len__(self) -> int: ...

    def sizes_in_tar(self) -> NDArray[np.int64]:
        """Return the size of each sample in a tar, in bytes, int64 [n]. It may be an estimate."""

    def digest(self) -> bytes:
        """Return a hash of everything that decides the output: keys, labels, and the state of the source's files."""

    def take(self, rows: NDArray[np.int64]) -> Sequence[SourceSample]:
        """Return some samples.

        Args:
            rows: int64 [k].
        """

    def find_changes(self) -> Iterator[FileProblem]:
        """Yield the source's files that have changed since the scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScan:
    """The contents of a source.

    Attributes:
        samples: The samples to pack.
        classes: The class names in the order of their labels; empty if labels have no names.
        ignored: Files that do not belong to a sample.
        suffixed: The keys that end in the file's suffix, because another image has the same name except for its suffix.
    """

    samples: SourceTable
    classes: tuple[str, ...]
    ignored: Sequence[Path] = ()
    suffixed: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows of a table: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        table: The table.
        rows: int64 [n], the rows in ascending order.
        keys: Their keys.
        tar_sizes: int64 [n], their sizes in a tar in bytes.
    """

    table: SourceTable
    rows: NDArray[np.int64]
    keys: Sequence[str]
    tar_sizes: NDArray[np.int64]

    @property
    def root(self) -> str:
        return self.table.root

    @property
    def num_bytes(self) -> int:
        return int(self.tar_sizes.sum())

    def __len__(self) -> int:
        return len(self.rows)

    def sizes_in_tar(self) -> NDArray[np.int64]:
        return self.tar_sizes

    def digest(self) -> bytes:
        return xxhash.xxh3_128(self.table.digest() + self.rows.tobytes()).digest()

    def take(self, rows: NDArray[np.int64]) -> Sequence[SourceSample]:
        return self.table.take(self.rows[rows])

    def find_changes(self) -> Iterator[FileProblem]:
        return self.table.find_changes()


def divide(table: SourceTable, numbers: NDArray[np.int64], num_parts: int) -> list[Selection]:
    """Return the rows of each part of a table.

    Args:
        table: The table.
        numbers: int64 [n], the number of the part of each row.
        num_parts: The number of parts.
    """
    sizes, selections = table.sizes_in_tar(), list[Selection]()
    for number in range(num_parts):
        rows = np.flatnonzero(numbers == number)
        keys = [table.keys[row] for row in rows.tolist()]
        selections.append(Selection(table=table, rows=rows, keys=keys, tar_sizes=sizes[rows]))
    return selections
