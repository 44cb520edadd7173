"""Operations on pixels, compiled or with Pillow, yield the same pixels as torchvision's functions for Pillow images."""

from __future__ import annotations

import importlib
import math
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import cloudpickle
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from shardio.images import define_operation, edit_images, make_operations
from shardio.images.rendering import blur, edit_by_pillow
from shardio.kernel import operations as codes, require_functions
from shardio.kernel.functions import Functions
from shardio.kernel.records import OPERATION
from shardio.libraries import import_library
from tests.raising import assert_raises

functional: Any = None
if find_spec("torchvision") is not None:
    import_library("torchvision")
    functional = importlib.import_module("torchvision.transforms.v2.functional")
needs_torchvision = pytest.mark.skipif(functional is None, reason="torchvision is not installed")

IS_FUSED = platform.machine() in ("aarch64", "arm64")
"""Whether Pillow's compiled code fuses multiplications and additions. Fusing changes some pixels in some warps."""

Pixels = NDArray[np.uint8]
Step = tuple[int, list[float], Callable[[Image.Image], Image.Image]]


def make_image(random: np.random.Generator) -> Pixels:
    """Return noise, one color, a few colors or a ramp, of any size."""
    height, width = random.integers(1, 70, 2)
    kinds: list[Callable[[], Any]] = [
        lambda: random.integers(0, 256, (height, width, 3)),
        lambda: np.full((height, width, 3), random.integers(256)),
        lambda: random.integers(0, 3, (height, width, 3)) * random.integers(1, 85),
        lambda: np.add.outer(np.arange(height), np.arange(width))[..., np.newaxis] * [2, 4, 6] % 256,
    ]
    return np.asarray(kinds[random.integers(len(kinds))]()).astype(np.uint8)


def make_steps(random: np.random.Generator) -> dict[str, Step]:
    factor = float(random.choice([0, 1, 5.5])) if random.random() < 0.1 else float(random.uniform(0, 2))
    shift, threshold, bits = float(random.uniform(-0.5, 0.5)), float(random.uniform(0, 257)), int(random.integers(1, 9))
    hue = math.trunc(shift * 255) % 256
    fill = random.integers(0, 256, 3).tolist()
    matrix = make_matrix(random)
    perspective, linear, cubic = make_divisor(random), Image.Resampling.BILINEAR, Image.Resampling.BICUBIC

    def make_warp(interpolation: int, divisor: list[float] | None = None) -> Step:
        method = Image.Transform.AFFINE if divisor is None else Image.Transform.PERSPECTIVE
        return (
            codes.AFFINE if divisor is None else codes.PERSPECTIVE,
            [*matrix, *fill, interpolation, *(divisor or [])],
            lambda image: image.transform(
                image.size, method, [*matrix, *(divisor or [])], interpolation, fillcolor=tuple(fill)
            ),
        )

    top, left = random.integers(0, 30, 2).tolist()
    part = (left, top, left + 1 + 2 * top, top + 1 + left)
    box = [top, left, part[3] - top, part[2] - left]
    warps = {
        "bilinear affine": make_warp(linear),
        "bicubic affine": make_warp(cubic),
        "perspective": make_warp(Image.Resampling.NEAREST, perspective),
        "bilinear perspective": make_warp(linear, perspective),
        "bicubic perspective": make_warp(cubic, perspective),
    }
    return {
        "brightness": (codes.BRIGHTNESS, [factor], lambda image: functional.adjust_brightness(image, factor)),
        "contrast": (codes.CONTRAST, [factor], lambda image: functional.adjust_contrast(image, factor)),
        "saturation": (codes.SATURATION, [factor], lambda image: functional.adjust_saturation(image, factor)),
        "hue": (codes.HUE, [hue], lambda image: functional.adjust_hue(image, shift)),
        "grayscale": (codes.GRAYSCALE, [], lambda image: functional.rgb_to_grayscale(image, 3)),
        "solarize": (codes.SOLARIZE, [math.ceil(min(threshold, 256))], lambda im: functional.solarize(im, threshold)),
        "posterize": (codes.POSTERIZE, [256 - (1 << 8 - bits)], lambda image: functional.posterize(image, bits)),
        "invert": (codes.INVERT, [], lambda image: functional.invert(image)),
        "autocontrast": (codes.AUTOCONTRAST, [], lambda image: functional.autocontrast(image)),
        "equalize": (codes.EQUALIZE, [], lambda image: functional.equalize(image)),
        "sharpness": (codes.SHARPNESS, [factor], lambda image: functional.adjust_sharpness(image, factor)),
        "affine": make_warp(Image.Resampling.NEAREST),
        **({} if IS_FUSED else warps),
        "erase": (codes.ERASE, [*box, *fill], lambda image: paint(image, part, fill)),
        "vertical flip": (codes.VERTICAL_FLIP, [], lambda image: functional.vertical_flip(image)),
    }


