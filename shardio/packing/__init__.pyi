from .pack_call import (
    DEFAULT_SHARD_SIZE as DEFAULT_SHARD_SIZE,
    REJECTED_NAME as REJECTED_NAME,
    Engine as Engine,
    JpegMode as JpegMode,
    Layout as Layout,
    OnChanged as OnChanged,
    OnIncomplete as OnIncomplete,
    PackOptions as PackOptions,
    pack as pack,
)
from .packer import PackResult as PackResult, pack_parts as pack_parts, pack_source as pack_source
from .preparing import (
    TILED as TILED,
    TILED_PROGRESSIVE as TILED_PROGRESSIVE,
    JpegTally as JpegTally,
    RejectedSample as RejectedSample,
)
from .rewriting import append as append, merge as merge, reshard as reshard, split as split
from .samples import DEFAULT_QUALITY as DEFAULT_QUALITY
from .shard_writer import ShardWriter as ShardWriter, finalize as finalize
from .sources.source import (
    FileProblem as FileProblem,
    PackSource as PackSource,
    Parts as Parts,
    SourceKind as SourceKind,
    make_parts as make_parts,
)
