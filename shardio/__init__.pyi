from . import check as check, train as train, transforms as transforms
from .datasets import (
    EpochSampler as EpochSampler,
    ImageFolder as ImageFolder,
    MixedDataset as MixedDataset,
    PackedTokens as PackedTokens,
    ShardDataset as ShardDataset,
    ShardMapDataset as ShardMapDataset,
    StreamDataset as StreamDataset,
)
from .decoding import verify as verify
from .device import (
    BatchRandomErasing as BatchRandomErasing,
    CutMix as CutMix,
    DevicePrefetcher as DevicePrefetcher,
    MixUp as MixUp,
    OneOf as OneOf,
)
from .diagnosis import Diagnosis as Diagnosis, doctor as doctor
from .errors import (
    BusyError as BusyError,
    CoverageError as CoverageError,
    FormatError as FormatError,
    IdentityError as IdentityError,
    LocationError as LocationError,
    NonFiniteLossError as NonFiniteLossError,
    PackError as PackError,
    SampleError as SampleError,
    ShardioError as ShardioError,
    StaleIndexError as StaleIndexError,
    StateError as StateError,
    StoreError as StoreError,
    WorkerError as WorkerError,
)
from .loader import DataLoader as DataLoader
from .packing import (
    ShardWriter as ShardWriter,
    append as append,
    finalize as finalize,
    merge as merge,
    pack as pack,
    reshard as reshard,
    split as split,
)
from .reading.reader import KeyedShards as KeyedShards, open as open  # noqa: A004  # As in tarfile and PIL.Image.
from .shards import Manifest as Manifest, Problem as Problem
from .shared import SharedList as SharedList
from .world import WorkerInfo as WorkerInfo, get_worker_info as get_worker_info

__all__: list[str]
__version__: str