def paint(image: Image.Image, part: tuple[int, int, int, int], color: list[int]) -> Image.Image:
    painted = image.copy()
    painted.paste(tuple(color), part)
    return painted


def draw_step(random: np.random.Generator) -> Step:
    steps = list(make_steps(random).values())
    return steps[random.integers(len(steps))]


def make_matrix(random: np.random.Generator) -> list[float]:
    """Return a rotation, or a matrix that scales, shears and shifts, perhaps beyond the range of Pillow's integers."""
    if random.random() < 0.5:
        angle = random.uniform(-4, 4)
        cosine, sine = math.cos(angle), math.sin(angle)
        return [cosine, sine, float(random.normal() * 10), -sine, cosine, float(random.normal() * 10)]
    huge = float(random.choice([1, 1, 1, 1e4]))
    scales = random.choice([1, 1, 0.5, -1, 1.7], 2).tolist()
    shears = random.choice([0, 0, 0.3], 2).tolist()
    offsets = (random.integers(-9, 9, 2) + random.choice([0, 0.37], 2)).tolist()
    return [huge * scales[0], shears[0], offsets[0], shears[1], scales[1], offsets[1]]


def make_divisor(random: np.random.Generator) -> list[float]:
    """Return the last two coefficients of a perspective transform, whose horizon may be in the image."""
    return [float(number) for number in random.normal(size=2) * random.choice([0, 1e-3, 0.1])]


def as_operations(steps: list[Step]) -> NDArray[np.void]:
    operations = np.zeros(len(steps), OPERATION)
    for operation, (code, numbers, _) in zip(operations, steps, strict=True):
        operation["code"] = code
        operation["numbers"][: len(numbers)] = numbers
    return operations


def edit_compiled(pixels: Pixels, operations: NDArray[np.void], functions: Functions | None = None) -> Pixels:
    edited = pixels.copy()
    (functions or require_functions()).edit_images([edited], operations[np.newaxis])
    return edited


def edit_by_torchvision(pixels: Pixels, steps: list[Step]) -> Pixels:
    image = Image.fromarray(pixels)
    for *_, function in steps:
        image = function(image)
    return np.array(image)


def make_blur(radii: tuple[int, int], sigmas: tuple[float, float]) -> NDArray[np.void]:
    """Return a blur, OPERATION [1], with these vertical and horizontal radii and standard deviations."""
    down, across = (math.exp(-0.5 / sigma**2) for sigma in sigmas)
    operation: NDArray[np.void] = make_operations(1, codes.GAUSSIAN_BLUR, radii[0], down, radii[1], across)[0]
    return operation


@needs_torchvision
@pytest.mark.parametrize("name", sorted(make_steps(np.random.default_rng(0))))
def test_each_operation_gives_torchvisions_pixels(name: str) -> None:
    random = np.random.default_rng(sum(name.encode()))
    for _ in range(60):
        pixels, step = make_image(random), make_steps(random)[name]
        expected, operations = edit_by_torchvision(pixels, [step]), as_operations([step])
        for edit in (edit_compiled, edit_by_pillow):
            np.testing.assert_array_equal(edit(pixels, operations), expected, f"{step[:2]}, {pixels.shape}")


def test_hues_of_all_kinds_of_colors_are_turned_as_by_pillow() -> None:
    # Two channels have all pairs of values, and the third channel has one random value.
    low, middle = (part.reshape(256, 256) for part in np.meshgrid(np.arange(256), np.arange(256), indexing="ij"))
    random = np.random.default_rng(0)
    for _ in range(12):
        colors = np.stack([low, middle, np.full_like(low, random.integers(256))], axis=2)[..., random.permutation(3)]
        pixels, shift = np.ascontiguousarray(colors).astype(np.uint8), int(random.integers(256))
        operations = make_operations(1, codes.HUE, shift)[0]
        np.testing.assert_array_equal(edit_compiled(pixels, operations), edit_by_pillow(pixels, operations))


def test_autocontrast_of_all_lowest_and_highest_values_is_pillows() -> None:
    # In these one-row images, the colors have the same lowest value, and highest values that differ by 1 (up to 255).
    operations = make_operations(1, codes.AUTOCONTRAST)[0]
    for low in range(0, 255, 10):
        for high in range(low, 256, 7):
            highest = np.minimum([high, high + 1, high + 2], 255)
            pixels = np.clip(np.arange(256)[:, np.newaxis], low, highest)[np.newaxis].astype(np.uint8)
            expected = edit_by_pillow(pixels, operations)
            np.testing.assert_array_equal(edit_compiled(pixels, operations), expected, f"{low} to {highest}")


