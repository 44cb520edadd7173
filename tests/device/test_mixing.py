"""MixUp, CutMix and BatchRandomErasing: torchvision's results and distributions, and exact resumption."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shardio import DevicePrefetcher
from shardio.device import BatchRandomErasing, CutMix, MixUp, OneOf
from shardio.device.mixing import PixelBox
from shardio.libraries import import_library
from tests.transforms.inputs import ks_distance, ks_limit

import_library("torchvision")
v2: Any = importlib.import_module("torchvision.transforms.v2")

Batch = tuple[torch.Tensor, torch.Tensor]

NUM_DRAWS = 2000
THRESHOLD = ks_limit(NUM_DRAWS)
IMAGES, LABELS = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)

MIXING: dict[str, Callable[..., Any]] = {"MixUp": MixUp, "CutMix": CutMix}


def make_batch(size: int, *, dtype: torch.dtype = torch.float32, is_soft: bool = False, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 11, 8, generator=generator).to(dtype)
    labels = torch.randint(0, 5, (size,), generator=generator)
    return images, torch.rand(size, 5, generator=generator).softmax(1) if is_soft else labels


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_images(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, 24, 18, generator=seeded(0)).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_soft", [False, True])
def test_results_are_torchvisions(size: int, dtype: torch.dtype, is_soft: bool) -> None:
    images, labels = make_batch(size, dtype=dtype, is_soft=is_soft)
    for seed in range(20):
        share = MixUp(alpha=0.4).draw(random.Random(seed), 11, 8)
        given = {"lam": share, "labels": labels, "batch_size": size}
        expected = [v2.MixUp(num_classes=5).transform(tensor, given) for tensor in (images, labels)]
        mixed = MixUp(num_classes=5).apply((images, labels), share)
        assert all(map(torch.equal, mixed, expected))
        box = CutMix(alpha=0.4).draw(random.Random(seed), 11, 8)
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        own = float(1.0 - box.width * box.height / 88)
        given = {"box": corners, "lam_adjusted": own, "labels": labels, "batch_size": size}
        expected = [v2.CutMix(num_classes=5).transform(tensor, given) for tensor in (images, labels)]
        mixed = CutMix(num_classes=5).apply((images, labels), box)
        assert all(map(torch.equal, mixed, expected))


@pytest.mark.parametrize("alpha", [0.2, pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_parameters_have_torchvisions_distribution(alpha: float) -> None:
    torch.manual_seed(0)
    numbers, size = random.Random(0), [torch.empty(1, 3, 30, 20)]
    own = [MixUp(alpha=alpha).draw(numbers, 30, 20) for _ in range(NUM_DRAWS)]
    reference = v2.MixUp(alpha=alpha, num_classes=2)
    assert ks_distance(own, [reference.make_params(size)["lam"] for _ in range(NUM_DRAWS)]) < THRESHOLD
    boxes = [CutMix(alpha=alpha).draw(numbers, 30, 20) for _ in range(NUM_DRAWS)]
    reference = v2.CutMix(alpha=alpha, num_classes=2)
    corners = np.array([reference.make_params(size)["box"] for _ in range(NUM_DRAWS)])
    left, top, right, bottom = corners.T
    expected = np.stack([top, left, bottom - top, right - left, (bottom - top) * (right - left)], axis=1)
    drawn = np.array([[*box, box.height * box.width] for box in boxes])
    for figure, name in enumerate([*PixelBox._fields, "area"]):
        assert ks_distance(drawn[:, figure], expected[:, figure]) < THRESHOLD, name


@pytest.mark.parametrize("name", MIXING)
def test_the_given_batch_stays_and_its_structure_too(name: str) -> None:
    images, labels = make_batch(4)
    kept = images.clone(), labels.clone()
    transform, generator = MIXING[name](num_classes=5), seeded(3)
    mixed_images, mixed_labels = transform((images, labels), generator=generator)
    assert all(map(torch.equal, (images, labels), kept))
    assert not torch.equal(transform((images, labels), generator=generator)[0], mixed_images), "its state advances"
    keys = ["a", "b", "c", "d"]
    by_position = transform([images, labels, keys], generator=seeded(3))
    by_key = transform({"key": keys, "image": images, "Label": labels}, generator=seeded(3))
    in_target = transform((images, {"labels": labels, "label_id": 7}), generator=seeded(3))
    getting = MIXING[name](num_classes=5, labels_getter=lambda batch: batch["y"])
    by_getter = getting({"x": images, "y": labels}, generator=seeded(3))
    assert [type(batch) for batch in (by_position, by_key, in_target)] == [list, dict, tuple]
    assert by_position[2] == by_key["key"] == keys
    assert in_target[1]["label_id"] == 7
    for found in (
        *(by_position[:2], (by_key["image"], by_key["Label"])),
        *((in_target[0], in_target[1]["labels"]), (by_getter["x"], by_getter["y"])),
    ):
        assert all(map(torch.equal, found, (mixed_images, mixed_labels)))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("is_marked", [False, True])
def test_images_keep_their_memory_format(layout: torch.memory_format, is_marked: bool) -> None:
    images, labels = make_batch(4)
    batch = [images.contiguous(memory_format=layout), labels, *([torch.tensor([True] * 4)] if is_marked else [])]
    for transform in (MixUp(num_classes=5), CutMix(num_classes=5), BatchRandomErasing(1.0)):
        assert transform(batch, generator=seeded(0))[0].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("marks", ["11110", "10010", "01010", "01101", "00001", "11111", "00000"])
def test_valid_samples_are_mixed_as_if_others_were_missing(name: str, marks: str) -> None:
    images, labels = make_batch(5)
    valid = torch.tensor([mark == "1" for mark in marks])
    transform = MIXING[name](num_classes=5)
    marked = transform([images, labels, valid], generator=seeded(2))
    assert torch.equal(marked[2], valid)
    by_key = transform({"image": images, "labels": labels, "valid": valid}, generator=seeded(2))
    without = transform([images[valid], labels[valid]], generator=seeded(2))
    for found, expected in zip(marked[:2], without, strict=True):
        assert torch.equal(found[valid], expected)
    assert torch.equal(by_key["image"], marked[0])
    assert torch.equal(by_key["labels"], marked[1])


def test_one_of_several_is_chosen_with_equal_probability() -> None:
    numbers = [partial(torch.add, number) for number in range(3)]
    choose, generator = OneOf(numbers), seeded(0)
    chosen = [int(choose(torch.tensor(0), generator=generator)) for _ in range(1500)]
    chi_square = sum((count - 500) ** 2 / 500 for count in np.bincount(chosen))
    assert chi_square < 13.8, "with two degrees of freedom, one case in a thousand exceeds this"


def test_transforms_in_a_list_are_applied_in_turn_with_one_generator() -> None:
    batch, seen = make_batch(4), list[Any]()

    def look(found: Any, generator: torch.Generator) -> Any:
        seen.append((found, generator.initial_seed()))
        return found

    (result,) = DevicePrefetcher([batch], "cpu", transform=[look, MixUp(num_classes=5), look])
    (original, first_seed), (mixed, last_seed) = seen
    assert torch.equal(original[0], batch[0])
    assert mixed is result
    assert not torch.equal(mixed[0], batch[0])
    assert first_seed == last_seed


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MixUp(alpha=0), ValueError, "alpha must be positive and finite, got 0"),
        (lambda: CutMix(alpha=float("inf")), ValueError, "alpha must be positive and finite"),
        (lambda: MixUp(num_classes=0), ValueError, "num_classes must be at least 1"),
        (lambda: MixUp(labels_getter="second"), TypeError, "labels_getter must be 'default' or a function"),  # type: ignore[arg-type]  # what is tested
        (lambda: OneOf([]), ValueError, "at least one transform"),
        (lambda: BatchRandomErasing(1.5), ValueError, "p must be a probability from 0 to 1, got 1.5"),
        (lambda: BatchRandomErasing(scale=(0.5, 0.1)), ValueError, "scale must be"),
        (lambda: BatchRandomErasing(scale=(0.5, 1.1)), ValueError, "scale must be"),
        (lambda: BatchRandomErasing(ratio=(0, 1)), ValueError, "ratio must be"),
        (lambda: BatchRandomErasing(value="noise"), ValueError, "value must be a number, .* or 'random', got 'noise'"),  # type: ignore[arg-type]  # what is tested
        (lambda: BatchRandomErasing(value=()), ValueError, "value must be a number"),
        (
            lambda: BatchRandomErasing(value=(1, 2))(make_images(1), generator=seeded(0)),
            ValueError,
            r"value must be one number or 3, one per channel, got \(1.0, 2.0\)",
        ),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((IMAGES, LABELS.float()), ValueError, r"int64 \[N\], or soft labels .* got torch.float32 \[4\]"),
        ((IMAGES, LABELS.int()), ValueError, r"got torch.int32 \[4\]: convert them"),
        ((IMAGES, LABELS.reshape(4, 1, 1)), ValueError, r"got torch.int64 \[4, 1, 1\]"),
        ((IMAGES, torch.tensor(1)), ValueError, r"got torch.int64 \[\]"),
        ((IMAGES, torch.zeros(4, 6)), ValueError, "must have num_classes=5 columns, got 6"),
        ((IMAGES, LABELS[:3]), ValueError, "a label for each image, got 3 for 4 images"),
        ((IMAGES, [1, 2, 3, 4]), TypeError, "labels of a batch must be a tensor, got list: pass images and labels"),
        (IMAGES, TypeError, "got NoneType"),
        ({"image": IMAGES, "cls": LABELS}, TypeError, "a mapping with the key 'labels', or labels_getter"),
        ((IMAGES[0], LABELS), ValueError, r"exactly one tensor of images \[N, C, H, W\], got none"),
        ((IMAGES, LABELS, IMAGES), ValueError, r"got \[4, 3, 8, 8\], \[4, 3, 8, 8\]: for other batches, write"),
    ],
)
def test_bad_batches_are_refused(batch: Any, error: type[Exception], message: str) -> None:
    for kind in MIXING.values():
        with pytest.raises(error, match=message):
            kind(num_classes=5)(batch, generator=seeded(0))


def test_images_of_integers_and_unknown_classes_are_refused_where_they_do_not_suffice() -> None:
    batch = IMAGES.to(torch.uint8), LABELS
    assert CutMix(num_classes=5)(batch, generator=seeded(0))[0].dtype == torch.uint8
    with pytest.raises(TypeError, match=r"floating-point images, got torch.uint8: pass normalize or dtype"):
        MixUp(num_classes=5)(batch, generator=seeded(0))
    with pytest.raises(TypeError, match=r"value='random' needs floating-point images, got torch.uint8"):
        BatchRandomErasing(value="random")(batch, generator=seeded(0))
    with pytest.raises(ValueError, match="pass num_classes to CutMix"):
        CutMix()(batch, generator=seeded(0))


# Erasing.


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (117, torch.uint8),
        *itertools.product([0, 0.25, (0.1, -0.2, 3.7)], [torch.float32, torch.bfloat16, torch.float16]),
    ],
)
def test_erased_images_are_torchvisions(value: Any, dtype: torch.dtype) -> None:
    images, erasing, numbers = make_images(30, dtype), BatchRandomErasing(0.7, value=value), random.Random(0)
    boxes = [erasing.draw(numbers, 24, 18) for _ in images]
    assert {box is None for box in boxes} == {True, False}
    erased, labels = erasing.apply((images, "labels"), boxes, seeded(0))
    assert labels == "labels"
    fill = v2.RandomErasing(value=value).make_params([images[0]])["v"]
    for image, box, result in zip(images, boxes, erased, strict=True):
        expected = image if box is None else v2.functional.erase(image, *box, fill)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("scale", [(0.02, 0.33), pytest.param((0.5, 1.0), marks=pytest.mark.slow)])
def test_boxes_have_torchvisions_distribution(scale: tuple[float, float]) -> None:
    torch.manual_seed(0)
    numbers, erasing = random.Random(0), BatchRandomErasing(1.0, scale, (0.2, 4.0))
    reference, image = v2.RandomErasing(1.0, scale, (0.2, 4.0)), [torch.empty(3, 24, 18)]
    unchanged = PixelBox(-1, -1, 0, 0)  # If boxes are large, often no candidate box fits.
    drawn = np.array([erasing.draw(numbers, 24, 18) or unchanged for _ in range(NUM_DRAWS)])
    found = (reference.make_params(image) for _ in range(NUM_DRAWS))
    expected = np.array([unchanged if each["v"] is None else [each[key] for key in "ijhw"] for each in found])
    for figure, name in enumerate(PixelBox._fields):
        assert ks_distance(drawn[:, figure], expected[:, figure]) < THRESHOLD, name
    assert ks_distance(drawn[:, 2] * drawn[:, 3], expected[:, 2] * expected[:, 3]) < THRESHOLD, "the areas differ"


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_the_probability_is_kept_for_each_image(p: float) -> None:
    """The first images do not depend on the images that follow them."""
    images = torch.ones(2000, 1, 12, 12)
    erased = BatchRandomErasing(p)(images, generator=seeded(0))
    assert float((erased == 0).flatten(1).any(1).float().mean()) == pytest.approx(p, abs=0.035)
    assert bool((images == 1).all())
    assert torch.equal(erased[:5], BatchRandomErasing(p)(images[:5], generator=seeded(0)))


def test_noise_is_normal_and_stays_in_its_box() -> None:
    images = torch.full((40, 3, 40, 40), 100.0)
    erased = BatchRandomErasing(1.0, value="random")(images, generator=seeded(0))
    changed = erased != 100
    noise = np.sort(erased[changed].double().numpy())
    assert len(noise) > 10_000
    expected = torch.special.ndtr(torch.from_numpy(noise)).numpy()
    assert np.abs(expected - (np.arange(len(noise)) + 0.5) / len(noise)).max() < 1.95 / len(noise) ** 0.5
    for image in changed:
        rows, columns = image.any(2).any(0), image.any(1).any(0)
        assert torch.equal(image, (rows[:, None] & columns).expand(3, -1, -1)), "all channels of a box"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")
@pytest.mark.parametrize("is_marked", [False, True])
def test_on_cuda_nothing_waits_for_the_device(is_marked: bool) -> None:
    images, labels = make_batch(8)
    batch = [images.contiguous(memory_format=torch.channels_last), labels, *([labels >= 0] if is_marked else [])]
    on_device, generator = [tensor.cuda() for tensor in batch], torch.Generator("cuda").manual_seed(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [
            transform(on_device, generator=generator)
            for transform in (MixUp(num_classes=5), CutMix(num_classes=5), BatchRandomErasing(1.0, value="random"))
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result[0].is_contiguous(memory_format=torch.channels_last) for result in results)
    mixed = MixUp(num_classes=5).apply(on_device, 0.25)
    torch.testing.assert_close(mixed[0].cpu(), MixUp(num_classes=5).apply(batch, 0.25)[0])
