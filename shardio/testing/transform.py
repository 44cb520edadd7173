"""Conformance tests of a transform: its parameters, its pixels (alone and in plans), and its errors."""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from shardio.images import Pixels, open_image
from shardio.transforms import Compose, Geometry, PixelTransform, Transform, apply_transform, is_builtin, others_in


def make_rng_keys(num_keys: int, seed: int = 0) -> NDArray[np.uint64]:
    """Return random rng keys, uint64 [num_keys]."""
    return np.random.default_rng(seed).integers(0, 2**64, num_keys, dtype=np.uint64)


def apply_each(transform: Transform, images: Sequence[Pixels], keys: NDArray[np.uint64]) -> list[Any]:
    """Draw the parameters of images, and apply them to one image at a time."""
    parameters = transform.draw(np.array([image.shape[:2] for image in images]), keys)
    return [transform.apply(image, own) for image, own in zip(images, parameters, strict=True)]


class TransformTests:
    """The tests of one transform: a subclass of :class:`shardio.transforms.Transform`.

    Subclass it and override :meth:`transform`, and :meth:`is_random` if the transform is not random::

        class TestSolarize(TransformTests):
            @pytest.fixture
            def transform(self) -> Transform:
                return RandomSolarize(128)
    """

    @pytest.fixture
    def transform(self) -> Transform:
        """The transform, which must accept images of at least 8×8 pixels."""
        raise NotImplementedError

    @pytest.fixture
    def is_random(self) -> bool:
        """Return whether the parameters of images of one size differ."""
        return True

    @pytest.fixture
    def images(self) -> list[Pixels]:
        """Return images of different sizes, uint8 [height, width, 3] each."""
        random = np.random.default_rng(2)
        return [random.integers(40, 168, (20 + 3 * i, 30 + i, 3), np.uint8) for i in range(12)]

    def write(self, image: Pixels) -> bytes:
        """Return a PNG of an image."""
        file = io.BytesIO()
        PIL.Image.fromarray(image).save(file, "PNG")
        return file.getvalue()

    def test_an_images_parameters_depend_only_on_its_rng_key_and_size(
        self, transform: Transform, is_random: bool
    ) -> None:
        random, count = np.random.default_rng(1), 60
        sizes, rng_keys = random.integers(8, 60, (count, 2)), make_rng_keys(count)
        together = transform.draw(sizes, rng_keys)
        one_by_one = [transform.draw(sizes[i : i + 1], rng_keys[i : i + 1]) for i in range(count)]
        np.testing.assert_array_equal(together, np.concatenate(one_by_one))
        order = random.permutation(count)
        np.testing.assert_array_equal(transform.draw(sizes[order], rng_keys[order]), together[order])
        same_size = transform.draw(sizes[[0] * count], rng_keys)
        assert (len({row.tobytes() for row in same_size}) > 1) == is_random

    def test_a_call_draws_from_torchs_generator_and_leaves_the_image_as_it_is(
        self, transform: Any, is_random: bool, images: list[Pixels]
    ) -> None:
        import torch

        image, given = images[0], images[0].copy()
        torch.manual_seed(0)
        first, second = ([transform(image) for _ in range(20)] for _ in range(2))
        torch.manual_seed(0)
        again = [transform(image) for _ in range(20)]
        np.testing.assert_array_equal(image, given)
        assert all(map(np.array_equal, first, again))
        assert all(map(np.array_equal, first, second)) != is_random

    def test_rng_keys_leave_torchs_generator_as_it_is(self, transform: Transform, images: list[Pixels]) -> None:
        import torch

        keys, expected = make_rng_keys(len(images), 7), torch.rand(3, generator=torch.Generator().manual_seed(3))
        by_keys = apply_transform(transform, images, keys)
        torch.manual_seed(3)
        assert all(map(np.array_equal, apply_transform(transform, images, keys), by_keys))
        assert torch.equal(torch.rand(3), expected)

    def test_an_image_is_the_same_alone_and_in_a_plan_of_a_file(
        self, transform: Transform, images: list[Pixels]
    ) -> None:
        keys = make_rng_keys(len(images), 5)
        together = apply_transform(transform, images, keys)
        parameters = transform.draw(np.array([image.shape[:2] for image in images]), keys)
        pictures = [open_image(self.write(image)) for image in images]
        planned = apply_transform(Compose([transform]), pictures, keys)
        alone = [apply_transform(transform, [image], keys[i : i + 1])[0] for i, image in enumerate(images)]
        own_keys = apply_transform(Compose([transform]), images, keys)
        for i, image in enumerate(images):
            np.testing.assert_array_equal(transform.apply(image, parameters[i]), together[i])
            np.testing.assert_array_equal(alone[i], together[i])
            np.testing.assert_array_equal(planned[i], own_keys[i])

    def test_a_planned_transform_of_pixels_keeps_the_size(self, transform: Transform, images: list[Pixels]) -> None:
        results = apply_transform(transform, images, make_rng_keys(len(images)))
        assert all(isinstance(result, np.ndarray) for result in results)
        if isinstance(transform, PixelTransform) and transform.is_planned:
            assert [result.shape for result in results] == [image.shape for image in images]
        if isinstance(transform, Geometry) and transform.is_planned:
            assert {(result.dtype, *result.shape[2:]) for result in results} == {(np.dtype(np.uint8), 3)}

    def test_a_pickled_transform_is_the_same_and_shows_its_settings(
        self, transform: Transform, images: list[Pixels]
    ) -> None:
        copy = pickle.loads(pickle.dumps(transform))
        assert repr(copy) == repr(transform)
        assert repr(transform).startswith(f"{type(transform).__name__}(")
        for name, parameter in inspect.signature(type(transform)).parameters.items():
            is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            assert is_variable or hasattr(transform, name), f"the argument {name} is not an attribute"
        keys = make_rng_keys(len(images))
        sizes = np.array([image.shape[:2] for image in images])
        np.testing.assert_array_equal(copy.draw(sizes, keys), transform.draw(sizes, keys))
        assert all(map(np.array_equal, apply_each(copy, images, keys), apply_each(transform, images, keys)))

    def test_any_number_of_images_in_any_memory_layout_is_transformed(
        self, transform: Transform, images: list[Pixels]
    ) -> None:
        assert len(transform.draw(np.zeros((0, 2), np.int64), make_rng_keys(0))) == 0
        assert not list(apply_transform(transform, [], make_rng_keys(0)))
        keys, views = make_rng_keys(len(images)), [image[::-1, ::-1] for image in images]
        expected = apply_each(transform, [np.ascontiguousarray(view) for view in views], keys)
        assert all(map(np.array_equal, apply_each(transform, views, keys), expected))

    def test_only_shardios_transforms_are_builtin(self, transform: Transform) -> None:
        is_own = type(transform).__module__.startswith("shardio.")
        assert is_builtin(transform) == is_builtin(Compose([transform])) == is_own
        assert others_in(transform) == ([] if is_own else [transform])

    def test_the_error_for_another_input_names_the_transform(self, transform: Any) -> None:
        pixels = np.zeros((20, 30, 3), np.uint8)
        others: list[Any] = [pixels.astype(np.float64), pixels[..., 0], pixels.transpose(2, 0, 1), "an image"]
        for image in others:
            for call in (transform, Compose([transform]), Compose([Compose([transform])])):
                with pytest.raises(TypeError, match=f"{type(transform).__name__}.* takes uint8 "):
                    call(image)
