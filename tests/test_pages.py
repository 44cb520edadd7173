"""Pages and their parts, regardless of what they show."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from shardio.pages import choose_ticks, element, line_plot, make_page, section, table
from shardio.values import count, format_bytes, format_number
from tests.pages import Page

NUMBERS = st.floats(0, 1e9, allow_subnormal=False) | st.just(float("nan")) | st.just(float("inf"))
POINTS = st.lists(st.tuples(st.integers(0, 10**7), NUMBERS), max_size=60).map(sorted)


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\r\0")),
    st.dictionaries(st.text("ab<&\"'"), POINTS, max_size=3),
)
def test_any_text_and_any_curves_make_a_page_that_obeys_the_laws(
    text: str, curves: dict[str, list[tuple[int, float]]]
) -> None:
    cells = table([text, "number"], [(text, 1)])
    page = Page(make_page("title", [section("plot", line_plot("a plot", curves, "step")), element("p", text), cells]))
    assert page.texts["p"][-1] == text
    assert page.rows == [[text, "number"], [text, "1"]]


@given(st.floats(1e-9, 1e9), st.integers(4, 8))
def test_ticks_are_few_round_and_equally_far_apart(end: float, max_steps: int) -> None:
    first, *others = choose_ticks(end, max_steps)
    assert (first, 1 <= len(others) <= max_steps, others[-1] <= end * (1 + 1e-9)) == (0, True, True)
    steps = [later - earlier for earlier, later in pairwise([first, *others])]
    assert steps == pytest.approx([others[0]] * len(others))
    assert f"{others[0]:.0e}"[0] in "125"
    assert f"{others[0]:.6e}"[1:8] == ".000000"


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_numbers_can_be_read_back(value: float) -> None:
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, rel=1e-11)


def test_counts_and_sizes_are_for_people() -> None:
    assert [count(number, "shard") for number in (0, 1, 1000)] == ["0 shards", "1 shard", "1,000 shards"]
    sizes = {0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 2**20: "1 MiB", 3 * 2**30: "3 GiB"}
    sizes |= {2**41: "2 TiB", 2**50: "1024 TiB"}
    assert {num_bytes: format_bytes(num_bytes) for num_bytes in sizes} == sizes
