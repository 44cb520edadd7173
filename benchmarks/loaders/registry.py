"""The candidates: what each is called, what it reads, which modules it needs, and who makes it.

Nothing is imported here but when a candidate is run: each shall have its own modules in its process and no others.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.loaders.job import Epochs, Job

PIXELS_KEPT = "JPEGs as they are, or rewritten without loss"
PIXELS_CHANGED = "encoded again: longer side 400, quality 90"
SMALL = "samples of 1 KiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A loader that is compared.

    Attributes:
        name: For the command line.
        title: For tables.
        maker: The function that makes it, ``module:function`` below this package; called with a Job.
        storage: The name of the format that it reads, see :mod:`benchmarks.loaders.data`.
        cases: What it can be asked for.
        modules: What must be installed beside shardio.
        packages: Whose versions are noted.
        stored: Which pixels are stored; candidates are compared with peers of the same kind.
    """

    name: str
    title: str
    maker: str
    storage: str
    cases: frozenset[str]
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    stored: str = PIXELS_KEPT

    @property
    def is_shardio(self) -> bool:
        return self.name.startswith("shardio")

    @property
    def is_peer(self) -> bool:
        """Whether it is a loader of others: neither shardio's nor the bare loop."""
        return not self.is_shardio and self.name != "bare"

    @property
    def is_installed(self) -> bool:
        return all(_is_found(module) for module in self.modules)

    def make(self, job: Job) -> Epochs:
        """Make the loader."""
        module, _, function = self.maker.partition(":")
        make: Callable[[Job], Epochs] = getattr(importlib.import_module(f"benchmarks.loaders.{module}"), function)
        return make(job)


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Its parent is missing.
        return False


def _cases(names: str) -> frozenset[str]:
    return frozenset(names.split())


_OPENCV, _TORCH = "opencv-python-headless", "torch"

