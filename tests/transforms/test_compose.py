from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from shardio.images import CropPlan, RenderedImages, render_chunk
from shardio.transforms import (
    CenterCrop,
    Compose,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    Transform,
    apply_transform,
)
from tests.transforms.inputs import make_noise, make_rng_keys

RANDOM = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])


def _apply(transform: Callable[[Any], Any], images: list[Any], seed: int = 0) -> list[Any]:
    return apply_transform(transform, images, make_rng_keys(len(images), seed))


def _are_equal(a: list[Any], b: list[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def test_transforms_run_in_their_order() -> None:
    image = make_noise(40, 60)
    cropped_first = Compose([CenterCrop(20), Resize(30)])(image)
    resized_first = Compose([Resize(30), CenterCrop(20)])(image)
    np.testing.assert_array_equal(cropped_first, Resize(30)(CenterCrop(20)(image)))
    np.testing.assert_array_equal(resized_first, CenterCrop(20)(Resize(30)(image)))
    assert cropped_first.shape == (30, 30, 3)
    assert resized_first.shape == (20, 20, 3)


def test_a_foreign_callable_gets_the_array_and_the_next_transform_its_result() -> None:
    received: list[NDArray[np.uint8]] = []

    def invert(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        received.append(image)
        return 255 - image

    images = [make_noise(20, 30, seed) for seed in range(3)]
    results = _apply(Compose([CenterCrop(10), invert, Resize(10)]), images)
    assert _are_equal(received, [CenterCrop(10)(image) for image in images])
    assert _are_equal(results, [255 - CenterCrop(10)(image) for image in images])


def test_a_single_foreign_callable_is_called_for_each_image() -> None:
    images = [make_noise(20, 30, seed) for seed in range(3)]
    assert _apply(lambda image: image.shape[1], images) == [30, 30, 30]


def test_an_empty_compose_changes_nothing() -> None:
    images = [make_noise(20, 30)]
    assert _are_equal(_apply(Compose([]), images), images)


def test_two_equal_transforms_draw_independently() -> None:
    """If both flips drew the same, they would always undo each other."""
    images = [make_noise(4, 6, seed) for seed in range(2000)]
    flip = RandomHorizontalFlip()
    results = _apply(Compose([flip, flip]), images)
    share = np.mean([np.array_equal(result, image) for result, image in zip(results, images, strict=True)])
    assert 0.45 < share < 0.55


def test_a_crop_and_the_flip_after_it_are_independent() -> None:
    """The columns increase, so in a mirrored crop they decrease."""
    image = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (200, 200, 3)).copy()
    results = _apply(Compose([RandomResizedCrop(200, scale=(0.3, 0.5)), RandomHorizontalFlip()]), [image] * 4000)
    mirrored = np.array([result[0, 0, 0] > result[0, -1, 0] for result in results])
    centre = np.array([result[0, [0, -1], 0].astype(float).mean() for result in results])
    assert 0.46 < mirrored.mean() < 0.54
    assert abs(np.corrcoef(mirrored, centre)[0, 1]) < 0.06


def test_a_nested_compose_runs_its_steps_in_place() -> None:
    image = make_noise(40, 60)
    steps: list[Transform] = [Resize(30), CenterCrop((20, 26)), RandomHorizontalFlip(1.0), Resize((9, 8))]
    flat = Compose(steps)(image)
    np.testing.assert_array_equal(Compose([steps[0], Compose(steps[1:3]), steps[3]])(image), flat)
    np.testing.assert_array_equal(Compose([Compose([Compose(steps)])])(image), flat)


def test_nested_random_transforms_draw_independently_too() -> None:
    images = [make_noise(4, 6, seed) for seed in range(2000)]
    flip = RandomHorizontalFlip()
    results = _apply(Compose([Compose([flip]), Compose([flip])]), images)
    share = np.mean([np.array_equal(result, image) for result, image in zip(results, images, strict=True)])
    assert 0.45 < share < 0.55


@pytest.mark.parametrize("transform", [RANDOM, RandomResizedCrop(16), RandomHorizontalFlip()])
def test_the_same_rng_keys_give_the_same_pixels_for_any_torch_seed(
    transform: Callable[[Any], Any],
) -> None:
    images = [make_noise(30, 50, seed) for seed in range(40)]
    first = _apply(transform, images)
    torch.manual_seed(7)
    assert _are_equal(_apply(transform, images), first)
    assert not _are_equal(_apply(transform, images, seed=1), first)


@pytest.mark.parametrize("max_bytes", [1, 4 * 3 * 16 * 16, 2**25])
def test_few_images_are_in_memory_before_a_callable_gets_them(max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number never changes the images."""
    images = [make_noise(40, 30, seed) for seed in range(10)]
    transform = Compose([RandomResizedCrop(16), np.copy])
    expected = _apply(transform, images)
    sizes = list[int]()

    def render(pictures: list[Any], plan: CropPlan) -> RenderedImages:
        sizes.append(len(pictures))
        return render_chunk(pictures, plan)

    monkeypatch.setattr("shardio.transforms.compose.MAX_RENDERED_BYTES", max_bytes)
    monkeypatch.setattr("shardio.transforms.compose.render_chunk", render)
    assert _are_equal(_apply(transform, images), expected)
    assert sizes == {1: [3, 3, 3, 1], 4 * 3 * 16 * 16: [4, 4, 2], 2**25: [10]}[max_bytes]


def test_rng_keys_leave_torchs_generator_unchanged() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    _apply(RANDOM, [make_noise(30, 50)])
    assert torch.equal(torch.rand(3), expected)


def test_an_image_does_not_depend_on_the_others_in_its_chunk() -> None:
    images, rng_keys = [make_noise(30 + seed, 50, seed) for seed in range(40)], make_rng_keys(40)
    together = apply_transform(RANDOM, images, rng_keys)
    one_by_one = [apply_transform(RANDOM, images[i : i + 1], rng_keys[i : i + 1])[0] for i in range(40)]
    assert _are_equal(together, one_by_one)


@pytest.mark.parametrize("transform", [RANDOM, RandomResizedCrop(16), RandomHorizontalFlip()])
def test_a_direct_call_draws_from_torchs_generator(transform: Callable[[Any], Any]) -> None:
    image = make_noise(30, 50)
    torch.manual_seed(0)
    first = [transform(image) for _ in range(20)]
    second = [transform(image) for _ in range(20)]
    torch.manual_seed(0)
    again = [transform(image) for _ in range(20)]
    assert _are_equal(again, first)
    assert not _are_equal(first, second)
    assert not _are_equal(first, [first[0]] * 20)


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(make_noise(20, 30)),
        make_noise(20, 30).astype(np.float32),
        make_noise(20, 30)[..., 0],
        make_noise(20, 30).transpose(2, 0, 1),
        torch.zeros(20, 30, 3, dtype=torch.uint8),
        "an image",
    ],
    ids=["Pillow image", "floats", "no channels", "channels first", "tensor", "text"],
)
@pytest.mark.parametrize("transform", [RandomResizedCrop(16), Resize(9), CenterCrop(9), RandomHorizontalFlip()])
def test_the_error_for_a_wrong_input_names_the_transform(transform: Transform, image: Any) -> None:
    for call in (transform, Compose([transform]), Compose([Compose([transform])])):
        with pytest.raises(TypeError, match=type(transform).__name__):
            call(image)


def test_a_repr_names_the_steps_and_their_settings() -> None:
    shown = repr(Compose([Resize(9), CenterCrop((3, 4)), RandomHorizontalFlip(0.25)]))
    assert shown == "Compose([Resize(size=9, antialias=False), CenterCrop(size=(3, 4)), RandomHorizontalFlip(p=0.25)])"


class Inverted(CenterCrop):
    """A crop that also inverts the pixels."""

    def apply(self, image: NDArray[np.uint8], parameters: Any) -> NDArray[np.uint8]:
        return 255 - super().apply(image, parameters)


def test_a_subclass_may_override_apply() -> None:
    image = make_noise(20, 30)
    expected = 255 - CenterCrop(8)(image)
    np.testing.assert_array_equal(Inverted(8)(image), expected)
    np.testing.assert_array_equal(Compose([Inverted(8), RandomHorizontalFlip(0)])(image), expected)


def test_a_subclass_that_overrides_apply_gets_an_array_after_a_tensor() -> None:
    image = make_noise(20, 30)
    result = Compose([lambda array: torch.from_numpy(array).permute(2, 0, 1), Inverted(8)])(image)
    np.testing.assert_array_equal(result, Inverted(8)(image))


def test_an_image_that_an_earlier_transform_made_unusable_is_named_with_a_remedy() -> None:
    scaled = Compose([lambda image: np.float32(image), CenterCrop(8)])
    with pytest.raises(TypeError, match=r"got float32 \[20, 30, 3\]: convert the image first"):
        scaled(make_noise(20, 30))
    with pytest.raises(TypeError, match=r"got Image: convert the image first, .* decode='array'"):
        CenterCrop(8)(Image.fromarray(make_noise(20, 30)))


@pytest.mark.parametrize("given", [RandomResizedCrop, Compose])
def test_a_class_instead_of_a_transform_is_named(given: Any) -> None:
    message = rf"^{given.__name__} is a class, not a transform: write {given.__name__}\(\.\.\.\)$"
    with pytest.raises(TypeError, match=message):
        Compose([RandomHorizontalFlip(), given])
    with pytest.raises(TypeError, match=message):
        _apply(given, [make_noise(40, 60)])


def test_compose_takes_a_list_of_callables() -> None:
    single: Any = RandomResizedCrop(16)
    with pytest.raises(TypeError, match=r"takes a list of transforms, got RandomResizedCrop\(.*: write Compose\(\["):
        Compose(single)
    number: Any = 16
    with pytest.raises(TypeError, match="must be callable, got 16"):
        Compose([single, number])
