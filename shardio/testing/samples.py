"""Conformance tests of field codecs, transforms and remainder policies."""

from __future__ import annotations

import inspect
import io
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain, combinations, product, starmap
from typing import Any

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from shardio.decoding import FieldDecoder, find_wide
from shardio.decoding.codecs import UNBOUNDED, extension_of
from shardio.errors import SampleError
from shardio.images import Pixels, open_image
from shardio.order import Remainder, Split
from shardio.reading import StoredSamples
from shardio.transforms import Compose, Geometry, PixelTransform, Transform, apply_transform, is_builtin, others_in

MAX_WASTED_BYTES = 10 * 2**20
"""The maximum memory that decoding a damaged field may use in addition to ten times the size of the field."""


def check_types(found: Any, value: Any) -> None:
    """Raise AssertionError if two equal values, or equal parts of them, have different types."""
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype.newbyteorder("="), "torch accepts no other byte order"
        if value.dtype == object:
            check_types(found.tolist(), value.tolist())
    elif isinstance(value, Mapping):
        check_types(set(found), set(value))
        for key in value:
            check_types(found[key], value[key])
    elif isinstance(value, Set):
        assert {(type(each), each) for each in found} == {(type(each), each) for each in value}
    elif isinstance(value, list | tuple):
        for one, other in zip(found, value, strict=True):
            check_types(one, other)


def changeable_parts(value: Any) -> list[Any]:
    """Return the mutable arrays and containers in a value, including the value itself."""
    own = [value] if isinstance(value, np.ndarray | dict | list | set | bytearray) else []
    inner: Iterable[Any]
    if isinstance(value, np.ndarray):
        inner = value.flat if value.dtype == object else ()
    else:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return own + [part for each in inner for part in changeable_parts(each)]


