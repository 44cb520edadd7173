"""A processor runs the fastest code it supports, in every thread. All builds give the same pixels as the libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import cv2
import numpy as np
import pytest
import simplejpeg

import shardio
import shardio.kernel
from shardio.images import CropPlan, Resampling
from shardio.images.jpeg import Box
from shardio.images.rendering import as_records, normalize_floats
from shardio.images.tiling import tile_jpeg
from shardio.kernel import load_functions, targets, why_no_kernel
from shardio.kernel.functions import Functions, Kernel
from shardio.kernel.targets import Target, find_platform, find_targets
from shardio.transforms import ColorJitter, Compose, RandomResizedCrop
from tests.images import naive
from tests.images.jpeg_files import CV2_SAMPLINGS, SAMPLINGS, by_cv2, by_simplejpeg
from tests.images.pictures import Array, make_picture

NEHALEM = "fpu sse sse2 ht pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
HASWELL = f"{NEHALEM} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512vbmi avx512_vbmi2 avx512_vnni"


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate an x86-64 Linux machine. Return the path of the file that describes the machine's processors."""
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(targets, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(targets, "_read_flags", targets._read_flags.__wrapped__)
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse sse2", []),
        (NEHALEM, ["x86-64-v2"]),
        (HASWELL, ["x86-64-v3", "x86-64-v2"]),
        (HASWELL.replace("fma ", ""), ["x86-64-v2"]),
        (SKYLAKE, ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
        (SKYLAKE.replace(" avx512vl", ""), ["x86-64-v3", "x86-64-v2"]),
        (ICE_LAKE, ["x86-64-v4-vbmi2", "x86-64-v4", "x86-64-v3", "x86-64-v2"]),
        (ICE_LAKE.replace(" avx512_vnni", ""), ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
    ],
)
def test_a_processor_runs_the_code_whose_instructions_it_has(cpuinfo: Path, flags: str, expected: list[str]) -> None:
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: Any\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: sse\n")
    assert [target.name for target in find_targets()] == expected


def test_without_known_flags_no_x86_code_runs(cpuinfo: Path) -> None:
    assert find_targets() == []


@pytest.mark.parametrize(
    ("system", "machine", "platform", "names"),
    [
        ("Linux", "aarch64", "manylinux_2_17_aarch64", ["aarch64"]),
        ("Darwin", "arm64", "macosx_11_0_arm64", ["macos-arm64"]),
        ("Darwin", "x86_64", "macosx_11_0_x86_64", ["macos-x86-64"]),
        ("Linux", "s390x", None, []),
        ("Windows", "AMD64", None, []),
    ],
)
def test_other_platforms_have_one_target_or_none(
    system: str, machine: str, platform: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert find_platform() == platform
    assert [target.name for target in find_targets()] == names


def test_with_another_c_library_or_32_bits_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert find_platform() is None
    monkeypatch.undo()
    monkeypatch.setattr("sys.maxsize", 2**31 - 1)
    assert find_platform() is None


def test_the_first_target_that_is_built_and_loads_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "damaged.so").write_bytes(b"not a shared object")
    damaged, slowest = SimpleNamespace(path=tmp_path / "damaged.so"), find_targets()[-1]
    monkeypatch.setattr("shardio.kernel.find_targets", lambda: [Target("not built", "", ""), damaged, slowest])
    functions, reason = load_functions.__wrapped__()
    assert functions is not None
    assert (functions.name, reason) == (slowest.path.stem, "")
    monkeypatch.setattr("shardio.kernel.find_targets", lambda: [damaged])
    functions, reason = load_functions.__wrapped__()
    assert functions is None
    assert reason.startswith("the kernel cannot be loaded: ")
    assert "damaged.so" in reason


NOWHERE = """
import platform, sys
platform.machine = lambda: "s390x"
from tests.kernel.test_targets import describe_batches
print(describe_batches(sys.argv[1]))
"""


def describe_batches(path: str) -> list[object]:
    """Return a checksum of each batch, and the reason why there is no kernel, or None if there is one."""
    transform = Compose([RandomResizedCrop(40), ColorJitter(0.4, 0.4, 0.4, 0.1)])
    dataset = shardio.ShardDataset(path, shuffle=True, transform=transform)
    loader = shardio.DataLoader(dataset, batch_size=4, num_workers=0)
    return [*(crc32(images.numpy().tobytes()) for images, _ in loader), why_no_kernel()]


def test_where_no_build_fits_the_libraries_make_the_same_batches(packed: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NOWHERE, str(packed)], capture_output=True, text=True, check=True)
    *checksums, reason = describe_batches(str(packed))
    assert done.stdout.strip() == str([*checksums, "shardio was built without the kernel for this processor"])
    assert reason is None


