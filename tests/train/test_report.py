"""A run's report and its plot of learning rates show what the log contains, even after a kill."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import pytest
from PIL import Image, ImageColor

from shardio.train import Callback, EpochResult, StepRecord, TrainConfig, train
from shardio.train.callbacks import read_figures
from shardio.train.report import COLUMNS, PLANNED, TAKEN, RatePlot, make_curves, plot_rates, write_report
from tests.files import read_files
from tests.pages import Page
from tests.processes import assert_passes_in_fresh_process
from tests.raising import assert_raises
from tests.train.runs import PLAIN, Collect, StopAfter, StopError, make_linear, make_separable_batches

STEPS_PER_EPOCH = 5


def make_config(directory: Path | None, **options: Any) -> TrainConfig:
    settings = {"epochs": 3, "precision": "fp32", "device": "cpu", "lr": 0.05, "log_every": 1, **PLAIN, **options}
    return TrainConfig(directory=directory, **settings)


def run(config: TrainConfig, *callbacks: Callback, has_validation: bool = True) -> list[EpochResult]:
    validation = make_separable_batches(2, seed=1) if has_validation else None
    batches = make_separable_batches(STEPS_PER_EPOCH)
    return train(make_linear(), batches, config, val_loader=validation, callbacks=callbacks)


def run_until_killed(config: TrainConfig, after: int) -> list[StepRecord]:
    """Return the records of a run that is killed in the batch after record number ``after``."""
    stop, collect = StopAfter(after), Collect()
    with pytest.raises(StopError):
        run(config, collect, stop)
    assert len(collect.records) == after
    return collect.records


def size_and_curves(png: bytes) -> tuple[tuple[int, int], set[str]]:
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    colors = {"planned": ImageColor.getrgb(PLANNED), "taken": ImageColor.getrgb(TAKEN)}
    found = {name for name, color in colors.items() if (pixels == color).all(axis=2).sum() >= 10}
    return (pixels.shape[1], pixels.shape[0]), found


def read_page(directory: Path) -> Page:
    return Page((directory / "report.html").read_bytes())


def epochs_of(page: Page) -> list[list[str]]:
    """Return the rows of the table of epochs."""
    return page.rows[page.rows.index(["epoch", *COLUMNS]) + 1 :]


def best_of(page: Page) -> list[int]:
    return [epoch for epoch, row in enumerate(epochs_of(page)) if row[0].startswith("★")]


def places_of(plot: Element, curve: int) -> list[tuple[float, float]]:
    """Return the points of a curve in the coordinates of its plot."""
    (line,) = [path.attrib["d"] for path in plot.findall(f"g[@class='curve-{curve}']/path")]
    return [(float(x), float(y)) for x, y in (point.split(",") for point in line.partition("L")[2].split())]


def assert_plots_show(page: Page, curves: dict[str, dict[str, Any]]) -> None:
    """Check that each plot's curves are the given curves, scaled and shifted so that lower values are further down."""
    assert list(page.plots) == [title for title, named in curves.items() if any(named.values())]
    for title, plot in page.plots.items():
        drawn = {number: points for number, points in enumerate(curves[title or ""].values()) if points}
        assert len(plot.findall("g")) == len(drawn)
        points = np.concatenate([np.array(points) for points in drawn.values()])
        places = np.concatenate([places_of(plot, number) for number in drawn])
        for axis, sign in ((0, 1), (1, -1)):
            known = np.stack([points[:, axis], np.ones(len(points))], axis=1)
            (scale, shift), *_ = np.linalg.lstsq(known, places[:, axis], rcond=None)
            np.testing.assert_allclose(known @ [scale, shift], places[:, axis], atol=0.11)
            assert scale * sign >= 0 or len(points) == 1


def read_number(cell: str) -> float | None:
    if cell == "–":
        return None
    return float(cell[:-1]) / 100 if cell.endswith("%") else float(cell.replace(",", "").removeprefix("★ "))


