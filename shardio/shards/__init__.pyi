from .index import (
    IndexColumns as IndexColumns,
    hash_key as hash_key,
    index_location as index_location,
    read_columns as read_columns,
    read_keys as read_keys,
)
from .indexing import (
    IndexReport as IndexReport,
    index_tar as index_tar,
    open_compressed as open_compressed,
    write_tar_lists as write_tar_lists,
)
from .manifest import (
    MANIFEST_NAME as MANIFEST_NAME,
    UNFINISHED_NAME as UNFINISHED_NAME,
    ExportFormat as ExportFormat,
    Manifest as Manifest,
    PackSettings as PackSettings,
    ShardEntry as ShardEntry,
    ShardTable as ShardTable,
    describe_pack as describe_pack,
    export_index as export_index,
    find_gaps as find_gaps,
    group_by_split as group_by_split,
    is_sorted_by_class as is_sorted_by_class,
    is_split as is_split,
    join_tables as join_tables,
    read_manifest as read_manifest,
    words_of as words_of,
    write_manifest as write_manifest,
)
from .repairing import repair as repair
from .shard import (
    PACKED_NAME as PACKED_NAME,
    Shard as Shard,
    is_compressed as is_compressed,
    write_index_of as write_index_of,
    write_shard as write_shard,
)
from .shard_index import ShardIndex as ShardIndex
from .shard_reading import SeenShards as SeenShards, Unseen as Unseen, read_shards as read_shards
from .sources import DatasetSource as DatasetSource, open_table as open_table
from .tar import (
    BLOCK as BLOCK,
    END as END,
    LABEL_FIELD as LABEL_FIELD,
    MAX_MEMBER as MAX_MEMBER,
    TOO_LARGE as TOO_LARGE,
    Ints as Ints,
    TarWriter as TarWriter,
    fits_plain_header as fits_plain_header,
    join_name as join_name,
    make_header as make_header,
    size_in_tar as size_in_tar,
    split_name as split_name,
)
from .tar_scan import (
    IncompleteTarError as IncompleteTarError,
    StreamedSample as StreamedSample,
    StreamedTar as StreamedTar,
    list_names as list_names,
)
from .verifying import (
    ContentCheck as ContentCheck,
    Problem as Problem,
    ProblemKind as ProblemKind,
    find_problems as find_problems,
)