class FieldCodecTests:
    """The tests of one field codec: a function from the bytes of a field to its value.

    Subclass it and override :meth:`field`, :meth:`content`, :meth:`value` and :meth:`damaged`; for a function that is
    passed as ``decoders=``, also :meth:`settings`::

        class TestFlac(FieldCodecTests):
            @pytest.fixture
            def settings(self) -> dict[str, Any]:
                return {"decoders": {"flac": decode_flac}}

            @pytest.fixture
            def field(self) -> str:
                return "flac"
            ...
    """

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        """Return the dataset's settings for decoding the field, such as ``{"trusted": True}``."""
        return {}

    @pytest.fixture
    def field(self) -> str:
        """Return the name of the stored field, such as ``left.npy``."""
        raise NotImplementedError

    @pytest.fixture
    def content(self) -> bytes:
        """Return the bytes of an undamaged field."""
        raise NotImplementedError

    @pytest.fixture
    def value(self) -> Any:
        """Return the value that :meth:`content` stores."""
        raise NotImplementedError

    @pytest.fixture
    def damaged(self) -> Sequence[bytes]:
        """Return damaged contents, which must cause errors when they are decoded."""
        raise NotImplementedError

    @pytest.fixture
    def decode(self, field: str, settings: Mapping[str, Any]) -> Callable[..., list[Any]]:
        """Return a function that decodes the field of samples ``k0``, ``k1``, … as a dataset does."""

        def decode(*contents: bytes | None, **others: Any) -> list[Any]:
            samples = StoredSamples(
                {field: list(contents)},
                len(contents),
                describe=lambda row, fields: (f"k{row}", "a.tar"),
                list_keys=lambda: [f"k{row}" for row in range(len(contents))],
            )
            decoder = FieldDecoder(fields=field, **{**settings, **others})
            (column,) = decoder.decode_columns(samples, np.arange(len(contents), dtype=np.uint64), decoder.make_calls())
            return column

        return decode

    def test_the_value_depends_only_on_the_bytes(
        self, decode: Callable[..., list[Any]], content: bytes, value: Any
    ) -> None:
        for found in decode(content, bytes(bytearray(content)), content):
            np.testing.assert_equal(found, value)
            check_types(found, value)

    def test_values_can_be_changed_and_share_nothing(self, decode: Callable[..., list[Any]], content: bytes) -> None:
        parts = [part for value in (*decode(content, content), *decode(content)) for part in changeable_parts(value)]
        assert len(set(map(id, parts))) == len(parts), "a sample's transform may change its value"
        arrays = [part for part in parts if isinstance(part, np.ndarray)]
        assert all(array.flags.writeable for array in arrays), "torch.from_numpy warns about read-only arrays"
        assert not any(starmap(np.shares_memory, combinations(arrays, 2)))

    @pytest.mark.parametrize("content", [b"%d" % 2**64, b'{"a": [%d]}' % 2**64, b"[%d]" % 2**64])
    def test_a_codec_of_integers_of_any_size_is_unbounded(
        self, decode: Callable[..., list[Any]], field: str, content: bytes
    ) -> None:
        try:
            (value,) = decode(content)
        except Exception:  # Each decoder raises its own errors.
            return
        assert find_wide(value) is None or extension_of(field) in UNBOUNDED

    def test_a_missing_field_is_an_error_or_none(
        self, decode: Callable[..., list[Any]], field: str, content: bytes, value: Any
    ) -> None:
        found, missing = decode(content, None, missing=None)
        np.testing.assert_equal(found, value)
        assert missing is None
        with pytest.raises(SampleError, match=f"sample k1 in a.tar has no field '{field}'") as caught:
            decode(content, None)
        assert caught.value.row == 1

    def test_damaged_bytes_are_an_error_that_names_the_sample_and_take_little_memory(
        self, decode: Callable[..., list[Any]], field: str, content: bytes, damaged: Sequence[bytes], settings: Any
    ) -> None:
        error = Exception if "decoders" in settings else SampleError  # User decoders raise their own errors.
        for each in damaged:
            tracemalloc.start()
            try:
                with pytest.raises(error) as caught:
                    decode(content, each)
                assert tracemalloc.get_traced_memory()[1] < MAX_WASTED_BYTES + 10 * len(each)
            finally:
                tracemalloc.stop()
            shown = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert f"'{field}' of sample k1 in a.tar" in shown


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
        """Return the transform, which must accept images of at least 8×8 pixels."""
        raise NotImplementedError

    @pytest.fixture
    def is_random(self) -> bool:
        """Return whether the parameters of images of the same size differ."""
        return True

    @pytest.fixture
    def images(self) -> list[Pixels]:
        """Return images of different sizes, uint8 [height, width, 3] each."""
        rng = np.random.default_rng(2)
        return [rng.integers(40, 168, (20 + 3 * i, 30 + i, 3), np.uint8) for i in range(12)]

    def write(self, image: Pixels) -> bytes:
        """Return a PNG of an image."""
        file = io.BytesIO()
        PIL.Image.fromarray(image).save(file, "PNG")
        return file.getvalue()

    def test_an_images_parameters_depend_only_on_its_rng_key_and_size(
        self, transform: Transform, is_random: bool
    ) -> None:
        rng, count = np.random.default_rng(1), 60
        sizes, rng_keys = rng.integers(8, 60, (count, 2)), make_rng_keys(count)
        together = transform.draw(sizes, rng_keys)
        one_by_one = [transform.draw(sizes[i : i + 1], rng_keys[i : i + 1]) for i in range(count)]
        np.testing.assert_array_equal(together, np.concatenate(one_by_one))
        order = rng.permutation(count)
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


SHARES = list(product(range(1, 61), range(1, 7)))
"""Numbers of samples and of ranks."""


