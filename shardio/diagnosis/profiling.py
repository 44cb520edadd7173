"""Find out how much time each stage of a sample takes, in any dataset.

The samples are made in the calling thread under ``sys.setprofile``. An event that begins a stage, such as a call to
Pillow's decoder or to a transform, is recognized by the code object or the name of the built-in function. All other
time belongs to the stage that is running, so each moment is counted once.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from time import perf_counter, process_time
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from shardio.images import find_format

Kind = Literal["reading", "decoding", "transform", "your code", "collation", "other"]


class SampleStage(NamedTuple):
    """A stage of a sample: its kind, and the name of the transform or function."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kind


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image that was opened: its format, its size (width, height), and its file if known."""

    format: str
    size: tuple[int, int]
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleProfile:
    """The time that samples take in one thread.

    Attributes:
        num_samples: The number of samples.
        sample_s: The time for one sample, in seconds, measured without profiling. Time during which other threads had
            the processor is not counted.
        cpu_s: The processor time for one sample, in seconds, measured without profiling.
        stages: Each stage's share of the time, the largest first.
        images: The images that Pillow and OpenCV opened.
    """

    num_samples: int
    sample_s: float
    cpu_s: float
    stages: dict[SampleStage, float]
    images: Sequence[SeenImage] = ()

    @property
    def waits(self) -> bool:
        """Whether most of a sample's time is spent waiting, for example for a disk or a network."""
        return self.cpu_s < self.sample_s / 2

    def share(self, kind: Kind) -> float:
        """Return the share of the time that all stages of a kind take together."""
        return sum(share for stage, share in self.stages.items() if stage.kind == kind)


def profile_samples(
    make: Callable[[], Iterator[Any]], collate_fn: Callable[[list[Any]], Any] | None, num_samples: int, seconds: float
) -> SampleProfile | None:
    """Make samples and return how the time is spent, or None if there are no samples.

    Args:
        make: Returns an iterator that makes each sample when it is requested.
        collate_fn: Makes a batch from a list of samples; None if samples are not collated.
        num_samples: The maximum number of samples.
        seconds: The intended total time, in seconds. Up to half of it is spent without profiling.
    """
    next(make(), None)  # The first sample may load libraries.
    iterator, samples = make(), list[Any]()
    began, cpu_began, queued_before = perf_counter(), process_time(), _read_queued()
    for sample in islice(iterator, num_samples):
        samples.append(sample)
        if perf_counter() - began > seconds / 2:
            break
    if not samples:
        return None
    if collate_fn is not None:
        collate_fn(samples)
    num_timed = len(samples)
    cpu_s = (process_time() - cpu_began) / num_timed
    sample_s = (perf_counter() - began - (_read_queued() - queued_before)) / num_timed
    clock = _StageClock()
    with _observe_opencv(clock.images), clock.running():
        profiled = list(islice(iterator, num_timed))
        profiled += islice(make(), num_timed - len(profiled))
        if collate_fn is not None:
            collate_fn(profiled)
    total_s = sum(clock.seconds.values()) or 1.0
    shares = {stage: spent_s / total_s for stage, spent_s in clock.seconds.items()}
    return SampleProfile(
        num_samples=num_timed,
        sample_s=sample_s,
        cpu_s=cpu_s,
        stages=dict(sorted(shares.items(), key=lambda item: -item[1])),
        images=clock.images,
    )


def _read_queued() -> float:
    """Return the time in seconds that this thread has waited for a processor; 0 if unknown (see proc(5))."""
    with suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


_READING = SampleStage("reading")
_DECODING = SampleStage("decoding")
_COLLATION = SampleStage("collation")
_OTHER = SampleStage("other")

_BUILTINS = {
    **dict.fromkeys(("open", "read", "readinto", "readline", "pread", "preadv", "mmap"), _READING),
    **dict.fromkeys(("recv", "recv_into", "connect", "getaddrinfo", "stat", "lstat", "scandir", "listdir"), _READING),
    **dict.fromkeys(("imdecode", "imread", "decode_jpeg", "decode_jpeg_header", "decompress"), _DECODING),
}
"""The stages of built-in functions and methods, by name."""

_FUNCTIONS = {
    ("PIL/ImageFile.py", "load"): _DECODING,
    ("PIL/Image.py", "open"): _DECODING,
    ("torchvision/io/image.py", "read_file"): _READING,
    ("torchvision/io/image.py", "decode_image"): _DECODING,
    ("torchvision/io/image.py", "decode_jpeg"): _DECODING,
    ("torchvision/io/image.py", "decode_png"): _DECODING,
    ("torchvision/io/image.py", "decode_webp"): _DECODING,
    ("numpy/lib/_npyio_impl.py", "load"): _DECODING,
    ("soundfile.py", "read"): _DECODING,
    ("utils/data/_utils/collate.py", "default_collate"): _COLLATION,
}
"""The stage of each function, by the end of its file's path and the function's name."""

