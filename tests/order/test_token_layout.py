"""Layouts of token blocks: every token is in exactly one block."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists

from shardio.order import BestFitLayout, CutLayout, TokenLayout


def list_blocks(layout: TokenLayout, num_documents: int, block_size: int) -> list[list[tuple[int, int]]]:
    """Check the pieces of all blocks, and return the tokens of each block as (document, position)."""
    numbers = np.random.default_rng(0).permutation(layout.num_blocks)  # Blocks are found in any order.
    blocks: list[list[tuple[int, int]]] = [[] for _ in range(layout.num_blocks)]
    pieces = layout.find_pieces(numbers)
    assert (np.diff(pieces.rows) >= 0).all()
    assert (pieces.starts < pieces.stops).all()
    assert (pieces.documents < num_documents).all()
    for row, document, start, stop in zip(*(each.tolist() for each in pieces), strict=True):
        blocks[numbers[row]] += [(document, position) for position in range(start, stop)]
    assert all(0 < len(tokens) <= block_size for tokens in blocks)
    return blocks


@given(lists(integers(0, 40), min_size=1, max_size=30), integers(1, 25), integers(1, 12))
def test_each_token_is_in_one_block(lengths: list[int], block_size: int, window: int) -> None:
    expected = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    array = np.array(lengths)
    cut = list_blocks(CutLayout(array, block_size), len(lengths), block_size)
    assert [token for block in cut for token in block] == expected
    assert all(len(block) == block_size for block in cut[:-1])

    layout = BestFitLayout(array, block_size, window)
    blocks = list_blocks(layout, len(lengths), block_size)
    assert sorted(token for block in blocks for token in block) == expected
    for block in blocks:
        documents = {document for document, _ in block}
        assert len({document // window for document in documents}) == 1
        for document in documents:  # A document that fits in a block is whole.
            num_tokens = sum(other == document for other, _ in block)
            assert num_tokens in (lengths[document], block_size, lengths[document] % block_size)
    copied = pickle.loads(pickle.dumps(layout))
    assert list_blocks(copied, len(lengths), block_size) == blocks


def test_best_fit_fills_blocks_better_than_one_document_each() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 3000)
    layout = BestFitLayout(lengths, 100, 1000)
    assert layout.num_blocks * 100 <= 1.05 * lengths.sum()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_documents_without_tokens_have_no_blocks(lengths: list[int]) -> None:
    array = np.array(lengths, np.int64)
    assert CutLayout(array, 4).num_blocks == BestFitLayout(array, 4, 2).num_blocks == 0
