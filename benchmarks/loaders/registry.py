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
    """

    name: str
    title: str
    maker: str
    storage: str
    cases: frozenset[str] = frozenset({"train", "eval"})
    modules: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def stored(self) -> str:
        """What its storage holds; candidates are compared with peers of the same."""
        if self.storage.startswith("small"):
            return SMALL
        return PIXELS_CHANGED if self.storage.endswith("-400") else PIXELS_KEPT

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
    ),
    Candidate(
        name="shardio-folder",
        title="shardio, ImageFolder",
        maker="from_shardio:make_folder",
        storage="folder",
    ),
    Candidate(
        name="shardio-400",
        title="shardio, shards, encoded again and tiled",
        maker="from_shardio:make_shards",
        storage="tiled-400",
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
        packages=(_TORCH, "pillow"),
    ),
    Candidate(
        name="torchvision",
        title="torchvision ImageFolder, antialiased",
        maker="peers_torch:make_torchvision",
        storage="folder",
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
        modules=("streaming",),
        packages=("mosaicml-streaming", _TORCH, _OPENCV),
    ),
    Candidate(
        name="litdata",
        title="LitData + OpenCV",
        maker="peers_streaming:make_litdata",
        storage="litdata",
        modules=("litdata",),
        packages=("litdata", _TORCH, _OPENCV),
    ),
    Candidate(
        name="huggingface",
        title="Hugging Face datasets, streaming Parquet + OpenCV",
        maker="peers_streaming:make_huggingface",
        storage="parquet",
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
        modules=("nvidia.dali",),
        packages=("nvidia-dali-cuda130", "nvidia-dali-cuda120", _TORCH),
    ),
    Candidate(
        name="ffcv",
        title="FFCV",
        maker="peers_native:make_ffcv",
        storage="ffcv-400",
        modules=("ffcv",),
        packages=("ffcv", _TORCH),
    ),
    Candidate(
        name="nodes-400",
        title="torchdata.nodes, threads + OpenCV",
        maker="peers_threads:make_nodes",
        storage="folder-400",
        modules=("torchdata.nodes",),
        packages=("torchdata", _TORCH, _OPENCV),
    ),
    Candidate(
        name="shardio-sequential",
        title="shardio, in sequence",
        maker="from_shardio:make_small_sequential",
        storage="small",
        cases=_cases("small"),
    ),
    Candidate(
        name="shardio-shuffled",
        title="shardio, shuffled",
        maker="from_shardio:make_small_shuffled",
        storage="small",
        cases=_cases("small"),
    ),
    Candidate(
        name="webdataset-sequential",
        title="WebDataset, in sequence",
        maker="peers_shards:make_small_sequential",
        storage="small",
        cases=_cases("small"),
        modules=("webdataset",),
        packages=("webdataset", _TORCH),
    ),
    Candidate(
        name="webdataset-shuffled",
        title="WebDataset, buffer of 1,000",
        maker="peers_shards:make_small_shuffled",
        storage="small",
        cases=_cases("small"),
        modules=("webdataset",),
        packages=("webdataset", _TORCH),
    ),
    Candidate(
        name="mosaic-sequential",
        title="MosaicML Streaming, in sequence",
        maker="peers_streaming:make_small_sequential",
        storage="small-mds",
        cases=_cases("small"),
        modules=("streaming",),
        packages=("mosaicml-streaming", _TORCH),
    ),
    Candidate(
        name="mosaic-shuffled",
        title="MosaicML Streaming, shuffled",
        maker="peers_streaming:make_small_shuffled",
        storage="small-mds",
        cases=_cases("small"),
        modules=("streaming",),
        packages=("mosaicml-streaming", _TORCH),
    ),
)


def find(name: str) -> Candidate:
    """Return a candidate by its name."""
    found = [candidate for candidate in CANDIDATES if candidate.name == name]
    if not found:
        names = ", ".join(candidate.name for candidate in CANDIDATES)
        raise SystemExit(f"there is no candidate {name!r}; there are {names}")
    return found[0]
