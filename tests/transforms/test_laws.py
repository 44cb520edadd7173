"""Laws of every transform: its arguments, errors and randomness, and the same images from all executors."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import shardio.transforms
from shardio import DataLoader, EpochSampler, ShardMapDataset, transforms as tr
from shardio.images import define_operation
from shardio.testing.samples import TransformTests
from shardio.transforms.recipes import RECIPES
from shardio.transforms.transform import RandomPixelTransform
from tests.raising import assert_raises
from tests.transforms.by_torchvision import v2
from tests.transforms.inputs import make_noise, make_rng_keys

NAMES = {**vars(shardio.transforms)}
EACH: list[Any] = eval(
    """[
        CenterCrop((9, 30)), CenterCrop(50), Resize(12), Resize((3, 4)), RandomResizedCrop(16), Pad(3),
        CornerCrop(5, "top left"), RandomCrop(8, 2), RandomCrop((40, 5), pad_if_needed=True),
        RandomHorizontalFlip(), RandomVerticalFlip(),
        ColorJitter(0.4, 0.4, 0.4, 0.1), RandomGrayscale(), RandomInvert(), RandomAutocontrast(), RandomEqualize(),
        RandomSolarize(130.5), RandomPosterize(3), RandomAdjustSharpness(1.5), GaussianBlur(5), RandomErasing(),
        RandomRotation(30), RandomRotation(30, expand=True), RandomAffine(30, (0.1, 0.1)), RandomPerspective(),
        TrivialAugmentWide(), RandAugment(3, 30), AutoAugment("svhn"), AugMix(),
        ToDtype("float32", scale=True), Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.2)),
    ]""",
    NAMES,
)
CERTAIN = (tr.CenterCrop, tr.CornerCrop, tr.Resize, tr.Pad, tr.ToDtype, tr.Normalize)
"""Transforms that are not random."""


class Reddened(RandomPixelTransform):
    """A user-defined transform with an operation that the kernel does not have."""

    code = define_operation("redden", lambda image, numbers: Image.merge("RGB", (image.split()[0],) * 3))


class Cropping(tr.CenterCrop):
    """A subclass may override anything."""


def test_every_transform_of_shardio_is_builtin_and_obeys_the_laws_here() -> None:
    public = {getattr(shardio.transforms, name) for name in shardio.transforms.__all__}
    bases = {tr.Transform, tr.Geometry, tr.PixelTransform}
    found = {each for each in public if isinstance(each, type) and issubclass(each, tr.Transform)} - bases
    assert found == set(map(type, EACH))
    assert all(map(tr.is_builtin, EACH))


BUILTIN: list[Any] = [
    None,
    tr.CenterCrop(8),
    tr.Compose([tr.Resize(9), tr.Compose([tr.RandomHorizontalFlip()])]),
    tr.RandomApply([tr.RandomOrder([tr.RandomInvert()])]),
    tr.MultiCrop([tr.CenterCrop(8)]),
]
OTHERS: list[Any] = [
    *(abs, Cropping(8), tr.Compose([tr.Resize(9), Cropping(8)]), tr.Compose([tr.Compose([abs])])),
    *(tr.RandomApply([abs]), tr.MultiCrop([tr.CenterCrop(8), abs])),
    type("Several", (tr.Compose,), {})([tr.CenterCrop(8)]),
    type("Several", (tr.RandomApply,), {})([tr.RandomInvert()]),
]


def test_a_combination_is_builtin_if_all_its_steps_are() -> None:
    assert list(map(tr.is_builtin, [*BUILTIN, *OTHERS])) == [True] * len(BUILTIN) + [False] * len(OTHERS)


class TestEach(TransformTests):
    @pytest.fixture(params=[*EACH, Reddened()], ids=repr)
    def transform(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.fixture
    def is_random(self, transform: tr.Transform) -> bool:
        return not isinstance(transform, CERTAIN)


# Arguments.

OTHER_DEFAULTS = {("RandomResizedCrop", "antialias"), ("Resize", "antialias"), ("ToDtype", "dtype")}
"""Defaults that differ from torchvision's (antialias: see docs/transforms.md). torchvision's ToDtype has no default."""


def parameters_of(transform: Any) -> dict[str, Any]:
    """Return the arguments that may be positional, with their defaults."""
    found = inspect.signature(transform).parameters.values()
    named = [each for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    return {each.name: getattr(each.default, "value", each.default) for each in named}


SHARED = [name for name in sorted({type(each).__name__ for each in EACH}) if hasattr(v2, name)]
SHARED += ["Compose", "FiveCrop", "RandomApply", "RandomChoice", "RandomOrder"]


@pytest.mark.parametrize("name", SHARED)
def test_arguments_have_torchvisions_names_order_and_defaults(name: str) -> None:
    ours, theirs = (parameters_of(getattr(module, name)) for module in (shardio.transforms, v2))
    assert list(ours)[: len(theirs)] == list(theirs)
    different = {(name, each) for each in theirs if ours[each] != theirs[each]}
    assert different <= OTHER_DEFAULTS


def test_constants_of_other_libraries_and_numpys_integers_are_accepted() -> None:
    for name in ("NEAREST", "BILINEAR", "BICUBIC"):
        for constant in (v2.InterpolationMode[name], Image.Resampling[name], int(Image.Resampling[name])):
            assert tr.RandomRotation(1, constant).interpolation == name.lower()
    assert tr.AutoAugment(v2.AutoAugmentPolicy.SVHN).policy == "svhn"
    eight: Any = np.int64(8)
    for kind, size in ((tr.Resize, 8), (tr.RandomResizedCrop, (8, 8))):
        assert (kind(eight).size, kind([eight, 9]).size) == (size, (8, 9))
        assert kind(8, interpolation=v2.InterpolationMode.BICUBIC, antialias=True).interpolation == "bicubic"


def test_a_repr_names_the_steps_and_their_settings() -> None:
    shown = repr(tr.Compose([tr.Resize(9), tr.CenterCrop((3, 4)), tr.RandomHorizontalFlip(0.25)]))
    assert shown == "Compose([Resize(size=9, antialias=False), CenterCrop(size=(3, 4)), RandomHorizontalFlip(p=0.25)])"
    assert repr(tr.MultiCrop([tr.CenterCrop(3)])) == "MultiCrop([CenterCrop(size=(3, 3))])"


THREE: list[Any] = [tr.RandomSolarize(128, 1), tr.GaussianBlur(3, 1.0), tr.RandomGrayscale(1)]
MEAN = (0.485, 0.456, 0.406)
REFUSED = r"""
    RandomResizedCrop(None) -> size must be a positive integer
    Resize(None) -> size=None requires max_size
    Resize((20, 30), "bilinear", 40) -> max_size applies only to a size of one number
    Resize(20, "bilinear", 20) -> max_size must be greater than size
    Pad((1, 2, 3)) -> padding must be one, two or four non-negative integers
    Pad(-1) -> padding must be one, two or four non-negative integers
    RandomCrop(8, padding_mode="wrap") -> padding_mode must be
    RandomCrop(8, fill=300) -> fill must be a number from 0 to 255
    RandomCrop((0, 4)) -> size must be a positive integer
    CornerCrop(3, "left") -> corner must be
    RandomRotation(-1) -> degrees must be a non-negative number, or 2 bounds
    RandomRotation((2, 1)) -> degrees must be a non-negative number, or 2 bounds
    RandomRotation(1, center=(1,)) -> center must be two numbers
    RandomRotation(1, "lanczos") -> interpolation must be 'nearest', 'bilinear' or 'bicubic'
    RandomAffine(1, translate=(0.5, 2)) -> translate must be two numbers from 0 to 1
    RandomAffine(1, scale=(0, 1)) -> scale must be
    RandomAffine(1, shear=(1, 2, 3)) -> shear must be a non-negative number, or 2 or 4 bounds
    RandomAffine(1, fill=300) -> fill must be a number from 0 to 255
    RandomPerspective(1.5) -> distortion_scale must be from 0 to 1
    RandomPerspective(p=2) -> p must be a probability
    ColorJitter(-1) -> brightness must be a non-negative number
    ColorJitter(hue=0.6) -> hue must be from -0.5 to 0.5
    ColorJitter(contrast=(2, 1)) -> contrast must be from 0.0 to inf, the lower bound first
    RandomGrayscale(1.5) -> p must be a probability
    RandomPosterize(9) -> bits must be from 0 to 8
    RandomAdjustSharpness(-1) -> sharpness_factor must not be negative
    GaussianBlur(4) -> kernel_size must be an odd number or two
    GaussianBlur((3, 5, 7)) -> kernel_size must be an odd number or two
    GaussianBlur(3, (2.0, 1.0)) -> sigma must be a positive number
    GaussianBlur(3, 0) -> sigma must be a positive number
    GaussianBlur(3, inf) -> sigma must be a positive number
    RandomErasing(2) -> p must be a probability
    RandomErasing(scale=(0.5, 1.5)) -> scale must be
    RandomErasing(ratio=(2, 1)) -> ratio must be
    RandomErasing(value="random") -> shardio.BatchRandomErasing supports random values
    RandomErasing(value=(1, 2)) -> value must be a number from 0 to 255
    TrivialAugmentWide(interpolation="box") -> interpolation must be 'nearest', 'bilinear' or 'bicubic'
    AutoAugment("mnist") -> policy must be one of 'imagenet', 'cifar10', 'svhn', got 'mnist'
    RandAugment(magnitude=31) -> magnitude must be below num_magnitude_bins=31
    RandAugment(fill=[1, 2]) -> fill must be a number from 0 to 255 or three
    TrivialAugmentWide(1) -> num_magnitude_bins
    AugMix(severity=11) -> severity
    AugMix(mixture_width=0) -> mixture_width
    AugMix(alpha=0) -> alpha must be positive
    ToDtype(torch.float32) -> write ToDtype\(torch.float32, scale=True\)
    ToDtype(torch.float16, scale=True) -> DevicePrefetcher\(dtype=...\)
    Normalize(MEAN, (1, 2)) -> must have three numbers
    Normalize(MEAN, (1, 0, 1)) -> std must be positive
    RandomChoice([]) -> RandomChoice needs at least one transform
    MultiCrop([]) -> at least one
    RandomApply(THREE, 2) -> p must be a probability
    RandomChoice(THREE, [1, 2]) -> p must have 3 numbers, one for each transform
    RandomChoice(THREE, [0, 0, 0]) -> at least one positive number
