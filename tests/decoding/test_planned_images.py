"""Planned images are rendered into given rows or new arrays, and their errors name the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardio.decoding import FieldDecoder, PlannedImages
from shardio.errors import SampleError
from shardio.reading import StoredSamples
from shardio.transforms import Calls, CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop
from tests.images.pictures import make_picture, save
from tests.transforms.inputs import make_rng_keys

FILES = [save(make_picture(40, 50, seed), "JPEG") for seed in range(5)]
CROP = Compose([RandomResizedCrop(24), RandomHorizontalFlip()])


def stored(contents: list[bytes]) -> StoredSamples:
    return StoredSamples(
        {"jpg": contents},
        len(contents),
        describe=lambda row, fields: (f"key{row}", "a.tar"),
        list_keys=lambda: [f"key{row}" for row in range(len(contents))],
    )


def plan_all(decoder: FieldDecoder, contents: list[bytes] = FILES) -> PlannedImages:
    return decoder.plan(stored(contents), make_rng_keys(5), Calls()).images["image"]


def test_images_rendered_into_rows_are_those_rendered_into_new_arrays_and_those_of_the_column() -> None:
    decoder, rows = FieldDecoder(fields="image", transform=CROP), np.zeros((5, 24, 24, 3), np.uint8)
    planned = plan_all(decoder)
    assert planned.fits(0, rows)
    assert not any(planned.fits(0, np.zeros((5, *size, 3), np.uint8)) for size in ((24, 25), (25, 24), (40, 50)))
    assert not planned.fits(0, None)
    (rendered,) = planned.render([rows])
    (column,) = decoder.decode_columns(stored(FILES), make_rng_keys(5), Calls())
    np.testing.assert_array_equal(rows, column)
    np.testing.assert_array_equal(planned.render()[0].images, column)
    assert all(np.shares_memory(image, rows) for image in rendered.images)
    assert rendered.decoder_names == ["kernel"] * 5


@pytest.mark.parametrize(
    ("options", "decoder_name"),
    [
        ({"decode": "pil"}, "pillow"),
        ({"decode": "pil", "transform": np.asarray}, "pillow"),
        ({"transform": Compose([CROP, lambda image: image])}, "kernel"),
    ],
    ids=["pillow", "asarray", "lambda"],
)
def test_images_that_need_pixels_are_planned_as_finished(options: dict[str, Any], decoder_name: str) -> None:
    planned = plan_all(FieldDecoder(fields="image", **options))
    ((images, plan),) = planned.crops
    assert plan is None
    assert not planned.fits(0, np.zeros((5, *np.asarray(images[0]).shape), np.uint8))
    (rendered,) = planned.render()
    assert rendered.images is images
    assert rendered.decoder_names == [decoder_name] * 5


def test_a_damaged_image_is_an_error_of_its_sample_when_it_is_rendered() -> None:
    damaged = FILES[2][:-100] + b"\xff\xd9"
    planned = plan_all(FieldDecoder(fields="image", transform=CenterCrop(40)), [*FILES[:2], damaged, *FILES[3:]])
    with pytest.raises(SampleError, match=r"the image of sample key2 in a\.tar cannot be decoded") as error_info:
        planned.render()
    assert error_info.value.row == 2
