"""The recipes: they run on shardio's own executors, give images of the asked sizes, and are what papers describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import DataLoader, ShardDataset
from shardio.transforms import Compose, MultiCrop, apply_transform, is_builtin, recipes
from shardio.transforms.recipes import RECIPES
from tests.transforms.inputs import make_noise, make_rng_keys


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_gives_images_of_the_asked_size(name: str) -> None:
    transform = RECIPES[name](32)
    assert transform is not RECIPES[name](32)
    assert is_builtin(transform)
    crops = transform(make_noise(40, 50))
    for crop in crops if isinstance(transform, MultiCrop) else [crops]:
        assert crop.dtype == np.uint8
        assert crop.shape in ((32, 32, 3), (96, 96, 3))


def test_every_recipe_has_its_name_in_the_table() -> None:
    functions = {name for name, value in vars(recipes).items() if callable(value) and name.islower() and name[0] != "_"}
    assert set(RECIPES) == functions


def test_dino_has_two_large_crops_and_eight_small_ones() -> None:
    sizes = [crop.shape[:2] for crop in recipes.dino()(make_noise(300, 200))]
    assert sizes == [(224, 224)] * 2 + [(96, 96)] * 8


def test_the_central_crop_is_that_of_torchvisions_evaluation() -> None:
    resize, crop = recipes.imagenet_eval(224, resize=232).transforms
    assert (getattr(resize, "size", 0), getattr(crop, "size", 0)) == (232, (224, 224))
    assert getattr(recipes.imagenet_eval().transforms[0], "size", 0) == 256


def test_the_two_views_of_an_image_differ_and_are_functions_of_its_key() -> None:
    image, keys = make_noise(60, 60), make_rng_keys(2)
    one, other = (Compose([view]) for view in recipes.simclr(32).transforms)
    assert (apply_transform(one, [image], keys[:1])[0] != apply_transform(other, [image], keys[1:])[0]).any()
    np.testing.assert_array_equal(*(apply_transform(view, [image], keys[:1])[0] for view in (one, other)))


@pytest.mark.parametrize("name", ["trivial_augment", "dino"])
def test_shardios_executors_run_recipes(packed: Path, name: str) -> None:
    dataset = ShardDataset(packed, fields=("image",), transform=RECIPES[name](32), shuffle=True)
    loaders = [DataLoader(dataset, 4, num_workers=num_workers) for num_workers in (0, 2)]
    for ours, theirs in zip(*loaders, strict=True):
        pairs: list[tuple[Any, Any]] = list(zip(ours[0], theirs[0], strict=True))
        assert all((one == other).all() for one, other in pairs)
    assert not any(loader.calls_dataset for loader in loaders)