def test_images_have_their_own_operations_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled functions, Pillow edits the images."""
    random = np.random.default_rng(3)
    images = [make_image(random) for _ in range(100)]
    images[4] = np.zeros((9, 20, 3), np.uint8)[:, ::2]  # Not contiguous.
    operations = np.stack([as_operations([draw_step(random) for _ in range(5)]) for _ in images])
    expected = [edit_by_pillow(image, own) for image, own in zip(images, operations, strict=True)]
    others = [image.copy() for image in images]
    edit_images(images, operations)
    monkeypatch.setattr("shardio.images.rendering.find_functions", lambda: None)
    edit_images(others, operations)
    for image, other, wanted in zip(images, others, expected, strict=True):
        np.testing.assert_array_equal(image, wanted)
        np.testing.assert_array_equal(other, wanted)


def test_each_build_has_all_operations_with_pillows_pixels(functions: Functions) -> None:
    random, seen = np.random.default_rng(4), set[int]()
    for _ in range(20):
        each = [as_operations([step]) for step in make_steps(random).values()]
        begin, add = (make_operations(1, code, 0.5)[0] for code in (codes.BEGIN_MIXTURE, codes.ADD_TO_MIXTURE))
        mixture = np.concatenate([begin, each[0], add, make_operations(1, codes.END_MIXTURE)[0]])
        for operations in (*each, mixture, make_blur((3, 2), (1.5, 0.9)), make_operations(1, codes.NONE)[0]):
            pixels = make_image(random)
            expected = edit_by_pillow(pixels, operations)
            np.testing.assert_array_equal(edit_compiled(pixels, operations, functions), expected)
            seen |= set(operations["code"].tolist())
    missing = {codes.PERSPECTIVE} if IS_FUSED else set[int]()
    assert seen == set(range(codes.END_MIXTURE + 1)) - missing, "END_MIXTURE is the last code"


@pytest.mark.parametrize("code", [codes.END_MIXTURE + 1, -5])
def test_an_operation_that_does_not_exist_is_refused(code: int) -> None:
    assert_raises(ValueError, f"there is no operation with the code {code}", make_operations, 3, code)


# Gaussian blur.


def test_compiled_blur_gives_the_pixels_of_its_definition() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        pixels, radii = make_image(random), (int(random.integers(0, 40)), int(random.integers(0, 40)))
        operation = make_blur(radii, (float(random.uniform(0.01, 9)), float(random.uniform(0.01, 9))))
        np.testing.assert_array_equal(edit_compiled(pixels, operation), edit_by_pillow(pixels, operation))


@needs_torchvision
def test_blurred_pixels_are_torchvisions_or_rarely_differ_by_1() -> None:
    random, num_different, num_values = np.random.default_rng(1), 0, 0
    for _ in range(60):
        pixels = make_image(random)
        radii = [int(random.integers(0, min(side, 12))) for side in pixels.shape[:2]]
        sigmas = (float(random.uniform(0.1, 4)), float(random.uniform(0.1, 4)))
        size = [2 * radii[1] + 1, 2 * radii[0] + 1]
        expected = np.array(functional.gaussian_blur(Image.fromarray(pixels), size, list(sigmas[::-1])))
        blurred = edit_compiled(pixels, make_blur((radii[0], radii[1]), sigmas))
        difference = np.abs(blurred.astype(int) - expected)
        assert difference.max() <= 1, f"{pixels.shape}, {radii}, {sigmas}"
        num_different, num_values = num_different + int(difference.sum()), num_values + difference.size
    assert num_different < num_values / 10_000


def test_weights_are_a_gaussian_and_a_single_color_stays() -> None:
    line = np.zeros((1, 61, 3), np.uint8)
    line[0, 30] = 255
    blurred = blur(line, 0, 0.5, 15, math.exp(-0.5 / 4.0**2))[0, :, 0]
    gaussian = np.exp(-0.5 * (np.arange(-15, 16) / 4) ** 2)
    np.testing.assert_array_equal(blurred, np.pad(np.rint(255 * gaussian / gaussian.sum()), 15))
    for value in (0, 1, 128, 255):
        image: Pixels = np.full((20, 31, 3), value, np.uint8)
        assert (edit_compiled(image, make_blur((11, 7), (3.0, 2.0))) == value).all()


def test_read_only_images_stay_as_they_are() -> None:
    content = bytes(30)
    with pytest.raises(AssertionError, match="raw memory"):
        edit_images([np.frombuffer(content, np.uint8).reshape(2, 5, 3)], make_operations(1, codes.INVERT))
    assert content == bytes(30)


IN_ANOTHER_PROCESS = """
import pickle, sys
import numpy as np
code = pickle.load(sys.stdin.buffer)
from shardio.images import define_operation, edit_images, make_operations
images = np.full((2, 3, 4, 3), 7, np.uint8)
edit_images(images, make_operations(2, code, [1, 2]))
print(images[:, 0, 0, 0])
"""


def test_a_pickled_code_defines_its_operation_in_another_process() -> None:
    code = define_operation("add", lambda image, numbers: image.point(lambda value: value + int(numbers[0])))
    program = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    done = subprocess.run(program, input=cloudpickle.dumps(code), capture_output=True, check=True)
    assert done.stdout == b"[8 9]\n"
    assert pickle.loads(cloudpickle.dumps(code)) == code, "the process that defined it can load it, too"