_PACKAGES = {
    **dict.fromkeys(("h5py", "zarr", "fsspec", "s3fs", "botocore", "requests", "urllib3", "lmdb"), _READING),
    **dict.fromkeys(("shardio/reading", "shardio/storage", "shardio/shards"), _READING),
    **dict.fromkeys(("shardio/images", "shardio/decoding", "shardio/kernel"), _DECODING),
}
"""The stage of all functions in a package, by the package's path."""

_TRANSFORMS = ("torchvision", "albumentations", "timm", "kornia", "monai", "torchaudio", "transformers")
"""The packages whose callable objects are transforms."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class _StageClock:
    """A clock that sums the time of each stage in the calling thread, and notes the images that Pillow opens."""

    def __init__(self) -> None:
        self.seconds: dict[SampleStage, float] = defaultdict(float)
        self.images = list[SeenImage]()
        # The stage of each code object; "transform" for transforms' methods, whose stages are named after classes.
        self._stages = dict[CodeType, SampleStage | Literal["transform"] | None]()
        self._running: list[tuple[SampleStage, FrameType | None, bool]] = [(_OTHER, None, False)]
        self._mark = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile the calling thread."""
        before = sys.getprofile()
        self._mark = perf_counter()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)
            self._count()

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            try:
                stage = self._stages[code]
            except KeyError:
                stage = self._stages[code] = _classify(code)
            if stage is None:
                return
            if stage == "transform":
                owner = frame.f_locals.get("self")
                if owner is None or hasattr(owner, "transforms"):  # A Compose only calls other transforms.
                    return
                stage = SampleStage("transform", type(owner).__name__)
            self._push(stage, frame, False)
        elif event == "return":
            _, running, is_builtin = self._running[-1]
            if running is frame and not is_builtin:
                self._pop()
                if arg is not None and frame.f_code.co_name == "open" and hasattr(arg, "size"):
                    path = str(getattr(arg, "filename", "") or "")
                    self.images.append(SeenImage(str(arg.format or "?"), tuple(arg.size), path))
        elif event == "c_call":
            name = arg.__name__
            stage = _BUILTINS.get(name)
            if stage is None and name == "decode" and type(arg.__self__).__name__ == "ImagingDecoder":
                stage = _DECODING
            if stage is not None:
                self._push(stage, frame, True)
        elif self._running[-1][1] is frame and self._running[-1][2]:  # c_return or c_exception.
            self._pop()

    def _push(self, stage: SampleStage, frame: FrameType, is_builtin: bool) -> None:
        self._count()
        self._running.append((stage, frame, is_builtin))
        self._mark = perf_counter()

    def _pop(self) -> None:
        self._count()
        self._running.pop()
        self._mark = perf_counter()

    def _count(self) -> None:
        self.seconds[self._running[-1][0]] += perf_counter() - self._mark


def _classify(code: CodeType) -> SampleStage | Literal["transform"] | None:
    path, name = code.co_filename.replace("\\", "/"), code.co_name
    for (file, function), stage in _FUNCTIONS.items():
        if name == function and path.endswith(f"/{file}"):
            return stage
    if (package := next((path for path in _PACKAGES if f"/{path}/" in code.co_filename), None)) is not None:
        return _PACKAGES[package]
    if name in ("__call__", "forward") and any(f"/{package}/" in path for package in _TRANSFORMS):
        return "transform"
    is_own = not path.startswith(("<frozen", *_LIBRARIES)) and "/site-packages/" not in path and "/shardio/" not in path
    if not is_own or name.startswith("<"):  # Comprehensions and generator expressions belong to their function.
        return None
    return SampleStage("your code", f"{getattr(code, 'co_qualname', name)} ({PurePath(path).name})")


@contextmanager
def _observe_opencv(images: list[SeenImage]) -> Iterator[None]:
    """Note the images that OpenCV decodes: its functions are built in, so profiling does not show their results."""
    cv2: Any = sys.modules.get("cv2")
    if cv2 is None:
        yield
        return
    imdecode, imread = cv2.imdecode, cv2.imread

    def decode(content: Any, *args: Any, **kwargs: Any) -> Any:
        image = imdecode(content, *args, **kwargs)
        if image is not None:
            images.append(SeenImage(find_format(bytes(content[:64])) or "?", image.shape[1::-1]))
        return image

    def read(path: str, *args: Any, **kwargs: Any) -> Any:
        image = imread(path, *args, **kwargs)
        if image is not None:
            with Path(path).open("rb") as file:
                images.append(SeenImage(find_format(file.read(64)) or "?", image.shape[1::-1], path))
        return image

    cv2.imdecode, cv2.imread = decode, read
    try:
        yield
    finally:
        cv2.imdecode, cv2.imread = imdecode, imread
