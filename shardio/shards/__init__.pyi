from .exporting import ExportFormat as ExportFormat, export_index as export_index
from .foreign import CompressedShard as CompressedShard, is_compressed as is_compressed
from .index import (
    IndexColumns as IndexColumns,
    PartCache as PartCache,
    ShardIndex as ShardIndex,
    hash_key as hash_key,
    index_location as index_location,
    read_columns as read_columns,
    read_keys as read_keys,
)
from .manifest import (
    MANIFEST_NAME as MANIFEST_NAME,
    UNFINISHED_NAME as UNFINISHED_NAME,
    Manifest as Manifest,
    Problem as Problem,
    ProblemKind as ProblemKind,
    ShardEntry as ShardEntry,
    ShardTable as ShardTable,
    find_gaps as find_gaps,
    read_manifest as read_manifest,
    write_manifest as write_manifest,
)
from .shard import Shard as Shard
from .sources import (
    DatasetSource as DatasetSource,
    group_by_split as group_by_split,
    is_split as is_split,
    open_table as open_table,
    words_of as words_of,
)
from .tar import (
    BLOCK as BLOCK,
    END as END,
    LABEL_FIELD as LABEL_FIELD,
    MAX_MEMBER as MAX_MEMBER,
    TOO_LARGE as TOO_LARGE,
    fits_plain_header as fits_plain_header,
    join_name as join_name,
    make_header as make_header,
    size_in_tar as size_in_tar,
    split_name as split_name,
)
from .tar_scan import list_names as list_names
from .verifying import find_problems as find_problems
from .writer import write_shard as write_shard
