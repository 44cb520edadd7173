"""shardio's worker processes run shardio's own transforms, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from shardio import transforms
from shardio.transforms import (
    CenterCrop,
    Compose,
    Geometry,
    PixelTransform,
    RandomHorizontalFlip,
    Resize,
    Transform,
    is_builtin,
)
from shardio.transforms.planning import BUILTINS


class Cropping(CenterCrop):
    """A subclass may override anything."""


def test_every_transform_of_shardio_is_builtin() -> None:
    public = {getattr(transforms, name) for name in transforms.__all__}
    bases = {Transform, Geometry, PixelTransform}
    found = {each for each in public if isinstance(each, type) and issubclass(each, Transform)} - bases
    assert found == BUILTINS
    assert len(found) == 27


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (None, True),
        (CenterCrop(8), True),
        (Compose([]), True),
        (Compose([Resize(9), Compose([RandomHorizontalFlip()])]), True),
        (Cropping(8), False),
        (Compose([Resize(9), Cropping(8)]), False),
        (Compose([Compose([abs])]), False),
        (type("Several", (Compose,), {})([CenterCrop(8)]), False),
        (abs, False),
    ],
    ids=repr,
)
def test_a_compose_is_builtin_if_all_its_steps_are(transform: Any, expected: bool) -> None:
    assert is_builtin(transform) == expected
