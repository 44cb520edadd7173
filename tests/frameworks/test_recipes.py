"""The code in docs/frameworks.md works when pasted, or is the code that the other tests of this folder run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

from shardio import ShardDataset

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "frameworks.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packed: Path) -> Any:
    (tmp_path / "packed").symlink_to(packed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.slow
@pytest.mark.usefixtures("_one_process")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it in torch.
def test_whole_scripts_work_when_pasted(packed: Path) -> None:
    accelerate, torchdata = (block for block in BLOCKS if block.startswith("import"))
    exec(accelerate, names := dict[str, Any]())
    state = names["loader"].state_dict()
    assert (state["epoch"], state["position"]) == (1, 21)
    exec(accelerate, names := dict[str, Any]())  # It has nothing left to do.
    assert names["loader"].state_dict() == state
    exec(torchdata, names := dict[str, Any]())
    assert sorted(names["received"]) == sorted(ShardDataset(packed, fields="key"))


def test_parts_are_what_ranks_run() -> None:
    scripts = [path.read_text() for path in HERE.glob("with_*.py")]
    parts = [block for block in BLOCKS if not block.startswith("import")]
    assert len(parts) == 2
    assert all(any(part in script for script in scripts) for part in parts)
