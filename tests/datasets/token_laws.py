"""The laws of token layouts, for tests and tools/order_campaign.py."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass

import numpy as np

from shardio.datasets.tokens import BestFitLayout, CutLayout, TokenLayout

Tokens = list[tuple[int, int]]
"""The tokens of a block: (document, position)."""


@dataclass(frozen=True)
class TokenCase:
    """The lengths of documents, and how they are divided into blocks."""

    lengths: tuple[int, ...]
    block_size: int
    window: int


def draw_tokens(seed: int) -> TokenCase:
    """Return the case for a seed."""
    rng = random.Random(seed)
    longest = rng.choice((1, 5, 40, 300))
    lengths = tuple(rng.choice((0, rng.randint(0, longest))) for _ in range(rng.randint(1, rng.choice((4, 30, 90)))))
    return TokenCase(lengths, rng.randint(1, rng.choice((3, 25, 120))), rng.randint(1, 40))


def check_tokens(case: TokenCase) -> None:
    """Check that every token is in one block, in order, and that best fit keeps documents whole."""
    lengths = np.array(case.lengths)
    expected = [(document, position) for document, length in enumerate(case.lengths) for position in range(length)]
    cut = _list_blocks(CutLayout(lengths, case.block_size), case)
    assert [token for block in cut for token in block] == expected
    assert all(len(block) == case.block_size for block in cut[:-1])

    layout = BestFitLayout(lengths, case.block_size, case.window)
    blocks = _list_blocks(layout, case)
    assert sorted(token for block in blocks for token in block) == expected
    for block in blocks:
        documents = {document for document, _ in block}
        assert len({document // case.window for document in documents}) == 1
        for document in documents:  # A document that fits in a block is whole.
            num_tokens = sum(other == document for other, _ in block)
            assert num_tokens in (lengths[document], case.block_size, lengths[document] % case.block_size)
    copied = pickle.loads(pickle.dumps(layout))
    assert _list_blocks(copied, case) == blocks


def _list_blocks(layout: TokenLayout, case: TokenCase) -> list[Tokens]:
    """Return the tokens of each block. Blocks are located in random order, in parts of random sizes."""
    random = np.random.default_rng(case.block_size)
    numbers = random.permutation(layout.num_blocks)
    blocks: list[Tokens] = [[] for _ in range(layout.num_blocks)]
    for part in np.array_split(numbers, random.integers(1, 4)) if len(numbers) else []:
        pieces = layout.find_pieces(part)
        assert (np.diff(pieces.rows) >= 0).all()
        assert (pieces.starts < pieces.stops).all()
        assert (pieces.documents < len(case.lengths)).all()
        for row, document, start, stop in zip(*(each.tolist() for each in pieces), strict=True):
            blocks[part[row]] += [(document, position) for position in range(start, stop)]
    assert all(0 < len(tokens) <= case.block_size for tokens in blocks)
    return blocks
