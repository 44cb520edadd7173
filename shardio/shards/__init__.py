"""The dataset format: tars, member names, indexes and the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.shards.compressed import CompressedShard, is_compressed
    from shardio.shards.export_files import export_index
    from shardio.shards.exporting import ExportFormat
    from shardio.shards.folder import group_by_split, is_split, words_of
    from shardio.shards.index import index_location
    from shardio.shards.index_columns import IndexColumns, hash_key, read_columns, read_keys
    from shardio.shards.manifest import (
        MANIFEST_NAME,
        UNFINISHED_NAME,
        Manifest,
        ShardEntry,
        read_manifest,
        write_manifest,
    )
    from shardio.shards.names import LABEL_FIELD, join_name, split_name
    from shardio.shards.numbering import find_gaps
    from shardio.shards.open_index import ShardIndex
    from shardio.shards.parts import PartCache
    from shardio.shards.problems import Problem, ProblemKind
    from shardio.shards.shard import Shard
    from shardio.shards.sources import DatasetSource, open_table
    from shardio.shards.table import ShardTable
    from shardio.shards.tar import BLOCK, END, MAX_MEMBER, TOO_LARGE, fits_plain_header, make_header, size_in_tar
    from shardio.shards.tar_scan import list_names
    from shardio.shards.verifying import VerifyProgress, find_problems
    from shardio.shards.writer import write_shard

__all__ = [
    "BLOCK",
    "END",
    "LABEL_FIELD",
    "MANIFEST_NAME",
    "MAX_MEMBER",
    "TOO_LARGE",
    "UNFINISHED_NAME",
    "CompressedShard",
    "DatasetSource",
    "ExportFormat",
    "IndexColumns",
    "Manifest",
    "PartCache",
    "Problem",
    "ProblemKind",
    "Shard",
    "ShardEntry",
    "ShardIndex",
    "ShardTable",
    "VerifyProgress",
    "export_index",
    "find_gaps",
    "find_problems",
    "fits_plain_header",
    "group_by_split",
    "hash_key",
    "index_location",
    "is_compressed",
    "is_split",
    "join_name",
    "list_names",
    "make_header",
    "open_table",
    "read_columns",
    "read_keys",
    "read_manifest",
    "size_in_tar",
    "split_name",
    "words_of",
    "write_manifest",
    "write_shard",
]

__getattr__ = import_on_use(
    __name__,
    {
        ".compressed": "CompressedShard is_compressed",
        ".export_files": "export_index",
        ".exporting": "ExportFormat",
        ".folder": "group_by_split is_split words_of",
        ".index": "index_location",
        ".index_columns": "IndexColumns hash_key read_columns read_keys",
        ".manifest": "MANIFEST_NAME UNFINISHED_NAME Manifest ShardEntry read_manifest write_manifest",
        ".names": "LABEL_FIELD join_name split_name",
        ".numbering": "find_gaps",
        ".open_index": "ShardIndex",
        ".parts": "PartCache",
        ".problems": "Problem ProblemKind",
        ".shard": "Shard",
        ".sources": "DatasetSource open_table",
        ".table": "ShardTable",
        ".tar": "BLOCK END MAX_MEMBER TOO_LARGE fits_plain_header make_header size_in_tar",
        ".tar_scan": "list_names",
        ".verifying": "VerifyProgress find_problems",
        ".writer": "write_shard",
    },
)