CANDIDATES = (
    Candidate(
        name="shardio-tiled",
        title="shardio, shards, tiled",
        maker="from_shardio:make_shards",
        storage="tiled",
        cases=_cases("train eval first-batch training-process memory flatness"),
    ),
    Candidate(
        name="shardio-shards",
        title="shardio, shards, JPEGs untouched",
        maker="from_shardio:make_shards",
        storage="shards",
        cases=_cases("train eval"),
    ),
    Candidate(
        name="shardio-folder",
        title="shardio, ImageFolder",
        maker="from_shardio:make_folder",
        storage="folder",
        cases=_cases("train eval"),
    ),
    Candidate(
        name="shardio-400",
        title="shardio, shards, encoded again and tiled",
        maker="from_shardio:make_shards",
        storage="tiled-400",
        cases=_cases("train eval"),
        stored=PIXELS_CHANGED,
    ),
    Candidate(
        name="bare",
        title="shardio's decoder without a loader, 2 threads",
        maker="from_shardio:make_bare",
        storage="tiled",
        cases=_cases("train"),
    ),
    Candidate(
        name="torch-opencv",
        title="torch DataLoader + OpenCV",
        maker="peers_torch:make_opencv",
        storage="folder",
        cases=_cases("train eval first-batch training-process memory"),
        packages=(_TORCH, _OPENCV),
    ),
    Candidate(
        name="torch-pillow",
        title="torch DataLoader + Pillow, antialiased",
        maker="peers_torch:make_pillow",
        storage="folder",
        cases=_cases("train eval"),
        packages=(_TORCH, "pillow"),
    ),
    Candidate(
        name="torchvision",
        title="torchvision ImageFolder, antialiased",
        maker="peers_torch:make_torchvision",
        storage="folder",
        cases=_cases("train eval"),
        modules=("torchvision",),
        packages=(_TORCH, "torchvision", "pillow"),
    ),
    Candidate(
        name="nodes",
        title="torchdata.nodes, threads + OpenCV",
        maker="peers_threads:make_nodes",
        storage="folder",
        cases=_cases("train eval training-process"),
        modules=("torchdata.nodes",),
        packages=("torchdata", _TORCH, _OPENCV),
    ),
    Candidate(
        name="spdl",
        title="SPDL, threads + OpenCV",
        maker="peers_threads:make_spdl",
        storage="folder",
        cases=_cases("train eval training-process"),
        modules=("spdl.pipeline",),
        packages=("spdl", _OPENCV),
    ),
    Candidate(
        name="webdataset",
        title="WebDataset + OpenCV",
        maker="peers_shards:make_webdataset",
        storage="shards",
        cases=_cases("train eval memory"),
        modules=("webdataset",),
        packages=("webdataset", _TORCH, _OPENCV),
    ),
    Candidate(
        name="mosaic",
        title="MosaicML Streaming + OpenCV",
        maker="peers_streaming:make_mosaic",
        storage="mds",
        cases=_cases("train eval"),
        modules=("streaming",),
        packages=("mosaicml-streaming", _TORCH, _OPENCV),
    ),
    Candidate(
        name="litdata",
        title="LitData + OpenCV",
        maker="peers_streaming:make_litdata",
        storage="litdata",
        cases=_cases("train eval"),
        modules=("litdata",),
        packages=("litdata", _TORCH, _OPENCV),
    ),
    Candidate(
        name="huggingface",
        title="Hugging Face datasets, streaming Parquet + OpenCV",
        maker="peers_streaming:make_huggingface",
        storage="parquet",
        cases=_cases("train eval"),
        modules=("datasets", "pyarrow"),
        packages=("datasets", "pyarrow", _TORCH, _OPENCV),
    ),
    Candidate(
        name="energon",
        title="Megatron Energon + OpenCV",
        maker="peers_shards:make_energon",
        storage="energon",
        cases=_cases("train"),
        modules=("megatron.energon",),
        packages=("megatron-energon", "webdataset", _TORCH, _OPENCV),
    ),
    Candidate(
        name="dali",
        title="DALI, on the CPU",
        maker="peers_native:make_dali",
        storage="folder",
        cases=_cases("train eval"),
        modules=("nvidia.dali",),
        packages=("nvidia-dali-cuda130", "nvidia-dali-cuda120", _TORCH),
    ),
    Candidate(
        name="ffcv",
        title="FFCV",
        maker="peers_native:make_ffcv",
        storage="ffcv-400",
        cases=_cases("train eval"),
        modules=("ffcv",),
        packages=("ffcv", _TORCH),
        stored=PIXELS_CHANGED,
    ),
    Candidate(
        name="nodes-400",
        title="torchdata.nodes, threads + OpenCV",
        maker="peers_threads:make_nodes",
        storage="folder-400",
        cases=_cases("train eval"),
        modules=("torchdata.nodes",),
        packages=("torchdata", _TORCH, _OPENCV),
        stored=PIXELS_CHANGED,
    ),
    Candidate(
        name="shardio-sequential",
        title="shardio, in sequence",
        maker="from_shardio:make_small_sequential",
        storage="small",
        cases=_cases("small"),
        stored=SMALL,
    ),
    Candidate(
        name="shardio-shuffled",
        title="shardio, shuffled",
        maker="from_shardio:make_small_shuffled",
        storage="small",
        cases=_cases("small"),
        stored=SMALL,
    ),
    Candidate(
        name="webdataset-sequential",
        title="WebDataset, in sequence",
        maker="peers_shards:make_small_sequential",
        storage="small",
        cases=_cases("small"),
        modules=("webdataset",),
        packages=("webdataset", _TORCH),
        stored=SMALL,
    ),
    Candidate(
        name="webdataset-shuffled",
        title="WebDataset, buffer of 1,000",
        maker="peers_shards:make_small_shuffled",
        storage="small",
        cases=_cases("small"),
        modules=("webdataset",),
        packages=("webdataset", _TORCH),
        stored=SMALL,
    ),
    Candidate(
        name="mosaic-sequential",
        title="MosaicML Streaming, in sequence",
        maker="peers_streaming:make_small_sequential",
        storage="small-mds",
        cases=_cases("small"),
        modules=("streaming",),
        packages=("mosaicml-streaming", _TORCH),
        stored=SMALL,
    ),
    Candidate(
        name="mosaic-shuffled",
        title="MosaicML Streaming, shuffled",
        maker="peers_streaming:make_small_shuffled",
        storage="small-mds",
        cases=_cases("small"),
        modules=("streaming",),
        packages=("mosaicml-streaming", _TORCH),
        stored=SMALL,
    ),
)


def find(name: str) -> Candidate:
    """Return a candidate by its name."""
    found = [candidate for candidate in CANDIDATES if candidate.name == name]
    if not found:
        names = ", ".join(candidate.name for candidate in CANDIDATES)
        raise SystemExit(f"there is no candidate {name!r}; there are {names}")
    return found[0]
