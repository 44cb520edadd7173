"""The doctor finds why loaders that were made slow on purpose are slow; tools/doctor_campaign.py has more of these."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shardio
from shardio.device.tiles import TiledImages
from shardio.diagnosis import stored_forms
from shardio.diagnosis.profiling import SampleProfile, SampleStage, profile_samples
from shardio.diagnosis.rates import (
    LoaderEvidence,
    LoaderRun,
    count_samples,
    find_image_size,
    measure_other_programs,
    run_loader,
)
from shardio.diagnosis.remedies import find_remedies
from shardio.diagnosis.stored_forms import PRESENT, Form, FormCost, measure_forms
from shardio.libraries import import_torchvision
from shardio.loader import statistics
from shardio.transforms import RandomResizedCrop
from tests.diagnosis import patients
from tests.raising import assert_raises
from tests.sources import write_images

import_torchvision()
from torchvision import datasets, transforms  # type: ignore[import-untyped]  # noqa: E402


def examine(loader: Any, profile: SampleProfile | None = None, *, shm_free: int | None = None) -> LoaderEvidence:
    """Return evidence about a loader, with a made-up profile."""
    times: dict[str, Any] = {"run": run_loader(loader, 0.05, 2), "num_processors": 2, "trial_s": 0.05}
    return LoaderEvidence(loader=loader, profile=profile, stats=None, shm_free=shm_free, **times)


def profile_with(**shares: float) -> SampleProfile:
    """Return a profile in which transforms take the given shares of the time."""
    stages = {SampleStage("transform", name): share for name, share in shares.items()}
    return SampleProfile(num_samples=1, sample_s=1.0, cpu_s=1.0, stages=stages)


def load_tiled(folder: Path) -> Any:
    """Pack tiled JPEGs in a folder, and return a loader of them."""
    write_images(folder / "images", classes=2, per_class=8, width=300, height=200)
    shardio.pack(folder / "images", folder / "packed", jpeg="tile")
    return shardio.DataLoader(shardio.ShardDataset(folder / "packed", transform=RandomResizedCrop(64)), batch_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("make", patients.STEADY, ids=lambda make: make.__name__)
def test_the_cause_of_a_slow_loader_is_named(make: Any, tmp_path: Path) -> None:
    loader, step, cause = make(tmp_path)
    diagnosis = shardio.doctor(loader, step, seconds=0.3)
    assert not diagnosis.keeps_up
    assert any(cause in advice.cause for advice in diagnosis.advice), str(diagnosis)
    speedups = [advice.speedup or 0.0 for advice in diagnosis.advice]
    assert speedups == sorted(speedups, reverse=True)
    assert all(advice.cause in str(diagnosis) for advice in diagnosis.advice)


def test_without_a_step_the_doctor_measures_and_advises(tmp_path: Path) -> None:
    loader, *_ = patients.few_workers(tmp_path)
    diagnosis = shardio.doctor(loader, seconds=0.2)
    assert (diagnosis.step_rate, diagnosis.both, diagnosis.keeps_up) == (None, None, False)
    assert str(diagnosis).startswith("Without a training step (step=, --step), the doctor cannot say")
    assert diagnosis.profile is not None
    assert "Numbers.__getitem__ (patients.py)" in str(diagnosis)


def test_epochs_of_few_batches_have_a_rate_and_an_empty_one_is_an_error() -> None:
    for num_batches in (1, 2, 5):
        run = run_loader([torch.zeros(4, 2)] * num_batches, 0.01, 2)
        assert run.samples_per_s > 0
        assert run.epoch_s is not None
        assert 0 <= run.waiting <= 1
    batches = [{"x": torch.zeros(4, 2), "y": torch.arange(4)} for _ in range(50)]
    diagnosis = shardio.doctor(batches, step=len, seconds=0.05)
    assert (diagnosis.run.batch_size, diagnosis.profile, diagnosis.stats) == (4, None, None)
    assert_raises(ValueError, "the loader yields no batches", shardio.doctor, [])


def test_the_doctor_leaves_random_generators_and_loaders_as_they_were(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=3, per_class=8)
    shardio.pack(tmp_path / "images", tmp_path / "packed")
    dataset = shardio.ShardDataset(tmp_path / "packed", shuffle=True, fields=("label", "key"))
    loader = shardio.DataLoader(dataset, batch_size=4)
    loader.set_epoch(0)
    expected = [labels.tolist() for labels, _ in loader]
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    shardio.doctor(loader, seconds=0.05)
    assert torch.equal(torch.rand(3), drawn)
    loader.set_epoch(0)
    assert [labels.tolist() for labels, _ in loader] == expected


@pytest.mark.parametrize(
    ("batch", "number", "size"),
    [
        (torch.zeros(7, 2), 7, None),
        ({"a": {"b": torch.zeros(5, 1)}}, 5, None),
        (([1, 2, 3, 4], "text"), 4, None),
        (torch.tensor(1.0), 1, None),
        (object(), 1, None),
        (torch.zeros(2, 3, 5, 7), 2, (5, 7)),
        ([torch.zeros(2), {"image": torch.zeros(2, 5, 7, 3)}], 2, (5, 7)),
        ([torch.zeros(2, 3), ["a", "b"]], 2, None),
        (["x", "y"], 2, None),
    ],
)
def test_samples_of_a_batch_and_the_size_of_its_images_are_found(batch: Any, number: int, size: Any) -> None:
    assert (count_samples(batch), find_image_size(batch)) == (number, size)


def test_each_moment_of_a_sample_belongs_to_one_stage(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, per_class=20, width=320, height=240)
    steps = [transforms.RandomResizedCrop(64), transforms.ToTensor(), patients.LoopTransform()]
    folder = datasets.ImageFolder(str(tmp_path / "images"), transforms.Compose(steps))
    profile = profile_samples(lambda: (folder[index % 40] for index in range(41)), None, 20, 60)
    assert profile is not None
    assert profile.num_samples == len(profile.images) == 20
    shares = list(profile.stages.values())
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    names = {stage.name for stage in profile.stages if stage.kind == "transform"}
    assert names == {"RandomResizedCrop", "ToTensor"}  # Compose merely calls these two transforms.
    own = [stage.name for stage in profile.stages if stage.kind == "your code"]
    assert own == ["LoopTransform.__call__ (patients.py)"]
    assert profile.share("decoding") > 0 < profile.share("reading")
    assert {(image.format, image.size) for image in profile.images} == {("JPEG", (320, 240))}


def test_advice_to_drop_conversions_keeps_images_that_shardio_crops(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, per_class=8, width=96, height=64)
    steps = [transforms.RandomResizedCrop(48), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.2] * 3)]
    folder = datasets.ImageFolder(str(tmp_path / "images"), transforms.Compose(steps))
    tried = list[Any]()

    def record(_: LoaderEvidence, loader: Any) -> float:
        tried.append(loader)
        return 2.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoaderEvidence, "try_loader", record)
        advice = shardio.doctor(DataLoader(folder, batch_size=4), step=lambda _: None, seconds=0.01).advice
    replaced = next(loader for loader in tried if type(loader) is shardio.DataLoader)
    assert next(iter(replaced))[0].dtype == torch.uint8
    assert len(replaced.stats().recognized) == 1
    remedies = [each.remedy for each in advice if "ImageFolder" in each.cause]
    assert "with PILToTensor() in place of ToTensor and Normalize" in remedies[0]


def test_forms_that_need_no_decoding_are_advised_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = load_tiled(tmp_path)
    costs = {"present": FormCost(1e-3, 1e4), "ppm": FormCost(2e-4, 1e5), "memory": FormCost(3e-4, 1e4)}

    def measure(_: Any, size: tuple[int, int], forms: list[Form]) -> list[FormCost]:
        assert size == (64, 64)
        return [costs[form.settings.get("convert_to", "memory" if form.in_memory else "present")] for form in forms]

    monkeypatch.setattr(stored_forms, "measure_forms", measure)
    monkeypatch.setattr(stored_forms, "share_of_stage", lambda stats, stage: 0.8)

    def advise(free_disk: int, free_memory: int) -> list[str]:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_disk))
        monkeypatch.setattr(statistics, "count_free_memory", lambda: free_memory)
        found = shardio.doctor(loader, seconds=0.01).advice
        return [f"{each.speedup:.2f} {each.remedy}" for each in found if "decoding takes 80%" in each.cause]

    pixels, memory = advise(10**12, 10**12)
    assert pixels.startswith(
        f"2.78 shardio pack {tmp_path / 'packed'} {tmp_path / 'packed-ppm'} --convert-to ppm --min-side 73 (changes"
    )
    assert "this takes 1.526 MiB of space; at the expected rate, " in pixels  # 16 images of 100 kB
    assert memory.startswith("2.27 decoded_cache='1GiB' in the dataset")
    assert advise(10**6, 10**12) == [memory]
    (alone,) = advise(10**12, 10**5)
    assert alone.startswith("2.78 shardio pack")


def test_a_form_is_measured_on_the_images(tmp_path: Path) -> None:
    contents = list(write_images(tmp_path, classes=1, per_class=6, width=300, height=200).values())
    ppm = Form(settings={"convert_to": "ppm", "min_side": 73})
    costs = measure_forms(contents, (64, 64), [PRESENT, ppm, Form(settings={}, in_memory=True)])
    assert all(cost.cpu_s > 0 for cost in costs)
    assert costs[0].num_bytes == costs[2].num_bytes < costs[1].num_bytes
    assert costs[1].num_bytes > 3 * 73 * 73 * 300 / 200


def replace_runs(monkeypatch: pytest.MonkeyPatch, run: Callable[..., LoaderRun]) -> None:
    for module in ("rates", "doctor"):
        monkeypatch.setattr(sys.modules[f"shardio.diagnosis.{module}"], "run_loader", run)


def test_the_doctor_looks_through_a_prefetcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images", classes=2, per_class=8, width=300, height=200)
    dataset = shardio.ImageFolder(tmp_path / "images", transform=RandomResizedCrop(64))
    loader = shardio.DataLoader(dataset, batch_size=4, sampler=shardio.EpochSampler(dataset))

    def run(each: Any, *_: Any) -> LoaderRun:
        rate, cpu_s = (200.0, 1e-4) if each is loader else (100.0, 9e-4)
        return replace(run_loader(each, 0.01, 1), samples_per_s=rate, own_cpu_s=cpu_s)

    replace_runs(monkeypatch, run)
    diagnosis = shardio.doctor(shardio.DevicePrefetcher(loader, "cpu"), seconds=0.01)
    assert diagnosis.stats is not None
    assert diagnosis.profile is not None
    cause = "DevicePrefetcher prepares batches on the CPU: 800 µs per sample in this process"
    assert diagnosis.advice[0].cause == cause


def test_where_a_gpu_waits_the_doctor_measures_workers_that_only_collect_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, kinds = load_tiled(tmp_path), list[type]()

    def run(each: Any, *_: Any) -> LoaderRun:
        measured = run_loader(each, 0.01, 1)
        kinds.append(type(measured.batches[0][0]))
        return replace(measured, samples_per_s=300.0 if kinds[-1] is TiledImages else 100.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    replace_runs(monkeypatch, run)
    (advice,) = (each for each in shardio.doctor(loader, seconds=0.01).advice if "decode='device'" in each.remedy)
    assert (advice.speedup, advice.is_measured) == (3.0, True)
    assert {torch.Tensor, TiledImages} == set(kinds)
    prefetcher = shardio.DevicePrefetcher(loader, "cpu", decode="device")
    assert not any("decode='device'" in each.remedy for each in shardio.doctor(prefetcher, seconds=0.01).advice)


@pytest.mark.parametrize(("share", "num_advice"), [(0.5, 1), (0.05, 0)])
def test_a_torchvision_pipeline_on_tensors_of_whole_images_is_advised_to_convert(
    share: float, num_advice: int, tmp_path: Path
) -> None:
    write_images(tmp_path / "images", classes=2, per_class=8, width=96, height=64)
    steps = [transforms.RandomResizedCrop(48), transforms.RandomHorizontalFlip()]
    to_float = transforms.ConvertImageDtype(torch.float32)

    def load(*more: Any) -> Any:
        dataset = shardio.ImageFolder(tmp_path / "images", transform=transforms.Compose([*steps, *more]))
        return shardio.DataLoader(dataset, batch_size=4)

    def advise(*more: Any) -> list[Any]:
        found = find_remedies(examine(load(*more), profile_with(RandomResizedCrop=share, Normalize=1 - share)))
        return [each for each in found if "tensors of whole images" in each.cause]

    advice = advise(to_float)
    assert len(advice) == num_advice
    for each in advice:
        assert each.cause.startswith("torchvision's transforms (RandomResizedCrop, RandomHorizontalFlip) work on ")
        assert each.remedy.startswith("insert PILToTensor() after RandomHorizontalFlip")
        assert each.speedup == 2
    assert next(iter(load(transforms.PILToTensor(), to_float)))[0].dtype == torch.float32
    assert not advise(transforms.PILToTensor(), to_float)


def test_opencv_is_observed_only_while_samples_are_profiled(tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=1, per_class=8, width=96, height=64)
    files, before = patients.Files(tmp_path / "images"), cv2.imread
    profile = profile_samples(lambda: (files[index % 8] for index in range(9)), None, 4, 60)
    assert profile is not None
    assert [(image.format, image.size) for image in profile.images] == [("JPEG", (96, 64))] * 4
    assert all(Path(image.path).is_file() for image in profile.images)
    assert cv2.imread is before
    assert profile_samples(lambda: iter(()), None, 10, 1.0) is None
    empty = SampleProfile(num_samples=1, sample_s=1.0, cpu_s=0.4, stages={})
    assert (empty.share("decoding"), empty.waits) == (0, True)


@pytest.mark.parametrize(
    ("num_processors", "percents", "share"), [(2, [50, 10], 0.3), (2, [100, 100], 1), (2, [90, 90, 10, 10], 0)]
)
def test_other_programs_count_where_they_take_the_processors_that_this_one_may_use(
    num_processors: int, percents: list[float], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: list(range(len(percents))))
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds, percpu: percents)
    assert measure_other_programs(0.01, num_processors) == pytest.approx(share)


def test_batches_that_exceed_the_shared_memory_are_named() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(64, 1000)), batch_size=8, num_workers=2)
    causes = [advice.cause for advice in find_remedies(examine(loader, shm_free=100_000))]
    assert "/dev/shm is too small: 4 batches need 125 KiB, and 97.66 KiB is free" in causes


def test_a_stage_that_takes_all_the_time_has_a_finite_estimate() -> None:
    found = find_remedies(examine(DataLoader(TensorDataset(torch.zeros(64, 4)), 8), profile_with(ToTensor=1.0)))
    (advice,) = (each for each in found if each.cause.startswith("ToTensor on the CPU"))
    assert advice.speedup == 100
