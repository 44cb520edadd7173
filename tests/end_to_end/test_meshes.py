"""Under tensor or pipeline parallelism, the ranks of one replica read the same samples, and different replicas read
different samples."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset
from shardio.check import CoverageRecorder
from tests.processes import run_launched_ranks
from tests.raising import assert_raises

pytestmark = pytest.mark.slow


def keys_of(loader: Any) -> list[str]:
    return [key for batch in loader for key in batch]


def run_mesh_rank(rank: int, packed: str, out: str) -> None:
    """Record the keys that a rank receives. Ranks 0 and 1 are one replica, and 2 and 3 the other."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"fields": "key", "shuffle": True}
    data = mesh["dp"]
    dataset = ShardMapDataset(packed, fields="key")
    loaders = {
        "mesh": DataLoader(ShardDataset(packed, mesh=data, **options), 4, num_workers=1),
        "group": DataLoader(ShardDataset(packed, group=data.get_group(), **options), 4),
        "sampler": DataLoader(dataset, 4, sampler=EpochSampler(dataset, mesh=data)),
        "all": DataLoader(ShardDataset(packed, group=dist.group.WORLD, **options), 4),
    }
    delivered = {name: keys_of(loader) for name, loader in loaders.items()}
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, delivered)
    whole = sorted(ShardDataset(packed, fields="key", rank=0, world_size=1))
    for name in ("mesh", "group", "sampler"):
        one, same, other, same_other = (every[number][name] for number in range(4))
        assert (one, other) == (same, same_other)
        assert sorted({*one, *other}) == whole
        assert len(one) == len(other) == 11, "21 samples, one of which is repeated"
    assert sorted({key for other in range(4) for key in every[other]["all"]}) == whole

    message = r"a DeviceMesh with several dimensions \(dp, tp\), so it is not clear which"
    assert_raises(RuntimeError, message, iter, DataLoader(ShardDataset(packed, **options), 4))
    message = r"has 2 dimensions \(dp, tp\): pass the dimension .* such as mesh=mesh\['dp'\]"
    assert_raises(ValueError, message, ShardDataset, packed, mesh=mesh)
    message = "got rank and mesh: pass either rank and world_size, or mesh, or group"
    assert_raises(ValueError, message, ShardDataset, packed, mesh=data, rank=0, world_size=2)
    apart = dist.new_group([3])
    if rank != 3:
        assert_raises(ValueError, f"rank {rank} is not in the group", ShardDataset, packed, group=apart)

    with CoverageRecorder(out, mesh=data) as recorder:
        for _ in recorder.watch(DataLoader(ShardDataset(packed, mesh=data, **options), 4)):
            pass
    (coverage,) = recorder.gather()
    assert coverage.num_delivered_by(0) == coverage.num_delivered_by(1) == 11
    dist.destroy_process_group()


def test_replicas_share_their_samples(packed: Path, tmp_path: Path) -> None:
    run_launched_ranks(run_mesh_rank, str(packed), str(tmp_path / "run"), num_ranks=4)
    files = [f"rank-{number:05d}{end}" for number in range(2) for end in (".cov", ".group-00001.replica")]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == files, "run/*.cov names each sample once"


def make_stateful(packed: str) -> tuple[DataLoader, DevicePrefetcher]:
    loader, wrapped = (DataLoader(ShardDataset(packed, fields="key", shuffle=True, seed=seed), 2) for seed in (1, 2))
    return loader, DevicePrefetcher(wrapped, "cpu")


def save_rank(rank: int, packed: str, out: str) -> None:
    dist.init_process_group("gloo")
    loader, prefetcher = make_stateful(packed)
    assert isinstance(loader, Stateful)
    assert isinstance(prefetcher, Stateful)
    taken = [keys_of(itertools.islice(loader, 2)), keys_of(itertools.islice(prefetcher, 3))]
    save({"loader": loader, "prefetcher": prefetcher}, checkpoint_id=f"{out}/checkpoint")
    Path(out, f"taken-{rank}").write_text(repr(taken))
    dist.destroy_process_group()


def resume_rank(rank: int, packed: str, out: str, name: str) -> None:
    dist.init_process_group("gloo")
    loader, prefetcher = make_stateful(packed)
    load({"loader": loader, "prefetcher": prefetcher}, checkpoint_id=f"{out}/checkpoint")
    Path(out, f"{name}-{rank}").write_text(repr([keys_of(loader), keys_of(prefetcher)]))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_distributed_checkpoints_resume_on_any_number_of_ranks(packed: Path, tmp_path: Path) -> None:
    run_launched_ranks(save_rank, str(packed), str(tmp_path), num_ranks=2)
    whole = sorted(ShardDataset(packed, fields="key"))
    for num_ranks in (1, 3):
        run_launched_ranks(resume_rank, str(packed), str(tmp_path), f"rest{num_ranks}", num_ranks=num_ranks)
        for part, num_taken in ((0, 8), (1, 12)):
            taken, rest = (
                [key for file in sorted(tmp_path.glob(pattern)) for key in eval(file.read_text())[part]]
                for pattern in ("taken-*", f"rest{num_ranks}-*")
            )
            assert len(set(taken)) == num_taken
            assert len(rest) == -(-(21 - num_taken) // num_ranks) * num_ranks, "only padding repeats samples"
            assert sorted({*taken, *rest}) == whole
