"""Layouts of token blocks: every token is in exactly one block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists

from shardio.order import BestFitLayout, CutLayout
from tests.order.token_laws import TokenCase, check_tokens, draw_tokens


@given(lists(integers(0, 40), min_size=1, max_size=30), integers(1, 25), integers(1, 12))
def test_each_token_is_in_one_block(lengths: list[int], block_size: int, window: int) -> None:
    check_tokens(TokenCase(tuple(lengths), block_size, window))


@pytest.mark.parametrize("seed", range(20))
def test_the_laws_hold_for_drawn_documents(seed: int) -> None:
    check_tokens(draw_tokens(seed))


def test_best_fit_fills_blocks_better_than_one_document_each() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 3000)
    layout = BestFitLayout(lengths, 100, 1000)
    assert layout.num_blocks * 100 <= 1.05 * lengths.sum()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_documents_without_tokens_have_no_blocks(lengths: list[int]) -> None:
    array = np.array(lengths, np.int64)
    assert CutLayout(array, 4).num_blocks == BestFitLayout(array, 4, 2).num_blocks == 0