class RemainderPolicyTests:
    """Tests of a remainder policy in ``shardio.order.POLICIES``.

    Override the fixture ``remainder``::

        class TestPad(RemainderPolicyTests):
            @pytest.fixture
            def remainder(self) -> Remainder:
                return "pad"
    """

    @pytest.fixture
    def remainder(self) -> Remainder:
        """Return the policy's name."""
        raise NotImplementedError("override this fixture: return the name of the policy")

    @pytest.fixture(params=[1, 8], ids=["consecutive", "by-stratum"])
    def worlds(self, remainder: Remainder, request: pytest.FixtureRequest) -> list[list[Split]]:
        """Return epochs that start at random cursors, each as the list of all ranks' shares."""
        return [make_world(random.Random(number), remainder, strata=request.param) for number in range(300)]

    def test_ranks_share_the_positions(self, worlds: list[list[Split]]) -> None:
        for ranks in worlds:
            check_shares(ranks)

    def test_the_attributes_describe_the_policy(self, worlds: list[list[Split]]) -> None:
        policy = worlds[0][0].remainder_policy
        extra = {ranks[0].stop - ranks[0].num_samples for ranks in worlds}
        assert policy.repeats == (max(extra) > 0), "repeats"
        assert policy.leaves_out == (min(extra) < 0), "leaves_out"
        assert policy.repeats or not policy.marks_repeats, "marks_repeats"
        counts = [{policy.count_dealt(left, world, size) for size in range(1, 7)} for left, world in SHARES]
        assert policy.uses_batch_size == any(len(each) > 1 for each in counts), "uses_batch_size"
        assert policy.effect

    def test_marks_are_false_for_repeats_alone(self, worlds: list[list[Split]]) -> None:
        for split in chain.from_iterable(worlds):
            positions = np.arange(split.start, split.stop + 1)
            valid = split.find_valid(positions)
            expected = (positions < split.num_samples).tolist() if split.remainder_policy.marks_repeats else None
            assert (None if valid is None else valid.tolist()) == expected

    def test_an_exact_policy_counts_each_sample_once_over_any_interruption(self, worlds: list[list[Split]]) -> None:
        for number, ranks in enumerate(worlds):
            first, rng = ranks[0], random.Random(number)
            found, cursor = list(range(first.start)), first.start
            while cursor < first.num_samples:
                ranks = make_world(rng, first.remainder, strata=first.strata, of=first.num_samples, start=cursor)
                num_steps = rng.randint(1, 9)
                found += chain.from_iterable(chain.from_iterable(own[:num_steps] for own in check_shares(ranks)))
                cursor = ranks[0].position_after(num_steps)
            counted = sorted(position for position in found if position < first.num_samples)
            is_whole = counted == list(range(first.num_samples))
            assert is_whole or first.remainder_policy.leaves_out, "every sample is delivered once, apart from repeats"
            assert counted == list(range(len(counted))), "the last samples are left out"


def make_world(
    rng: random.Random, remainder: Remainder, *, strata: int, of: int | None = None, start: int | None = None
) -> list[Split]:
    """Return the shares of a random number of ranks in an epoch of ``of`` samples, beginning at ``start``."""
    num_samples = rng.randint(1, 60) if of is None else of
    cursor = rng.randint(0, num_samples) if start is None else start
    world_size, batch_size = rng.randint(1, 6), rng.randint(1, 6)
    epoch = partial(Split, num_samples=num_samples, start=cursor, strata=strata, remainder=remainder)
    return [epoch(rank=rank, world_size=world_size, batch_size=batch_size) for rank in range(world_size)]


def check_shares(ranks: Sequence[Split]) -> list[list[list[int]]]:
    """Check the shares of all ranks; return the positions of each rank's batches."""
    first, policy = ranks[0], ranks[0].remainder_policy
    num_left, step_size = first.num_samples - first.start, len(ranks) * first.batch_size
    batches = [[split.batch(step).tolist() for step in range(split.num_batches)] for split in ranks]
    dealt = sorted(chain.from_iterable(chain.from_iterable(batches)))
    num_extra = len(dealt) - num_left
    assert dealt == list(range(first.start, first.start + len(dealt))), "ranks are disjoint and leave no gaps"
    assert -step_size < num_extra < step_size, "only the last step changes"
    assert num_extra == 0 or num_left % step_size, "nothing changes if the samples fill all steps"
    assert num_extra <= 0 or policy.repeats, "only policies with repeats=True repeat samples"
    assert num_extra >= 0 or policy.leaves_out, "only policies with leaves_out=True leave samples out"
    for counts in ([sum(map(len, own)) for own in batches], list(map(len, batches))):
        is_equal = policy.repeats or policy.leaves_out
        assert max(counts) - min(counts) <= (not is_equal), "the ranks' counts are equal, or differ by one"
    for split, own in zip(ranks, batches, strict=True):
        sizes = list(map(len, own))
        assert split.num_own_samples == sum(sizes), "the number of a rank's samples is correct"
        assert sizes[:-1] == [split.batch_size] * (len(sizes) - 1), "batches are full, apart from the last"
        assert all(1 <= size <= split.batch_size for size in sizes), "no batch is empty or too large"
        assert not len(split.batch(split.num_batches)), "nothing follows the last batch"
        for batch in own:
            if split.strata == 1:
                assert batch == list(range(batch[0], batch[0] + len(batch))), "a batch is consecutive"
    for step in range(max(map(len, batches))):
        begin = first.start + step * step_size
        here = sorted(chain.from_iterable(own[step] for own in batches if step < len(own)))
        assert here == dealt[begin - first.start :][:step_size], "a step holds the next positions"
        assert first.position_after(step) == begin, "the cursor follows the steps"
    assert first.position_after(max(map(len, batches))) == first.num_samples, "the cursor ends with the epoch"
    return batches
