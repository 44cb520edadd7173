"""What the loader says of where the time went."""

from __future__ import annotations

import json
import re
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset
from shardio.cli.main import app
from shardio.loader import hosts
from shardio.transforms import RandomResizedCrop


def identity(image: Any) -> Any:
    return image


@pytest.mark.parametrize("num_workers", [0, 2])
def test_times_and_counts_are_those_of_the_last_epoch(packed: Path, num_workers: int) -> None:
    dataset = ShardDataset(packed, transform=RandomResizedCrop(48))
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0)
    before = loader.stats()
    assert (before.num_batches, before.num_samples, before.first_batch_s) == (0, 0, None)
    for _ in range(2):
        list(loader)
        stats = loader.stats()
        assert (stats.num_batches, stats.num_samples, stats.num_workers) == (6, 21, num_workers)
        assert stats.first_batch_s is not None
        assert 0 < stats.first_batch_s <= stats.elapsed_s
        assert 0 < stats.wait_for_data_s <= stats.elapsed_s
        assert min(stats.read_s, stats.transform_s, stats.decode_s) > 0
        # Stages are parts of the threads' time, which do not work while nobody iterates.
        assert stats.read_s + stats.transform_s + stats.decode_s <= max(num_workers, 1) * stats.elapsed_s
        assert (stats.wait_for_slot_s > 0) == (num_workers > 0)
        assert stats.samples_per_s == pytest.approx(21 / stats.elapsed_s)
    list(islice(loader, 2))
    assert loader.stats().num_samples == 8


@pytest.mark.parametrize("num_workers", [1, 3])
def test_hosts_that_stay_do_not_wait_before_an_epoch_begins(packed: Path, num_workers: int) -> None:
    dataset = ShardDataset(packed, transform=RandomResizedCrop(48))
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, persistent_workers=True)
    for _ in range(3):
        list(loader)
        stats = loader.stats()
        assert 0 < stats.wait_for_slot_s <= num_workers * stats.elapsed_s
        time.sleep(1)  # Longer than an epoch takes: this is what must not be counted.


def test_the_time_that_hosts_take_to_be_started_counts(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = hosts._start_process

    def start_slowly(*arguments: Any) -> Any:
        time.sleep(0.5)  # This is what must be counted.
        return start(*arguments)

    monkeypatch.setattr(hosts, "_start_process", start_slowly)
    loader = DataLoader(ShardDataset(packed, transform=RandomResizedCrop(48)), batch_size=4, num_workers=1)
    list(loader)
    stats = loader.stats()
    assert stats.first_batch_s is not None
    assert 0.5 <= stats.first_batch_s <= stats.elapsed_s


def test_torchs_workers_have_no_statistics(packed: Path) -> None:
    with pytest.raises(TypeError, match="no statistics of torch's workers"):
        DataLoader(ShardDataset(packed, transform=identity), batch_size=4).stats()


def bench(*arguments: object) -> str:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["bench", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_bench_says_how_fast_and_what_holds_it_back(packed: Path) -> None:
    text = bench(packed, "--batch-size", 4, "--image-size", 48, "--num-workers", 1)
    assert "epoch 0: 21 samples in 6 batches" in text
    assert re.search("(is|are) the bottleneck", text), "whichever stage that is"
    assert "decoding, cropping, resizing" in text


def test_bench_takes_class_folders_and_single_fields(packed: Path, images: Path) -> None:
    lines = bench(images, "--num-workers", 0, "--epochs", 2, "--json").splitlines()
    assert [json.loads(line)["num_samples"] for line in lines] == [21, 21]
    assert json.loads(bench(packed, "--fields", "cls,key", "--json"))["num_batches"] == 1


def test_bench_refuses_what_is_not_there(packed: Path, tmp_path: Path) -> None:
    found = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["bench", str(packed), "--fields", "txt"])
    assert (found.exit_code, "has the field 'txt'" in found.output) == (2, True)
    assert CliRunner().invoke(app, ["bench", str(tmp_path / "nothing")]).exit_code == 1


def test_an_image_folder_goes_the_fast_way(images: Path) -> None:
    folder = ImageFolder(images, transform=RandomResizedCrop(48))
    loader = DataLoader(folder, batch_size=4, sampler=EpochSampler(folder), num_workers=1)
    list(loader)
    assert loader.stats().num_samples == 21