"""
BAD_SIZES = [0, -3, (0, 4), (4, -1), (0,), (4, 4, 4), (), "16", 1.5]
BAD_SCALES = [(0, 1), (-0.1, 1), (0.5, 0.4), (0.5, 1.1), (math.nan, 1), (0.08,), 0.5, "12"]
BAD_RATIOS = [(0, 1), (-1, 1), (2, 1), (math.nan, 1), (1, 2, 3), None]


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_bad_settings_are_refused(line: str) -> None:
    expression, _, message = line.strip().partition(" -> ")
    with pytest.raises(ValueError, match=message):
        eval(expression, {**NAMES, "MEAN": MEAN, "THREE": THREE, "torch": torch, "inf": math.inf})


def test_bad_probabilities_sizes_scales_and_ratios_are_refused() -> None:
    crop: Any = tr.RandomResizedCrop
    bad: list[tuple[Any, str, str, Any]] = [
        *((tr.RandomHorizontalFlip, "p", "probability", p) for p in (-0.01, 1.01, math.nan)),
        *((crop, "scale", "scale", scale) for scale in BAD_SCALES),
        *((crop, "ratio", "ratio", ratio) for ratio in BAD_RATIOS),
        *(
            (kind, "size", f"size must be a positive integer.*, got {re.escape(repr(size))}$", size)
            for kind, size in itertools.product((tr.CenterCrop, tr.Resize, crop), BAD_SIZES)
        ),
    ]
    for kind, name, message, value in bad:
        assert_raises(ValueError, message, kind, **{"size": 8, name: value} if kind is crop else {name: value})


def test_a_message_about_a_huge_argument_is_short() -> None:
    with pytest.raises(ValueError, match="size must be a positive integer") as caught:
        tr.RandomResizedCrop(np.zeros((40, 60, 3)))  # type: ignore[arg-type]  # an image
    assert len(str(caught.value)) < 140


VIEW = tr.MultiCrop([tr.RandomInvert()])
NO_PART = "cannot be part of a Compose or of another MultiCrop: pass it to"
WRONG_PARTS: list[tuple[Any, Any, str]] = [
    (tr.Compose, tr.RandomResizedCrop(16), r"takes a list of transforms, got RandomResizedCrop\(.*: write Compose\(\["),
    (tr.RandomApply, tr.GaussianBlur(3), r"RandomApply takes a list of transforms.*write RandomApply\("),
    (tr.MultiCrop, tr.CenterCrop(3), r"write MultiCrop\(\[\.\.\.\]\)"),
    (tr.Compose, [tr.CenterCrop(3), 16], "must be callable, got 16"),
    (tr.MultiCrop, [3], "callable"),
    (tr.Compose, [tr.Compose], r"^Compose is a class, not a transform: write Compose\(\.\.\.\)$"),
    (
        tr.Compose,
        [tr.RandomInvert(), tr.RandomResizedCrop],
        r"^RandomResizedCrop is a class, not a transform: write Random",
    ),
    (tr.RandomOrder, [tr.GaussianBlur], "GaussianBlur is a class, not a transform"),
    (tr.RandomOrder, [VIEW], "a MultiCrop cannot be part of"),
    (tr.Compose, [VIEW], NO_PART),
    (tr.MultiCrop, [VIEW], NO_PART),
    (
        lambda given: tr.apply_transform(given, [make_noise(40, 60)], make_rng_keys(1)),
        tr.Resize,
        "^Resize is a class, not a",
    ),
    (lambda given: ShardMapDataset("unused", decode="pil", transform=given), VIEW, "Pillow"),
]


@pytest.mark.parametrize(("kind", "given", "message"), WRONG_PARTS)
def test_the_parts_of_a_combination_are_checked(kind: Any, given: Any, message: str) -> None:
    assert_raises(TypeError, message, kind, given)


# Recipes, and every transform in a loader


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_gives_images_of_the_asked_size(name: str) -> None:
    transform = RECIPES[name](32)
    assert transform is not RECIPES[name](32)
    assert tr.is_builtin(transform)
    crops = transform(make_noise(40, 50))
    for crop in crops if isinstance(transform, tr.MultiCrop) else [crops]:
        assert crop.dtype == np.uint8
        assert crop.shape in ((32, 32, 3), (96, 96, 3))


def test_recipes_are_what_they_are_named_for() -> None:
    named = {name for name, value in vars(tr.recipes).items() if name.islower() and name[0] != "_" and callable(value)}
    assert set(RECIPES) == named
    assert [crop.shape[0] for crop in tr.recipes.dino()(make_noise(300, 200))] == [224] * 2 + [96] * 8
    for evaluation, resized in ((tr.recipes.imagenet_eval(224, resize=232), 232), (tr.recipes.imagenet_eval(), 256)):
        assert [getattr(step, "size", 0) for step in evaluation.transforms] == [resized, (224, 224)]
    image, keys = make_noise(60, 60), make_rng_keys(2)
    one, other = (tr.Compose([view]) for view in tr.recipes.simclr(32).transforms)
    first, (same, second) = tr.apply_transform(one, [image], keys[:1])[0], tr.apply_transform(other, [image] * 2, keys)
    assert (first != second).any()
    np.testing.assert_array_equal(first, same)


def unchanged(image: NDArray[Any]) -> NDArray[Any]:
    return image


ALL: list[Any] = eval(
    """[
        RandomResizedCrop(40), RandomHorizontalFlip(), RandomCrop(36, 4), Pad(2), RandomRotation(20, "bilinear"),
        RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1), GaussianBlur(5)], p=0.8), RandomPerspective(),
        RandomVerticalFlip(), RandomChoice([*THREE, Compose([CenterCrop(40)])]), RandomOrder(THREE), RandomAffine(9),
        RandomErasing(), TrivialAugmentWide(), RandAugment(), AutoAugment(), AugMix(), RandomEqualize(), Resize(32),
    ]""",
    {**NAMES, "THREE": THREE},
)
LOADED = tr.MultiCrop([tr.Compose(ALL), tr.Compose([*ALL[:3], tr.Normalize(MEAN, MEAN)]), tr.recipes.imagenet_eval(24)])


def test_every_executor_gives_the_same_images(packed: Path) -> None:
    """Compare images from this process, shardio's workers (which stop and resume), and torch's workers and loader."""

    def start(kind: Any, transform: Any, num_workers: int) -> Any:
        dataset = ShardMapDataset(packed, transform=transform, fields=("image", "key"))
        dataset.set_epoch(0)  # Torch's loader does not set the epoch.
        loader = kind(dataset, 4, sampler=EpochSampler(dataset), num_workers=num_workers)
        assert transform is not LOADED or not getattr(loader, "calls_dataset", False)
        return loader

    foreign = tr.MultiCrop([*LOADED.transforms[:2], tr.Compose([*tr.recipes.imagenet_eval(24).transforms, unchanged])])
    expected = list(start(DataLoader, LOADED, 0))
    others = {"torch's workers": list(start(DataLoader, foreign, 1))}
    others["torch's loader"] = list(start(torch.utils.data.DataLoader, LOADED, 0))
    stopped = start(DataLoader, LOADED, 2)
    first, resumed = next(iter(stopped)), start(DataLoader, LOADED, 1)
    resumed.load_state_dict(stopped.state_dict())
    others["processes"] = [first, *resumed]
    for name, batches in others.items():
        for (crops, keys), (other_crops, other_keys) in zip(expected, batches, strict=True):
            assert list(keys) == list(other_keys)
            torch.testing.assert_close(list(crops), list(other_crops), rtol=0, atol=0, msg=name)
    for batch, keys in expected:
        assert [(crop.dtype, *crop.shape[:2]) for crop in batch] == [
            (dtype, len(keys), 3) for dtype in (torch.uint8, torch.float32, torch.uint8)
        ]
        assert all(crop.is_contiguous(memory_format=torch.channels_last) for crop in batch[::2])
