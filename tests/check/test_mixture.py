"""check_mixture finds sources that repeat, lose or outweigh, in any loader."""

from __future__ import annotations

import random

import pytest

from shardio import DataLoader, MixedDataset
from shardio.check import check_mixture
from shardio.errors import CoverageError, IdentityError

WEB, CODE = ([f"{name}-{number}" for number in range(size)] for name, size in (("web", 70), ("code", 20)))
SOURCES = {"web": WEB, "code": CODE}
WEIGHTS = {"web": 0.7, "code": 0.3}


def batched(keys: list[str], size: int = 10) -> list[list[str]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_mixture_is_exact_after_each_step(world_size: int) -> None:
    ranks = [
        MixedDataset({"web": (WEB, 0.7), "code": (CODE, 0.3)}, stop=300, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    report = check_mixture(tuple(DataLoader(rank, 4) for rank in ranks), SOURCES, WEIGHTS)
    report.raise_if_wrong()
    assert report.num_delivered == 300
    assert {name: source.num_delivered for name, source in report.sources.items()} == {"web": 210, "code": 90}
    assert "code: 90 samples, 30.00% of 30.00%, 4.50 times" in str(report)


def test_a_random_mixture_outweighs() -> None:
    rng = random.Random(0)
    ways = {"web": iter(WEB * 9), "code": iter(CODE * 9)}
    keys = [next(ways[rng.choices(("web", "code"), (0.7, 0.3))[0]]) for _ in range(300)]
    report = check_mixture(batched(keys), SOURCES, WEIGHTS)
    assert [problem.partition(" by up")[0] for problem in report.problems] == [
        "web deviates from its share of 70.00%",
        "code deviates from its share of 30.00%",
    ]
    assert check_mixture(batched(keys), SOURCES, WEIGHTS, tolerance=50).problems == []


def test_repeats_losses_and_unknown_samples_are_named() -> None:
    def problems(keys: list[str]) -> list[str]:
        return check_mixture(batched(keys), SOURCES, WEIGHTS, tolerance=1000).problems

    assert problems(["web-3", "code-1", "web-3"]) == [
        "web repeats 1 sample (web-3) before its other samples have been delivered"
    ]
    assert problems([*CODE[1:], "code-1", *CODE]) == [
        "code repeats 2 samples (code-1, code-1) before its other samples have been delivered",
        "code leaves out 1 sample (code-0)",
    ]
    assert problems([*CODE[1:], "code-1"]) == [
        "code repeats 1 sample (code-1) before its other samples have been delivered",
        "code leaves out 1 sample (code-0)",
    ]
    assert problems([*CODE, *CODE[::-1], *WEB, "web-1"]) == []
    assert problems(["other"]) == ["no source has 1 sample (other)"]
    with pytest.raises(CoverageError, match="leaves out"):
        check_mixture(batched(CODE[1:] + CODE[1:2]), SOURCES, WEIGHTS).raise_if_wrong()


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(IdentityError, match="two sources"):
        check_mixture([], {"web": ["a"], "code": ["a"]}, WEIGHTS)
    with pytest.raises(IdentityError, match="no keys"):
        check_mixture([[1.5]], SOURCES, WEIGHTS)
    with pytest.raises(ValueError, match="the weights are of web, but the sources are web, code"):
        check_mixture([], SOURCES, {"web": 1})
