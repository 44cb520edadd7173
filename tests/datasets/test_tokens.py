"""PackedTokens: blocks of tokens from documents of any length."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists
from numpy.typing import NDArray

from shardio import (
    DataLoader,
    EpochSampler,
    FormatError,
    MixedDataset,
    PackedTokens,
    SampleError,
    ShardWriter,
    StateError,
)
from shardio.datasets.tokens import BestFitLayout, CutLayout
from tests.datasets.token_laws import TokenCase, check_tokens, draw_tokens
from tests.files import flip
from tests.raising import assert_raises

BLOCK = 33
EOS = 7


def write_documents(folder: Path, documents: Iterable[NDArray[Any]], max_shard_samples: int = 40) -> Path:
    with ShardWriter(folder, max_shard_samples=max_shard_samples) as writer:
        for number, document in enumerate(documents):
            writer.write({"__key__": f"{number:04d}", "npy": document})
    return folder


def draw_documents(num_documents: int, dtype: str, seed: int = 0) -> list[NDArray[Any]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 90, num_documents)
    lengths[num_documents // 2] = 1000  # This document is read in parts.
    return [rng.integers(0, 60_000, length).astype(dtype) for length in lengths]


@pytest.fixture(scope="module")
def documents() -> list[NDArray[Any]]:
    return draw_documents(130, "uint16")


@pytest.fixture(scope="module")
def packed(documents: list[NDArray[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("tokens") / "packed", documents)


def gather(blocks: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> dict[tuple[int, int], int]:
    """Return each token by its document and position. No token may occur twice."""
    found: dict[tuple[int, int], int] = {}
    for block in blocks:
        for token, document, position in zip(*(each.flatten().tolist() for each in block), strict=True):
            if document >= 0:
                assert (document, position) not in found
                found[document, position] = token
            else:
                assert (token, position) == (0, 0)
    return found


def expect(documents: list[NDArray[Any]], eos: int | None) -> dict[tuple[int, int], int]:
    ends = [] if eos is None else [eos]
    lists = [[*document.tolist(), *ends] for document in documents]
    return {(number, at): token for number, tokens in enumerate(lists) for at, token in enumerate(tokens)}


@pytest.mark.parametrize("options", [{}, {"eos": EOS}, {"eos": EOS, "packing": "best-fit", "window": 16}])
def test_each_token_comes_once_from_any_number_of_workers(
    options: dict[str, Any], documents: list[NDArray[Any]], packed: Path
) -> None:
    dataset = PackedTokens(packed, BLOCK, **options)
    expected = expect(documents, options.get("eos"))
    for _ in range(2):  # Later, long documents are read in parts.
        blocks = [dataset[index] for index in range(len(dataset))]
        assert gather(blocks) == expected
    assert {(each.dtype, tuple(each.shape)) for block in blocks for each in block} == {(torch.int32, (BLOCK,))}
    batches = [
        list(DataLoader(dataset, batch_size=5, sampler=EpochSampler(dataset, remainder="keep"), num_workers=workers))
        for workers in (0, 2)
    ]
    assert all(map(torch.equal, *(torch.cat([torch.stack(batch, 1) for batch in found]) for found in batches)))
    assert gather(batches[0]) == expected


@pytest.mark.parametrize("dtype", ["int64", "uint32", "int32", "uint8"])
def test_documents_may_have_any_integer_type(dtype: str, tmp_path: Path) -> None:
    documents = [document.astype("uint8").astype(dtype) for document in draw_documents(20, "uint16")]
    dataset = PackedTokens(write_documents(tmp_path / "packed", documents), BLOCK)
    assert gather(map(dataset.__getitem__, range(len(dataset)))) == expect(documents, None)


def test_a_single_field_is_bare(packed: Path) -> None:
    whole = PackedTokens(packed, BLOCK)[3]
    assert torch.equal(PackedTokens(packed, BLOCK, fields="tokens")[3], whole[0])
    both = PackedTokens(packed, BLOCK, fields=("positions", "tokens"))
    assert all(map(torch.equal, both[3], (whole[2], whole[0])))


def test_a_run_resumes_on_other_ranks_with_the_same_blocks(packed: Path) -> None:
    def make(num_ranks: int) -> list[DataLoader[Any]]:
        dataset = PackedTokens(packed, BLOCK, eos=EOS)
        samplers = [
            EpochSampler(dataset, rank=rank, world_size=num_ranks, remainder="drop") for rank in range(num_ranks)
        ]
        return [DataLoader(dataset, batch_size=12 // num_ranks, sampler=sampler) for sampler in samplers]

    def steps(loaders: list[DataLoader[Any]], stop: int | None = None) -> list[list[list[int]]]:
        found = zip(*(islice(loader, stop) for loader in loaders), strict=True)
        return [sorted(torch.cat([batch[0] for batch in batches]).tolist()) for batches in found]

    whole, two, four = steps(make(1)), make(2), make(4)
    begun = steps(two, 5)
    state = two[0].state_dict()
    for loader in four:
        loader.load_state_dict(state)
    assert begun + steps(four) == whole
    other = PackedTokens(packed, BLOCK + 1, eos=EOS)
    loader = DataLoader(other, sampler=EpochSampler(other, remainder="drop"))
    assert_raises(StateError, "digest", loader.load_state_dict, state)


def test_blocks_are_mixed_with_other_datasets(packed: Path, documents: list[NDArray[Any]], tmp_path: Path) -> None:
    others = draw_documents(50, "uint16", seed=1)
    code = PackedTokens(write_documents(tmp_path / "code", others), BLOCK, eos=EOS)
    web = PackedTokens(packed, BLOCK, eos=EOS)
    mix = MixedDataset({"web": (web, 0.8), "code": (code, 0.2)}, stop="all-once", source_field=True, remainder="keep")
    batches = list(DataLoader(mix, batch_size=8, num_workers=2))
    sources = torch.cat([batch[-1] for batch in batches])
    values = [torch.cat([batch[column] for batch in batches]) for column in range(3)]
    for number, expected in enumerate((documents, others)):
        tokens, ids, positions = (each[sources == number] for each in values)
        assert gather([(tokens, ids, positions)]) == expect(expected, EOS)


def test_what_cannot_be_tokens_is_named(packed: Path, tmp_path: Path) -> None:
    tokens = np.arange(5, dtype=np.int32)
    unfit: dict[str, list[NDArray[Any]]] = {
        "one-dimensional": [np.ones((2, 3), np.int32)],
        "dtype float32": [np.ones(3, np.float32)],
        "same dtype": [tokens, tokens[:3].astype(np.uint8)],
    }
    for message, documents in unfit.items():
        assert_raises(FormatError, message, PackedTokens, write_documents(tmp_path / message, documents), 4)
    found_later: dict[str, list[NDArray[Any]]] = {
        "array of int32, like the first": [tokens, tokens.astype(np.float32)],
        "does not fit in int32": [tokens.astype(np.int64), np.array([2**40])],
    }
    for message, documents in found_later.items():
        dataset = PackedTokens(write_documents(tmp_path / message, documents), 4)
        failure = assert_raises(SampleError, message, dataset.__getitems__, list(range(len(dataset))))
        assert failure.key == "0001"
    with pytest.raises(ValueError, match="fields must be"):
        PackedTokens(packed, BLOCK, fields=("token",))  # type: ignore[arg-type]
    assert_raises(ValueError, "block", PackedTokens, packed, 0)
    with pytest.raises(ValueError, match="packing"):
        PackedTokens(packed, BLOCK, packing="fit")  # type: ignore[arg-type]
    with ShardWriter(tmp_path / "texts") as writer:
        writer.write({"__key__": "0", "txt": "text"})
    assert_raises(ValueError, r"no sample .* has the field 'npy'", PackedTokens, tmp_path / "texts", BLOCK)


def test_a_damaged_document_fails_the_blocks_that_it_is_in(tmp_path: Path) -> None:
    documents = [np.full(20, number, np.int32) for number in range(4)]
    folder = write_documents(tmp_path / "packed", documents)
    tar = folder / "shard-000000.tar"
    flip(tar, tar.read_bytes().index(documents[2].tobytes()) + 5)
    dataset = PackedTokens(folder, 10)
    assert torch.equal(dataset[1][0], torch.zeros(10, dtype=torch.int32))
    failure = assert_raises(SampleError, "0002", dataset.__getitems__, [0, 1, 5, 2])
    assert failure.row == 2


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
