"""The cases of the checker's campaign: faults are found and named, and right loaders are accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.check import planted, planted_runs, unusual
from tests.check.cases import Case

PLANTED = [*planted.case.cases, *planted_runs.case.cases]
UNUSUAL = unusual.case.cases

# webdataset leaves files to the garbage collector. torchdata calls a deprecated function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def named(cases: list[Case]) -> list[object]:
    names = [re.sub(r"\W+", "-", case.name) for case in cases]
    assert len(set(names)) == len(names)
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * case.is_slow)
        for case, name in zip(cases, names, strict=True)
    ]


@pytest.mark.parametrize("case", named(PLANTED))
def test_a_fault_is_found_and_named(case: Case, packed: Path) -> None:
    verdict, message = case.judge(packed)
    assert verdict in {"wrong", "keys wanted"}
    assert case.says in message


@pytest.mark.parametrize("case", named(UNUSUAL))
def test_a_right_loader_is_accepted(case: Case, packed: Path) -> None:
    verdict, message = case.judge(packed)
    assert verdict == ("keys wanted" if case.says else "right"), message
    assert case.says in message
