"""RandomApply, RandomChoice and RandomOrder: chosen for each image, with the same pixels as the transforms alone."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from shardio import DataLoader, ShardDataset
from shardio.images import DecodeError
from shardio.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    GaussianBlur,
    MultiCrop,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomGrayscale,
    RandomInvert,
    RandomOrder,
    RandomResizedCrop,
    RandomSolarize,
    Resize,
    apply_transform,
    is_builtin,
    others_in,
)
from shardio.transforms.compose import keys_of_inner
from tests.transforms.inputs import make_noise, make_rng_keys

KEYS = make_rng_keys(12_000)
THREE: list[Any] = [RandomSolarize(128, 1), GaussianBlur(3, 1.0), RandomGrayscale(1)]


def shrink(image: Any) -> Any:
    return image[::2]


def fail_at_twelve_rows(image: Any) -> Any:
    if len(image) == 12:
        raise KeyError("twelve")
    return image


def test_transforms_are_applied_with_probability_p() -> None:
    for p in (0.0, 0.3, 1.0):
        numbers = RandomApply(THREE, p).choose(KEYS)
        assert set(map(tuple, numbers.tolist())) <= {(0, 1, 2), (-1, -1, -1)}
        assert (numbers[:, 0] == 0).mean() == pytest.approx(p, abs=0.02)


def test_each_transform_is_chosen_with_its_weight() -> None:
    assert Counter(RandomChoice(THREE).choose(KEYS)[:, 0].tolist()) == pytest.approx(
        dict.fromkeys(range(3), 4000), rel=0.05
    )
    weighted = Counter(RandomChoice(THREE, p=[3, 0, 1]).choose(KEYS)[:, 0].tolist())
    assert weighted == pytest.approx({0: 9000, 2: 3000}, rel=0.05)
    tenths = RandomChoice([RandomInvert()] * 11, p=[0.1] * 10 + [0.0])
    assert set(tenths.choose(KEYS)[:, 0].tolist()) == set(range(10))


def test_all_orders_are_equally_frequent() -> None:
    orders = Counter(map(tuple, RandomOrder(THREE).choose(KEYS).tolist()))
    assert orders == pytest.approx(dict.fromkeys(permutations(range(3)), 2000), rel=0.1)


def by_hand(choice: Any, images: list[Any], keys: Any) -> list[Any]:
    """Apply the chosen transforms to one image after another."""
    numbers, results = choice.choose(keys), []
    for row, image in enumerate(images):
        for number in numbers[row].tolist():
            if number >= 0:
                own_key = keys_of_inner(keys, number)[row : row + 1]
                (image,) = apply_transform(choice.transforms[number], [image], own_key)
        results.append(image)
    return results


OF_PIXELS: list[Any] = [
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    Compose([RandomGrayscale(0.5), GaussianBlur(5)]),
    RandomSolarize(128, 0.7),
]
OF_ANYTHING: list[Any] = [Compose([Resize(9), RandomCrop(7)]), shrink, ColorJitter(0.4), RandomResizedCrop(8)]


@pytest.mark.parametrize("inner", [OF_PIXELS, OF_ANYTHING], ids=["pixels", "anything"])
@pytest.mark.parametrize(
    "make", [RandomApply, RandomChoice, RandomOrder, lambda inner: RandomApply([RandomOrder(inner)])]
)
def test_images_are_those_of_the_chosen_transforms(make: Any, inner: list[Any]) -> None:
    choice, keys = make(inner), make_rng_keys(24, seed=3)
    images = [make_noise(20 + i, 30) for i in range(24)]
    found = apply_transform(choice, images, keys)
    for row, (one, other) in enumerate(zip(found, by_hand(choice, images, keys), strict=True)):
        np.testing.assert_array_equal(one, other, f"row {row}")
    (alone,) = apply_transform(choice, images[5:6], keys[5:6])
    np.testing.assert_array_equal(alone, found[5])


def test_what_is_in_a_choice_decides_who_runs_it() -> None:
    assert is_builtin(RandomApply([RandomOrder(OF_PIXELS)]))
    assert not is_builtin(RandomApply(OF_ANYTHING))
    assert not is_builtin(type("Several", (RandomApply,), {})(OF_PIXELS))
    assert others_in(Compose([RandomChoice([RandomApply(OF_ANYTHING), *THREE])])) == [shrink]


def test_an_error_of_an_inner_transform_names_its_row() -> None:
    images = [make_noise(30, 30), make_noise(12, 30), make_noise(30, 30)]
    with pytest.raises(DecodeError) as caught:
        apply_transform(RandomApply([RandomCrop(20)], p=1), images, make_rng_keys(3))
    assert caught.value.row == 1


def test_a_choice_is_a_transform_like_any_other(packed: Path) -> None:
    view = Compose(
        [
            RandomResizedCrop(24),
            RandomApply([ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            RandomChoice([*THREE, Compose([CenterCrop(24)])]),
            RandomApply([GaussianBlur(5)]),
        ]
    )
    assert repr(pickle.loads(pickle.dumps(view))) == repr(view)

    def load(num_workers: int) -> list[Any]:
        dataset = ShardDataset(packed, fields=("image",), transform=MultiCrop([view, view]), shuffle=True)
        loader = DataLoader(dataset, 4, num_workers=num_workers)
        assert not loader.calls_dataset, "shardio's own executors make the batches"
        return list(loader)

    for (ours,), (theirs,) in zip(load(0), load(2), strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert not torch.equal(ours[0], ours[1])


def test_an_error_of_a_users_function_names_its_sample(packed: Path) -> None:
    transform = Compose([RandomResizedCrop(24), RandomApply([CenterCrop(12), fail_at_twelve_rows], p=1)])
    dataset = ShardDataset(packed, fields=("image",), transform=transform)
    with pytest.raises(KeyError, match="twelve") as caught:
        next(iter(dataset))
    assert any("while transforming sample" in note for note in getattr(caught.value, "__notes__", [str(caught.value)]))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: RandomApply(cast(Any, GaussianBlur(3))),
            TypeError,
            r"RandomApply takes a list of transforms.*write RandomApply\(",
        ),
        (lambda: RandomChoice([]), ValueError, "RandomChoice needs at least one transform"),
        (lambda: RandomApply(THREE, 2), ValueError, "p must be a probability"),
        (lambda: RandomChoice(THREE, [1, 2]), ValueError, "p must have one number for each of 3 transforms"),
        (lambda: RandomChoice(THREE, [0, 0, 0]), ValueError, "one that is positive"),
        (lambda: RandomOrder([GaussianBlur]), TypeError, "GaussianBlur is a class, not a transform"),
        (lambda: RandomOrder([MultiCrop(THREE)]), TypeError, "a MultiCrop cannot be part of"),
    ],
)
def test_bad_settings_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
