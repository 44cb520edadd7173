"""The candidates, each with its name, its data format, the modules that it needs, and the function that creates it.

A candidate's modules are imported only when it runs, so its process imports no other candidate's modules.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.loaders.job import Epochs, Job

PIXELS_KEPT = "JPEGs unchanged, or rewritten losslessly"
PIXELS_CHANGED = "JPEGs re-encoded: longer side 400, quality 90"
PIXELS_SMALL = "longer side 256: JPEGs of quality 90 or PPMs for shardio, raw pixels for its peers"
SMALL = "samples of 1 KiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A loader in the comparison.

    Attributes:
        name: The loader's name on the command line.
        title: The loader's name in tables.
        maker: The function that creates the loader from a Job, as ``module:function`` in this package.
        storage: The name of the format that the loader reads (see :mod:`benchmarks.loaders.data`).
        cases: The cases that the loader can run.
        modules: The modules that the loader needs besides shardio's.
        packages: The packages whose versions are recorded.
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
        """A description of the candidate's data. Candidates are compared with peers that read the same data."""
        if self.storage.startswith("small"):
            return SMALL
        if self.storage.endswith("-256"):
            return PIXELS_SMALL
        return PIXELS_CHANGED if self.storage.endswith("-400") else PIXELS_KEPT

    @property
    def is_shardio(self) -> bool:
        return self.name.startswith("shardio")

    @property
    def is_peer(self) -> bool:
        """Whether the candidate is another library's loader: not shardio's, and not the bare loop."""
        return not self.is_shardio and self.name != "bare"

    @property
    def is_installed(self) -> bool:
        return all(_is_found(module) for module in self.modules)

    def make(self, job: Job) -> Epochs:
        """Create the loader."""
        module, _, function = self.maker.partition(":")
        make: Callable[[Job], Epochs] = getattr(importlib.import_module(f"benchmarks.loaders.{module}"), function)
        return make(job)


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # The module's parent package is missing.
        return False


def _cases(names: str) -> frozenset[str]:
    return frozenset(names.split())


_OPENCV, _SIMPLEJPEG, _TORCH = "opencv-python-headless", "simplejpeg", "torch"

CANDIDATES = (
    Candidate(
        name="shardio-tiled",
        title="shardio, shards, tiled",
        maker="from_shardio:make_shards",
        storage="tiled",
        cases=_cases("train eval first-batch epochs training-process memory flatness"),
    ),
    Candidate(
        name="shardio-cached",
        title="shardio, shards, tiled, decoded_cache",
        maker="from_shardio:make_cached",
        storage="tiled",
        cases=_cases("train eval epochs"),
    ),
    Candidate(
        name="shardio-shards",
        title="shardio, shards, JPEGs unchanged",
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
        title="shardio, shards, re-encoded and tiled",
        maker="from_shardio:make_shards",
        storage="tiled-400",
    ),
    Candidate(
        name="shardio-256",
        title="shardio, shards, re-encoded and tiled",
        maker="from_shardio:make_shards",
        storage="tiled-256",
    ),
    Candidate(
        name="shardio-ppm",
        title="shardio, shards of PPMs",
        maker="from_shardio:make_shards",
        storage="ppm-256",
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
        name="torch-simplejpeg",
        title="torch DataLoader + simplejpeg",
        maker="peers_torch:make_simplejpeg",
        storage="folder",
        packages=(_TORCH, _SIMPLEJPEG, _OPENCV),
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
        name="nodes-simplejpeg",
        title="torchdata.nodes, threads + simplejpeg",
        maker="peers_threads:make_nodes_simplejpeg",
        storage="folder",
        modules=("torchdata.nodes",),
        packages=("torchdata", _TORCH, _SIMPLEJPEG, _OPENCV),
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
        name="turboloader",
        title="turboloader, float32",
        maker="peers_native:make_turboloader",
        storage="tar",
        cases=_cases("train"),
        modules=("turboloader",),
        packages=("turboloader",),
    ),
    Candidate(
        name="turboloader-256",
        title="turboloader, float32",
        maker="peers_native:make_turboloader_raw",
        storage="turboloader-256",
        cases=_cases("train"),
        modules=("turboloader",),
        packages=("turboloader",),
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
        name="nodes-256",
        title="torchdata.nodes, threads + memory-mapped numpy array + OpenCV's resize",
        maker="peers_threads:make_nodes_raw",
        storage="raw-256",
        modules=("torchdata.nodes",),
        packages=("torchdata", _TORCH, _OPENCV),
    ),
    Candidate(
        name="ffcv-256",
        title="FFCV",
        maker="peers_native:make_ffcv",
        storage="ffcv-256",
        modules=("ffcv",),
        packages=("ffcv", _TORCH),
    ),
    Candidate(
        name="shardio-sequential",
        title="shardio, sequential",
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
        title="WebDataset, sequential",
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
        title="MosaicML Streaming, sequential",
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
    """Return the candidate with the given name."""
    found = [candidate for candidate in CANDIDATES if candidate.name == name]
    if not found:
        names = ", ".join(candidate.name for candidate in CANDIDATES)
        raise SystemExit(f"unknown candidate {name!r}: use one of {names}")
    return found[0]
