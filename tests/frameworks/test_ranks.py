"""Real ranks deliver each sample once, even in resumed runs, and the code in docs/frameworks.md works when pasted."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from shardio import DataLoader, ShardDataset
from tests.frameworks.launch import check_epochs, launch, returned
from tests.frameworks.samples import Labeled, Own, number_of
from tests.torchrun import run_by_torchrun

EPOCHS = {"distributed": 2, "shares": 2, "accelerate": 2, "accelerate-stateful": 3}
OWN = list(map(Own().__getitem__, range(24)))


@pytest.mark.slow
def test_user_defined_datasets_on_two_ranks_of_torchrun(tmp_path: Path) -> None:
    done = run_by_torchrun("tests.frameworks.with_own_datasets:be_rank", tmp_path, num_ranks=2)
    assert done.returncode == 0, done.stderr
    for name, num_epochs in EPOCHS.items():
        check_epochs(tmp_path / name, OWN, num_epochs=num_epochs)


@pytest.mark.slow
def test_lightning_on_one_rank_and_two(packed: Path, tmp_path: Path) -> None:
    keys = list(ShardDataset(packed, fields="key"))
    launch("tests.frameworks.with_lightning:run", tmp_path, packed, world_sizes=[2, 1])
    expected = {"shards": keys, "sampled": keys, "mixed": [*keys, *Labeled.keys], "own": OWN, "in threads": OWN}
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        for kind, what in itertools.product(expected, ("training", "resumed", "validation")):
            check_epochs(folder / f"{kind}-{what}", expected[kind], world_size=world_size)
        check_epochs(folder / "shards-reloaded", keys, world_size=world_size)
        delivered: Any = returned(tmp_path, world_size)
        for rank, epochs in enumerate(delivered):
            dataset = ShardDataset(packed, fields="key", shuffle=True, rank=rank, world_size=world_size)
            loader = DataLoader(dataset, batch_size=4)
            assert epochs == [[key for keys in loader for key in keys] for _ in range(2)]


SPLITTERS = {
    "dispatched": "accelerate.data_loader.DataLoaderDispatcher",
    "shared": "accelerate.data_loader.IterableDatasetShard",
    "by hand": "transformers.trainer_pt_utils.IterableDatasetShard",
}


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="torch 2.6 cannot load to cpu:0, as the Trainer does on two ranks"
)
def test_the_trainer_on_one_rank_and_two_delivers_or_fails(packed: Path, tmp_path: Path) -> None:
    numbers = list(map(number_of, ShardDataset(packed, fields="key")))  # The model's inputs.
    launch("tests.frameworks.with_transformers:run", tmp_path, packed, world_sizes=[2, 1])
    expected = {"shards": numbers, "sampled": numbers, "mixed": [*numbers, *map(number_of, Labeled.keys)]}
    for world_size, kind, what in itertools.product((1, 2), expected, ("training", "resumed")):
        check_epochs(tmp_path / str(world_size) / kind / what, expected[kind], world_size=world_size)
    # Trainer's own loader splits a map-style dataset over two ranks and fills the last batches, but it does not split
    # shards. On one rank, the loader is correct.
    for name in ("map-style", "not-split"):
        check_epochs(tmp_path / "2" / name / "training", numbers, num_repeats=3)
    for name in ("dispatched", "shared", "map-style", "not-split"):
        check_epochs(tmp_path / "1" / name / "training", numbers, world_size=1)
    for rank in returned(tmp_path, 2):
        for name, splitter in SPLITTERS.items():
            assert f"{splitter} splits the samples over 2 processes" in rank[name]
            assert "Pass the framework a shardio.DataLoader" in rank[name]
    # Skipping batches without the loader's state raises an error.
    for rank in (*returned(tmp_path, 1), *returned(tmp_path, 2)):
        assert "instead of using skip_first_batches()" in rank["skipped"]


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
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata causes this torch warning.
def test_whole_scripts_work_when_pasted(packed: Path) -> None:
    accelerate, torchdata = (block for block in BLOCKS if "\n\n\n" not in block)
    exec(accelerate, names := dict[str, Any]())
    state = names["loader"].state_dict()
    assert (state["epoch"], state["position"]) == (1, 21)
    exec(accelerate, names := dict[str, Any]())  # The resumed run is already complete.
    assert names["loader"].state_dict() == state
    exec(torchdata, names := dict[str, Any]())
    assert sorted(names["received"]) == sorted(ShardDataset(packed, fields="key"))


def test_parts_are_what_ranks_run() -> None:
    scripts = [path.read_text() for path in HERE.glob("with_*.py")]
    parts = [block.partition("\n\n\n")[2] for block in BLOCKS if "\n\n\n" in block]  # Without the imports.
    assert len(parts) == 2
    assert all(any(part in script for script in scripts) for part in parts)
