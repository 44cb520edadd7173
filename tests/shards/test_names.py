from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from shardio.shards import join_name, split_name

base_plus_ext = pytest.importorskip("webdataset.tariterators").base_plus_ext

NAMES = st.lists(st.sampled_from(["a", "B", "é", "0", ".", "..", "/", "__", "_", " ", "jpg", "JPG"]), max_size=9).map(
    "".join
) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=30)


def is_meta(name: str) -> bool:
    """What WebDataset skips: a first path component that begins and ends with two underscores."""
    first = name.split("/", 1)[0]
    return first.startswith("__") and first.endswith("__") and len(first) >= 4


@given(NAMES)
@example("a.jpg")
@example("a/b.c/d.tar.GZ")
@example("a/.jpg")
@example(".jpg")
@example("a.")
@example("__meta__/a.jpg")
@example("__a.jpg__")
@example("x/__meta__/a.jpg")
@example("README")
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    key, field = base_plus_ext(name)
    expected = None if key is None or is_meta(name) else (key, field.lower())
    assert split_name(name) == expected


@pytest.mark.parametrize("name", ["/" * 2**20, "a/" * 2**19, "./" * 2**19, "__" + "_/" * 2**19])
def test_a_long_name_without_a_key_is_split_in_linear_time(name: str) -> None:
    """A regular expression would take hours."""
    assert split_name(name) is None
    assert split_name(f"{name}x.txt") == (f"{name}x", "txt")


@given(NAMES)
def test_splitting_and_joining_keeps_a_name_except_for_letter_case(name: str) -> None:
    split = split_name(name)
    if split is not None:
        key, field = split
        assert split_name(join_name(key, field)) == (key, field)
        assert join_name(key, field)[: len(key) + 1] == name[: len(key) + 1]
