"""Transforms with torchvision's names take torchvision's arguments, by position and by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import shardio.transforms
from shardio.libraries import import_library
from shardio.transforms import Resize
from shardio.transforms.planning import recognise
from tests.transforms.inputs import make_rng_keys, repeat_size

import_library("torchvision")
v1 = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")
tv_tensors = pytest.importorskip("torchvision.tv_tensors")

OTHER_DEFAULTS = {("RandomResizedCrop", "antialias"), ("Resize", "antialias"), ("ToDtype", "dtype")}
"""Defaults that differ, as docs/transforms.md says of resizing. torchvision has no default for ToDtype's dtype."""


def parameters_of(transform: type) -> dict[str, Any]:
    """Return the defaults of a transform's parameters, in order."""
    _, *parameters = inspect.signature(transform.__init__).parameters.values()  # type: ignore[misc]  # of a class
    return {
        parameter.name: getattr(parameter.default, "value", parameter.default)
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


SHARED = [
    name
    for name in shardio.transforms.__all__
    if name != "Transform" and inspect.isclass(getattr(shardio.transforms, name)) and hasattr(v2, name)
]


@pytest.mark.parametrize("name", SHARED)
def test_arguments_have_torchvisions_names_order_and_defaults(name: str) -> None:
    ours, theirs = (parameters_of(getattr(module, name)) for module in (shardio.transforms, v2))
    assert list(ours)[: len(theirs)] == list(theirs)
    different = {(name, each) for each in theirs if ours[each] != theirs[each]}
    assert different <= OTHER_DEFAULTS


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    size=st.one_of(st.none(), st.integers(1, 500)),
    more=st.integers(1, 500),
)
@settings(max_examples=50)
def test_a_longest_side_is_torchvisions(height: int, width: int, size: int | None, more: int) -> None:
    max_size = (size or 0) + more
    box = tv_tensors.BoundingBoxes([[0, 0, 1, 1]], format="XYXY", canvas_size=(height, width))
    expected = v2.Resize(size, max_size=max_size)(box).canvas_size
    found = Resize(size, max_size=max_size).draw(repeat_size(height, width, 1), make_rng_keys(1))[0].tolist()
    assert tuple(found) == tuple(max(side, 1) for side in expected), "torchvision's sides may be 0"
    assert max(found) <= max_size


def test_a_longest_side_must_be_possible() -> None:
    for arguments, message in (
        ((None,), "size=None requires max_size"),
        (((20, 30), "bilinear", 40), "max_size applies only to a size of one number"),
        ((20, "bilinear", 20), "max_size must be greater than size"),
    ):
        with pytest.raises(ValueError, match=message):
            Resize(*arguments)


@pytest.mark.parametrize("make", [v1.Resize, v2.Resize])
def test_pipelines_with_a_longest_side_are_replaced(make: Any) -> None:
    ours = recognise(make(25, max_size=40), "pil")
    assert isinstance(ours, Resize)
    assert repr(ours) == "Resize(size=25, max_size=40, antialias=True)"
    assert ours.draw(repeat_size(60, 120, 1), make_rng_keys(1)).tolist() == [[20, 40]]