def change_log(directory: Path, name: str, values: list[Any], kind: str = "epoch") -> None:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    changed = [line for line in lines if line["kind"] == kind]
    for line, value in zip(changed, values, strict=True):
        line[name] = value
    (directory / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("has_validation", [True, False])
def test_the_page_shows_the_figures_that_callbacks_get(tmp_path: Path, has_validation: bool) -> None:
    config, collect = make_config(tmp_path), Collect()
    results = run(config, collect, has_validation=has_validation)
    page = read_page(tmp_path)
    rows = epochs_of(page)
    assert len(rows) == len(results) == 3
    for result, row in zip(results, rows, strict=True):
        shown = {name: read_number(cell) for name, cell in zip(["epoch", *COLUMNS], row, strict=True)}
        assert shown == {
            "epoch": result.epoch,
            "loss": pytest.approx(result.loss, abs=1e-4),
            "accuracy": pytest.approx(result.accuracy, abs=1e-3),
            "val loss": pytest.approx(result.val_loss, abs=1e-4) if has_validation else None,
            "val accuracy": pytest.approx(result.val_accuracy, abs=1e-3) if has_validation else None,
            "images/s": pytest.approx(result.num_images / result.train_s, abs=1),
            "waiting for data": pytest.approx(result.data_wait_s / result.train_s, abs=1e-3),
        }
    losses = [result.judged_by for result in results]
    best = losses.index(min(losses))
    assert best_of(page) == [best]
    assert page.texts["h1"] == [f"Training run {tmp_path.name}"]
    kind = "validation loss" if has_validation else "loss"
    summary = f"Completed 3 of 3 epochs and 15 steps. The {kind} was lowest after epoch {best}: {min(losses):.4f}. "
    assert page.texts["p"][0].startswith(summary)
    accuracy = results[best].val_accuracy if has_validation else results[best].accuracy
    rate = sum(result.num_images for result in results) / sum(result.train_s for result in results)
    assert page.texts["b"][:2] == [f"{accuracy:.1%}", f"{rate:,.0f}"]

    def of_steps(name: str, factor: float = 1) -> list[tuple[int, float]]:
        return [(step, factor * getattr(record, name)) for step, record in enumerate(collect.records, 1)]

    def of_epochs(name: str, factor: float = 1) -> list[tuple[int, float]]:
        values = [(STEPS_PER_EPOCH * (result.epoch + 1), getattr(result, name)) for result in results]
        return [(step, factor * value) for step, value in values if value is not None]

    curves = make_curves(*read_figures(tmp_path))
    waiting = {"steps": of_steps("data_wait_share", 100), "epochs": of_epochs("data_wait_share", 100)}
    accuracies = {"epochs": of_epochs("accuracy", 100), "validation": of_epochs("val_accuracy", 100)}
    assert curves == {
        "Loss": {"steps": of_steps("loss"), "epochs": of_epochs("loss"), "validation": of_epochs("val_loss")},
        "Accuracy (%)": {"steps": [], **accuracies},
        "Learning rate": {"steps": of_steps("lr")},
        "Images per second": {"steps": of_steps("images_per_s"), "epochs": of_epochs("images_per_s")},
        "Time waiting for data (%)": waiting,
    }
    assert bool(curves["Loss"]["validation"]) == has_validation
    assert_plots_show(page, curves)
    # The loss of an epoch is the mean over its samples, and all batches of this run have the same size.
    for (_, loss), five in zip(curves["Loss"]["epochs"], np.split(np.array(curves["Loss"]["steps"]), 3), strict=True):
        assert loss == pytest.approx(five[:, 1].mean(), rel=1e-5)


def test_the_page_says_whether_training_waited_for_data_or_skipped_steps_and_marks_the_last_best_epoch(
    tmp_path: Path,
) -> None:
    run(make_config(tmp_path))
    change_log(tmp_path, "is_best", [True, True, False])
    for share, words in ((0.05, "Data loading kept up"), (0.5, "Training often waited for data")):
        change_log(tmp_path, "data_wait_s", [share] * 3)
        change_log(tmp_path, "train_s", [1.0] * 3)
        assert write_report(tmp_path) == tmp_path / "report.html"
        page = read_page(tmp_path)
        assert best_of(page) == [1]
        assert words in page.texts["p"][0]
        assert f"{share:.1%}" in page.texts["b"]
    change_log(tmp_path, "num_skipped", [1] * 15, kind="steps")
    write_report(tmp_path)
    assert " Skipped 1 step because " in read_page(tmp_path).texts["p"][0]


def test_settings_that_differ_from_the_default_come_first(tmp_path: Path) -> None:
    config = make_config(tmp_path, epochs=1, lr=2.5e-4, clip_norm=1.0, data={"image_size": 32, "recipe": ""})
    run(config)
    page = read_page(tmp_path)
    settings = {row[0]: row[1] for row in page.rows if len(row) == 2}
    names = list(settings)
    fields = {each.name: each.default for each in dataclasses.fields(config) if each.name != "data"}
    changed = [name for name, default in fields.items() if getattr(config, name) != default]
    assert names[1 : len(changed) + 3] == [*changed, "image_size", "recipe"]
    assert set(names) == {"setting", *fields, "image_size", "recipe"}
    assert (settings["lr"], settings["clip_norm"], settings["image_size"]) == ("2.5e-4", "1", "32")
    assert (settings["mean"], settings["resume"], settings["patience"]) == ("0, 0, 0", "yes", "not set")
    assert page.texts["summary"] == [f"{len(fields) - len(changed)} settings with default values"]


def test_the_same_log_gives_the_same_report(tmp_path: Path) -> None:
    run(make_config(tmp_path))
    change_log(tmp_path, "val_loss", [float("nan"), float("inf"), 0.5])  # NaN in validation does not stop a run.
    write_report(tmp_path)
    seen = read_files(tmp_path)
    write_report(tmp_path)
    assert read_files(tmp_path) == seen
    page = read_page(tmp_path)
    assert [row[3] for row in epochs_of(page)] == ["nan", "inf", "0.5000"]
    assert len(places_of(page.plots["Loss"], 2)) == 1


@pytest.mark.parametrize(("after", "done"), [(1, "0 epochs and 1 step"), (7, "1 epoch and 7 steps")])
def test_the_report_of_a_killed_run_shows_what_was_logged(tmp_path: Path, after: int, done: str) -> None:
    records = run_until_killed(make_config(tmp_path), after)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"kind": "steps", "st')
    assert not (tmp_path / "report.html").exists()
    assert write_report(tmp_path) == tmp_path / "report.html"
    page = read_page(tmp_path)
    assert len(page.rows) == (2 if after == 7 else 0)
    assert page.texts["p"][0].startswith(f"Completed {done}.")
    curves = make_curves(*read_figures(tmp_path))
    assert curves["Loss"]["steps"] == [(one.step, one.loss) for one in records]
    assert_plots_show(page, curves)


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    run(make_config(tmp_path, epochs=1))
    record = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    lines = [json.dumps({**record, "step": step, "loss": 1 / step}) for step in range(1, 20_001)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    write_report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 100_000
    places = places_of(read_page(tmp_path).plots["Loss"], 0)
    assert places == sorted(places, key=lambda place: (place[0], place[1]))


def test_an_empty_log_gives_an_empty_report_and_no_log_gives_none(tmp_path: Path) -> None:
    assert write_report(tmp_path) is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "log.jsonl").write_bytes(b'{"kind": "st')
    write_report(tmp_path)
    page = read_page(tmp_path)
    assert page.texts["p"] == ["Nothing was logged."]
    assert (page.plots, page.rows) == ({}, [])


@pytest.mark.slow
def test_a_resumed_run_is_reported_completely_and_a_new_run_removes_the_report(tmp_path: Path) -> None:
    run(make_config(tmp_path, epochs=2))
    for _ in range(2):  # The second run has nothing left to train, and keeps the report.
        run(make_config(tmp_path, epochs=3))
        assert [row[0].removeprefix("★ ") for row in epochs_of(read_page(tmp_path))] == ["0", "1", "2"]
    run_until_killed(make_config(tmp_path, resume=False), 1)
    assert not list(tmp_path.glob("report.*"))


def test_reports_need_no_matplotlib_and_plots_no_pyplot(tmp_path: Path) -> None:
    run(make_config(tmp_path, epochs=1))
    assert_passes_in_fresh_process(_load_matplotlib_only_to_plot_rates, tmp_path)


def _load_matplotlib_only_to_plot_rates(directory: Path) -> None:
    for name in list(sys.modules):  # Unload the modules that the code below imports.
        if name.partition(".")[0] in ("matplotlib", "mpl_toolkits", "shardio"):
            del sys.modules[name]
    module = importlib.import_module("shardio.train.report")
    assert module.write_report is not write_report
    module.write_report(directory)
    assert "matplotlib" not in sys.modules
    module.plot_rates(directory / "lr.png", None, [(0, 1.0)])
    assert "matplotlib" in sys.modules
    assert "matplotlib.pyplot" not in sys.modules


# Rates.


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "cyclic", "step", "constant", "plateau"])
def test_actual_rates_equal_planned_ones(tmp_path: Path, schedule: str) -> None:
    config, is_planned = make_config(None, schedule=schedule), schedule != "plateau"
    plot = RatePlot(tmp_path / "pictures" / "lr.png", config, STEPS_PER_EPOCH)
    run(config, plot)
    assert [step for step, _ in plot.taken] == list(range(15))
    assert (plot.planned is not None) == is_planned
    if plot.planned is not None:
        np.testing.assert_allclose(plot.taken, plot.planned, rtol=1e-12)
    assert size_and_curves(plot.path.read_bytes()) == ((1100, 550), {"taken", *(["planned"] * is_planned)})


