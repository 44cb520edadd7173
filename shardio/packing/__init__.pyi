from .executors import Engine as Engine
from .output_folder import finalize as finalize
from .pack_call import DEFAULT_SHARD_SIZE as DEFAULT_SHARD_SIZE, pack as pack
from .packer import RunOptions as RunOptions, pack_parts as pack_parts, pack_source as pack_source
from .plan import JpegMode as JpegMode, PackSettings as PackSettings, Parts as Parts, make_parts as make_parts
from .preparing import (
    DEFAULT_QUALITY as DEFAULT_QUALITY,
    TILED as TILED,
    JpegTally as JpegTally,
    RejectedSample as RejectedSample,
)
from .rewriting import append as append, merge as merge, reshard as reshard, split as split
from .shard_job import REJECTED_NAME as REJECTED_NAME, OnChanged as OnChanged, PackResult as PackResult
from .shard_writer import ShardWriter as ShardWriter
from .sources.files import FileProblem as FileProblem
from .sources.layouts import Layout as Layout, OnIncomplete as OnIncomplete
from .sources.source import SourceKind as SourceKind, SourceOptions as SourceOptions, make_options as make_options