HEIGHT, WIDTH = 150, 203

CROPS: list[tuple[Box, tuple[int, int], tuple[int, int], bool, Resampling]] = [
    (Box(20, 30, 96, 101), (96, 101), (0, 0), False, "plain bilinear"),  # Not resized.
    (Box(0, 0, HEIGHT, WIDTH), (96, 101), (0, 0), True, "plain bilinear"),  # Shrunk.
    (Box(31, 47, 50, 41), (96, 101), (0, 0), False, "plain bilinear"),  # Enlarged.
    (Box(3, 90, 120, 77), (130, 140), (20, 25), True, "plain bilinear"),  # A window of an enlarged part.
    (Box(70, 6, 33, 160), (96, 101), (-9, 5), False, "plain bilinear"),  # A window that exceeds the resized part.
    (Box(0, 0, HEIGHT, WIDTH), (96, 101), (0, 0), False, "antialiased bilinear"),
    (Box(31, 47, 50, 41), (130, 140), (20, 25), True, "antialiased bicubic"),
    (Box(0, 9, HEIGHT, 63), (96, 101), (0, 0), True, "antialiased bicubic"),
    (Box(5, 9, 140, 163), (61, 70), (3, 0), True, "antialiased box"),
]
"""The box of each crop, its size when resized, the window's corner, whether to mirror, and the resampling method."""


def make_files() -> Iterator[tuple[str, bytes, Array]]:
    """Yield the names, files and pixels of baseline, tiled and progressive JPEGs with each subsampling."""
    picture = make_picture(HEIGHT, WIDTH)
    for sampling in SAMPLINGS:
        for quality in (60, 95):
            baseline = by_simplejpeg(picture, sampling, quality)
            options = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_QUALITY, quality]
            if sampling == "gray":
                progressive = by_cv2(picture[..., 0].copy(), *options)
            else:
                sampled = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, CV2_SAMPLINGS[sampling]]
                progressive = by_cv2(picture, *options, *sampled)
            pixels = np.asarray(simplejpeg.decode_jpeg(baseline))
            yield f"{sampling}, quality {quality}", baseline, pixels
            yield f"{sampling}, quality {quality}, tiled", tile_jpeg(baseline), pixels
            yield f"{sampling}, quality {quality}, progressive", progressive, simplejpeg.decode_jpeg(progressive)


def test_each_build_renders_the_libraries_pixels(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardio.kernel, "find_functions", lambda: functions)  # Tiling uses these functions too.
    names, contents, originals = zip(*make_files(), strict=True)
    kernel, number = Kernel(functions), len(names)
    for box, size, corner, is_flipped, resampling in CROPS:
        window = Box(*corner, 96, 101)
        parts = {"box": box, "size": size, "window": window, "flip": is_flipped}
        plan = CropPlan(**{key: np.array([value] * number) for key, value in parts.items()}, resampling=resampling)
        rows = np.zeros((number, 96, 101, 3), np.uint8)
        assert kernel.decode(contents, as_records(plan), np.arange(number), rows).all()
        for index, (name, pixels) in enumerate(zip(names, originals, strict=True)):
            expected = naive.render(pixels, plan, index)
            np.testing.assert_array_equal(rows[index], expected, err_msg=f"{name}, {box} to {size}, {resampling}")


def test_each_build_normalizes_like_numpy(functions: Functions) -> None:
    means, deviations = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)
    pixels = make_picture(67, 59)
    scaled = pixels.transpose(2, 0, 1).astype(np.float32) * np.float32(1 / 255)
    normalized = functions.normalize_image(pixels, means, deviations)
    np.testing.assert_array_equal(normalized, normalize_floats(scaled, means, deviations))


DECODE = """
import os
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from shardio.images import CropPlan
from shardio.images.rendering import as_records
from shardio.kernel import find_kernel
from shardio.process import count_processors
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import make_picture

kernel, content, plan = find_kernel(), by_pillow(make_picture(99, 77)), as_records(CropPlan.whole(np.array([[99, 77]])))

def decode(_=None):
    rows = np.zeros((1, 99, 77, 3), np.uint8)
    assert kernel.decode([content], plan, np.arange(1), rows).all()
    return rows.tobytes()

expected = decode()
with ThreadPoolExecutor(16) as threads:
    assert set(threads.map(decode, range(200))) == {expected}
num_turns = 0
while kernel._processors.acquire(blocking=False):  # As if threads decoded while this one forks.
    num_turns += 1
assert len(kernel._free) <= num_turns == count_processors()
if (child := os.fork()) == 0:
    os._exit(7 if decode() == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_more_threads_than_processors_take_turns_and_forks_do_not_wait_for_them() -> None:
    done = subprocess.run([sys.executable, "-c", DECODE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7\n", "")
