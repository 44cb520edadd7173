"""AugMix: torchvision's mixture of chains of operations on Pillow images, and its distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardio.images.editing_by_pillow import edit_by_pillow
from shardio.images.kernel.compiled import operation_records as codes
from shardio.libraries import import_library
from shardio.transforms import AugMix
from shardio.transforms.transform import draw_gammas
from tests.transforms.inputs import make_noise, make_rng_keys, repeat_size
from tests.transforms.test_distribution import ks_distance

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

COUNT = 6000
KEYS = make_rng_keys(COUNT)
LIMIT = 1.95 * (2 / COUNT) ** 0.5
"""Two samples of one distribution exceed it once in a thousand cases (Kolmogorov-Smirnov). Seeds are fixed."""


SETTINGS: list[dict[str, Any]] = [{}, {"mixture_width": 1}, {"chain_depth": 5, "all_ops": False, "severity": 10}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_mixture_is_torchvisions_of_the_same_chains(settings: dict[str, Any]) -> None:
    """The operations are applied to Pillow images, and mixed as torchvision mixes tensors."""
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
                augmented = image
                if chain:
                    augmented = edit_by_pillow(image, np.array(chain))
                mix.add_(torch.tensor(operation["numbers"][0], dtype=torch.float32) * torch.from_numpy(augmented))
                chain = []
            assert operations["code"][-1] == codes.END_MIXTURE
            np.testing.assert_array_equal(transform.apply(image, operations), mix.to(torch.uint8).numpy())
            np.testing.assert_array_equal(edit_by_pillow(image, operations), mix.to(torch.uint8).numpy())


def test_the_space_and_its_strengths_are_torchvisions() -> None:
    for all_ops in (True, False):
        ours, theirs = AugMix(all_ops=all_ops), v2.AugMix(all_ops=all_ops)
        space = theirs._AUGMENTATION_SPACE if all_ops else theirs._PARTIAL_AUGMENTATION_SPACE
        assert list(ours._space) == list(space)
        for number, (name, (find_magnitudes, is_signed)) in enumerate(space.items()):
            for height, width in ((224, 224), (31, 97), (500, 375)):
                magnitudes = find_magnitudes(10, height, width)
                image = make_noise(height, width)
                for index in (0, 1, 2, 9):
                    magnitude = 0.0 if magnitudes is None else float(magnitudes[index])
                    sign = -1.0 if is_signed else 1.0
                    (operation,) = ours._make(
                        np.array([[number]]), np.array([[index]]), np.array([[sign]]), repeat_size(height, width, 1)
                    )
                    if (height, width) != (31, 97):
                        continue  # The pixels of large images would take long; that they can be made is enough.
                    if name == "Posterize" and magnitude == 0:  # Pillow refuses it; torchvision's tensors become black.
                        assert not edit_by_pillow(image, operation).any()
                        continue
                    expected = theirs._apply_image_or_video_transform(
                        Image.fromarray(image), name, sign * magnitude, theirs.interpolation, theirs._fill
                    )
                    np.testing.assert_array_equal(edit_by_pillow(image, operation), np.array(expected), name)


def test_weights_are_dirichlet_variates() -> None:
    torch.manual_seed(0)
    for alpha in (0.4, 1.0, 3.0):
        weights = AugMix(alpha=alpha)._draw_weights(KEYS)
        own = torch._sample_dirichlet(torch.tensor([alpha, alpha]).expand(COUNT, -1)).numpy()
        chains = torch._sample_dirichlet(torch.tensor([alpha] * 3).expand(COUNT, -1)).numpy() * own[:, 1:]
        assert ks_distance(weights[:, 0], own[:, 0]) < LIMIT
        for chain in range(3):
            assert ks_distance(weights[:, 1 + chain], chains[:, chain]) < LIMIT
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)


def test_gamma_variates_have_numpys_distribution_and_depend_only_on_the_key() -> None:
    random = np.random.default_rng(0)
    for shape in (0.2, 1.0, 7.5):
        drawn = draw_gammas(KEYS, shape, 2)
        for column in drawn.T:
            assert ks_distance(column, random.gamma(shape, size=COUNT)) < LIMIT
        assert abs(np.corrcoef(*drawn.T).min()) < 0.05
        np.testing.assert_array_equal(draw_gammas(KEYS[7:9], shape, 2), drawn[7:9])


def test_depths_operations_and_strengths_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    transform, made = AugMix(severity=4), list[Any]()
    original = transform._make

    def record(*given: Any) -> Any:
        made.append(given)
        return original(*given)

    monkeypatch.setattr(transform, "_make", record)
    operations = transform.draw(repeat_size(8, 8, COUNT), KEYS)
    chosen, strengths, signs, _ = made[0]
    assert np.bincount(chosen.ravel(), minlength=13) == pytest.approx(chosen.size / 13, rel=0.1)
    assert np.bincount(strengths.ravel(), minlength=4) == pytest.approx(chosen.size / 4, rel=0.1)
    assert (signs > 0).mean() == pytest.approx(0.5, abs=0.02)
    depths = (operations["code"][:, 1:4] != codes.NONE).sum(axis=1)
    assert np.bincount(depths, minlength=4)[1:] == pytest.approx(COUNT / 3, rel=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AugMix(severity=11), "severity"),
        (lambda: AugMix(mixture_width=0), "mixture_width"),
        (lambda: AugMix(alpha=0), "alpha must be positive"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
