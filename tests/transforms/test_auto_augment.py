"""Automatic augmentation matches torchvision's in its operations, magnitudes, mixtures, frequencies and pixels."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from shardio import transforms
from shardio.images import edit_images
from shardio.images.rendering import edit_by_pillow
from shardio.kernel import operations as codes
from shardio.transforms import AugMix, AutoAugment, RandAugment, TrivialAugmentWide
from shardio.transforms.automatic import read_policy, space_evenly
from tests.transforms.by_torchvision import v2
from tests.transforms.inputs import chi_square, ks_distance, ks_limit, make_noise, make_rng_keys, repeat_size

KEYS = make_rng_keys(14_000)


def make_image(random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    height, width = random.integers(1, 60, 2).tolist()
    is_square = random.random() < 0.3  # Pillow rotates squares by 90 degrees with different code.
    return random.integers(0, 256, (height, height if is_square else width, 3), np.uint8)


@pytest.mark.parametrize(
    ("kind", "options", "interpolation"),
    [
        ("RandAugment", {"magnitude": 0, "num_magnitude_bins": 31}, "nearest"),
        ("RandAugment", {"magnitude": 0, "num_magnitude_bins": 5}, "bicubic"),
        ("TrivialAugmentWide", {"num_magnitude_bins": 31}, "bilinear"),
        ("TrivialAugmentWide", {"num_magnitude_bins": 2}, "nearest"),
        ("AutoAugment", {}, "nearest"),
        ("AutoAugment", {}, "bicubic"),
        ("AugMix", {"all_ops": True}, "bilinear"),
        ("AugMix", {"all_ops": False}, "nearest"),
    ],
)
def test_every_operation_and_strength_is_torchvisions(kind: str, options: dict[str, Any], interpolation: str) -> None:
    num_bins = options.get("num_magnitude_bins", 10)
    random, settings = np.random.default_rng(num_bins), {"fill": [7, 250, 130], "interpolation": interpolation}
    ours, theirs = (getattr(library, kind)(**options, **settings) for library in (transforms, v2))
    space = theirs._AUGMENTATION_SPACE if options.get("all_ops", True) else theirs._PARTIAL_AUGMENTATION_SPACE
    assert list(ours._space) == list(space)
    for number, (name, (find_magnitudes, is_signed)) in enumerate(space.items()):
        for index in range(num_bins):
            for sign in (1.0, -1.0) if is_signed else (1.0,):
                pixels = make_image(random)
                original, sizes = Image.fromarray(pixels.copy()), np.array([pixels.shape[:2]])
                magnitudes = find_magnitudes(num_bins, *pixels.shape[:2])
                magnitude = 0.0 if magnitudes is None else sign * float(magnitudes[index])
                operations = ours._make(np.array([[number]]), np.array([[index]]), np.array([[sign]]), sizes)
                edit_images([pixels], operations)
                expected: Any = np.zeros_like(pixels)  # torchvision's result for tensors. Pillow rejects 0 bits.
                if (name, magnitude) != ("Posterize", 0):
                    how = (theirs.interpolation, theirs._fill)
                    expected = theirs._apply_image_or_video_transform(original, name, magnitude, *how)
                np.testing.assert_array_equal(pixels, np.array(expected), f"{name} {magnitude} {pixels.shape}")


@pytest.mark.parametrize("ends", [(0.0, 0.3), (1.0, 0.0), (0.0, 135.0), (0.0, 150 / 331 * 224), (0.0, 150 / 331 * 31)])
def test_numbers_are_those_of_torchs_linspace(ends: tuple[float, float]) -> None:
    for count in (2, 3, 10, 11, 31, 64):
        found = space_evenly(ends[0], np.full(count, ends[1]), count, np.arange(count))
        assert found.tolist() == torch.linspace(*ends, count).tolist()


def record(transform: Any) -> tuple[Any, Any, Any]:
    """Draw parameters for 14,000 images. Return the drawn operations, magnitudes and signs, each [n, k]."""
    with mock.patch.object(transform, "_make", wraps=transform._make) as make:
        transform.draw(repeat_size(8, 8, len(KEYS)), KEYS)
    chosen, bins, signs, *_ = make.call_args.args
    return chosen, bins, signs


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_policies_are_torchvisions_and_pairs_are_drawn_with_their_probabilities(policy: str) -> None:
    transform, pairs = AutoAugment(policy), read_policy(policy)
    assert list(map(tuple, pairs)) == v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    expected: dict[Any, float] = defaultdict(float)
    for pair in pairs:
        for is_applied in np.ndindex(2, 2):
            weight, what = len(KEYS) / len(pairs), []
            for (name, chance, strength), applied in zip(pair, is_applied, strict=True):
                weight *= chance if applied else 1 - chance
                what.append((name, strength or 0) if applied else None)
            expected[tuple(what)] += weight
    names = list(transform._space)
    chosen, bins, signs = record(transform)
    assert abs(signs.mean()) < 0.03
    applied = AutoAugment(policy).draw(repeat_size(60, 60, len(KEYS)), KEYS)["code"] != 0
    drawn = Counter[Any](
        tuple((names[name], strength) if was else None for name, strength, was in zip(*row, strict=True))
        for row in zip(chosen.tolist(), bins.tolist(), applied.tolist(), strict=True)
    )
    assert sum((drawn[what] - count) ** 2 / count for what, count in expected.items() if count > 9) < 150


def test_choices_are_uniform_and_independent() -> None:
    chosen, bins, signs = record(TrivialAugmentWide())
    assert chosen.shape == (len(KEYS), 1)
    assert chi_square(bins, 31) < 65, "30 degrees of freedom"
    assert chi_square(chosen * 2 + (signs > 0), 28) < 62, "27 degrees of freedom"
    chosen, bins, signs = record(RandAugment(2, 9))
    assert (chosen.shape, set(bins.reshape(-1))) == ((len(KEYS), 2), {9})
    assert chi_square(chosen[:, 0] * 14 + chosen[:, 1], 196) < 265, "195 degrees of freedom"
    assert Counter((signs > 0).sum(axis=1).tolist())[1] == pytest.approx(len(KEYS) / 2, rel=0.05)


# AugMix.

COUNT = 6000
LIMIT = ks_limit(COUNT)


@pytest.mark.parametrize(
    "settings", [{}, {"mixture_width": 1}, {"chain_depth": 5, "all_ops": False, "severity": 10}], ids=str
)
def test_a_mixture_is_torchvisions_of_the_same_chains(settings: dict[str, Any]) -> None:
    transform = AugMix(fill=30, **settings)
    for size in ((40, 57), (1, 9), (33, 33)):
        image = make_noise(*size)
        for operations in transform.draw(repeat_size(*size, 12), KEYS[:12]):
            batch, chain = torch.from_numpy(image), list[Any]()
            assert operations["code"][0] == codes.BEGIN_MIXTURE
            mix = torch.tensor(operations["numbers"][0, 0], dtype=torch.float32) * batch
            for operation in operations[1:-1]:
                if operation["code"] != codes.ADD_TO_MIXTURE:
                    chain.append(operation)
                    continue
                augmented = edit_by_pillow(image, np.array(chain)) if chain else image
                mix.add_(torch.tensor(operation["numbers"][0], dtype=torch.float32) * torch.from_numpy(augmented))
                chain = []
            assert operations["code"][-1] == codes.END_MIXTURE
            np.testing.assert_array_equal(transform.apply(image, operations), mix.to(torch.uint8).numpy())
            np.testing.assert_array_equal(edit_by_pillow(image, operations), mix.to(torch.uint8).numpy())


def test_weights_are_dirichlet_variates() -> None:
    torch.manual_seed(0)
    for alpha in (0.4, 1.0, 3.0):
        weights = AugMix(alpha=alpha)._draw_weights(KEYS[:COUNT])
        own = torch._sample_dirichlet(torch.tensor([alpha, alpha]).expand(COUNT, -1)).numpy()
        chains = torch._sample_dirichlet(torch.tensor([alpha] * 3).expand(COUNT, -1)).numpy() * own[:, 1:]
        for column, expected in zip(weights.T, [own[:, 0], *chains.T], strict=True):
            assert ks_distance(column, expected) < LIMIT
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)


def test_depths_operations_and_strengths_are_uniform() -> None:
    transform = AugMix(severity=4)
    operations = transform.draw(repeat_size(8, 8, COUNT), KEYS[:COUNT])
    depths = (operations["code"][:, 1:4] != codes.NONE).sum(axis=1)
    assert np.bincount(depths, minlength=4)[1:] == pytest.approx(COUNT / 3, rel=0.1)
    chosen, strengths, signs = record(transform)
    assert np.bincount(chosen.ravel(), minlength=13) == pytest.approx(chosen.size / 13, rel=0.1)
    assert np.bincount(strengths.ravel(), minlength=4) == pytest.approx(chosen.size / 4, rel=0.1)
    assert (signs > 0).mean() == pytest.approx(0.5, abs=0.02)