@pytest.mark.parametrize("killed_after", [5, 7])
def test_a_resumed_run_also_draws_the_earlier_rates_each_once(tmp_path: Path, killed_after: int) -> None:
    """The run resumes from the last complete epoch, although the log contains later steps."""
    config, collect = make_config(tmp_path), Collect()
    run_until_killed(config, killed_after)
    plot = RatePlot(tmp_path / "lr.png", config, STEPS_PER_EPOCH)
    run(config, plot, collect)
    assert collect.records[0].step == killed_after // STEPS_PER_EPOCH * STEPS_PER_EPOCH + 1
    assert plot.planned is not None
    np.testing.assert_allclose(plot.taken, plot.planned, rtol=1e-12)
    # A new run in the same directory does not plot the earlier rates.
    fresh = make_config(tmp_path, resume=False, epochs=1)
    plot = RatePlot(tmp_path / "lr.png", fresh, STEPS_PER_EPOCH)
    run(fresh, plot)
    assert [step for step, _ in plot.taken] == list(range(5))


def test_only_rank_0_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, expected in ((1, []), (0, ["lr.png"])):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        plot = RatePlot(tmp_path / "lr.png", make_config(None), STEPS_PER_EPOCH)
        plot.on_start(0, 0)
        plot.on_end([])
        assert [path.name for path in tmp_path.iterdir()] == expected


def test_without_matplotlib_the_plot_fails_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw, *arguments in ((RatePlot, make_config(None), STEPS_PER_EPOCH), (plot_rates, None, [(0, 1.0)])):
        assert_raises(ImportError, "pip install matplotlib", draw, tmp_path / "lr.png", *arguments)
    assert not list(tmp_path.iterdir())
