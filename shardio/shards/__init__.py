"""The dataset format: tars, member names, indexes and the manifest."""

from shardio.shards.index import index_location
from shardio.shards.manifest import MANIFEST_NAME, UNFINISHED_NAME, Manifest, ShardEntry, read_manifest, write_manifest
from shardio.shards.names import LABEL_FIELD, join_name, split_name
from shardio.shards.open_index import ShardIndex
from shardio.shards.parts import PartCache
from shardio.shards.shard import Shard
from shardio.shards.table import DatasetSource, ShardTable, open_table
from shardio.shards.tar import END, MAX_MEMBER, TOO_LARGE, list_names, size_in_tar
from shardio.shards.writer import write_shard

__all__ = [
    "END",
    "LABEL_FIELD",
    "MANIFEST_NAME",
    "MAX_MEMBER",
    "TOO_LARGE",
    "UNFINISHED_NAME",
    "DatasetSource",
    "Manifest",
    "PartCache",
    "Shard",
    "ShardEntry",
    "ShardIndex",
    "ShardTable",
    "index_location",
    "join_name",
    "list_names",
    "open_table",
    "read_manifest",
    "size_in_tar",
    "split_name",
    "write_manifest",
    "write_shard",
]
