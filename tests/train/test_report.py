"""A run's report and its plot of learning rates show what the log contains, even after a kill."""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image, ImageColor

from shardio.train import Callback, EpochResult, StepRecord, TrainConfig, train
from shardio.train.callbacks import COLUMNS, LOOKS, RatePlot, make_curves, plot_rates, read_figures, write_report
from tests.files import read_files
from tests.processes import assert_passes_in_fresh_process
from tests.train.runs import PLAIN, make_linear, make_separable_batches

STEPS_PER_EPOCH = 5


class Page(HTMLParser):
    """The content of a page: texts by element, rows of the table, and pictures. All elements must be closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.best: list[int] = []
        self.pictures: list[bytes] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            source = dict(attrs)["src"] or ""
            assert source.startswith("data:image/png;base64,")
            self.pictures.append(base64.b64decode(source.partition(",")[2], validate=True))
        if tag not in ("img", "meta"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "tr":
            self.rows.append([])
            if ("class", "best") in attrs:
                self.best.append(len(self.rows) - 2)  # The first row is the heading.

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("td", "th"):
            self.rows[-1].append(self.texts[tag][-1])

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


class Listener(Callback):
    """A callback that keeps the records, and, if given a step, ends the run after it."""

    def __init__(self, dies_after: int | None = None) -> None:
        self.records: list[StepRecord] = []
        self.dies_after = dies_after

    def on_log(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_batch(self, batch: Any) -> None:
        if self.dies_after is not None and len(self.records) == self.dies_after:
            raise KeyboardInterrupt


def make_config(directory: Path | None, **options: Any) -> TrainConfig:
    settings = {"epochs": 3, "precision": "fp32", "device": "cpu", "lr": 0.05, "log_every": 1, **PLAIN, **options}
    return TrainConfig(directory=directory, **settings)


def run(config: TrainConfig, *callbacks: Callback, has_validation: bool = True) -> list[EpochResult]:
    validation = make_separable_batches(2, seed=1) if has_validation else None
    batches = make_separable_batches(STEPS_PER_EPOCH)
    return train(make_linear(), batches, config, val_loader=validation, callbacks=callbacks)


def run_until_killed(config: TrainConfig, after: int) -> list[StepRecord]:
    listener = Listener(dies_after=after)
    with pytest.raises(KeyboardInterrupt):
        run(config, listener)
    assert len(listener.records) == after
    return listener.records


def size_and_curves(png: bytes) -> tuple[tuple[int, int], set[str]]:
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    colors = {name: np.array(ImageColor.getrgb(look["color"]), dtype=np.uint8) for name, look in LOOKS.items()}
    found = {name for name, color in colors.items() if (pixels == color).all(axis=2).sum() >= 10}
    return (pixels.shape[1], pixels.shape[0]), found


def read_number(cell: str) -> float | None:
    if cell == "–":
        return None
    return float(cell[:-1]) / 100 if cell.endswith("%") else float(cell.replace(",", ""))


def change_log(directory: Path, name: str, values: list[Any]) -> None:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    for line, value in zip(epochs, values, strict=True):
        line[name] = value
    (directory / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.parametrize("has_validation", [True, False])
def test_the_page_and_the_curves_show_the_figures_that_callbacks_get(tmp_path: Path, has_validation: bool) -> None:
    config, listener = make_config(tmp_path), Listener()
    results = run(config, listener, has_validation=has_validation)
    page, png = Page(tmp_path / "report.html"), (tmp_path / "report.png").read_bytes()
    assert page.pictures == [png]
    assert size_and_curves(png) == ((1430, 880), {"steps", "epochs", *(["validation"] * has_validation)})
    heading, *rows = page.rows
    assert heading == list(COLUMNS)
    assert len(rows) == len(results) == 3
    for result, row in zip(results, rows, strict=True):
        shown = {name: read_number(cell) for name, cell in zip(heading, row, strict=True)}
        expected = {
            "epoch": result.epoch,
            "loss": pytest.approx(result.loss, abs=1e-4),
            "accuracy": pytest.approx(result.accuracy, abs=1e-3),
            "validation loss": pytest.approx(result.val_loss, abs=1e-4) if has_validation else None,
            "validation accuracy": pytest.approx(result.val_accuracy, abs=1e-3) if has_validation else None,
            "images/s": pytest.approx(result.num_images / result.train_s, abs=1),
            "waiting for data": pytest.approx(result.data_wait_s / result.train_s, abs=1e-3),
            "learning rate": pytest.approx(result.lr, rel=1e-2),
        }
        assert shown == expected
    losses = [result.judged_by for result in results]
    assert page.best == [losses.index(min(losses))]
    assert page.texts["h1"] == page.texts["title"] == [f"Training run {tmp_path.name}"]
    assert {"Complete epochs: 3. Steps: 15.", f"Settings: {config}"} <= set(page.texts["p"])

    def of_steps(name: str, factor: float = 1) -> list[tuple[int, float]]:
        return [(step, factor * getattr(record, name)) for step, record in enumerate(listener.records, 1)]

    def of_epochs(name: str, factor: float = 1) -> list[tuple[int, float]]:
        return [(STEPS_PER_EPOCH * (result.epoch + 1), factor * getattr(result, name)) for result in results]

    curves = make_curves(*read_figures(tmp_path))
    assert curves == {
        "loss": {
            "steps": of_steps("loss"),
            "epochs": of_epochs("loss"),
            "validation": of_epochs("val_loss") if has_validation else [],
        },
        "images/s": {"steps": of_steps("images_per_s"), "epochs": of_epochs("images_per_s")},
        "learning rate": {"steps": of_steps("lr"), "epochs": []},
        "time spent waiting for data [%]": {
            "steps": of_steps("data_wait_share", 100),
            "epochs": of_epochs("data_wait_share", 100),
        },
    }
    # The loss of an epoch is the mean over its samples, and all batches of this run have the same size.
    for (_, loss), five in zip(curves["loss"]["epochs"], np.split(np.array(curves["loss"]["steps"]), 3), strict=True):
        assert loss == pytest.approx(five[:, 1].mean(), rel=1e-5)


@pytest.mark.usefixtures("no_report", "no_matplotlib")
def test_the_page_marks_only_the_last_best_epoch(tmp_path: Path) -> None:
    run(make_config(tmp_path, epochs=4))
    change_log(tmp_path, "is_best", [True, False, True, False])
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert Page(tmp_path / "report.html").best == [2]


@pytest.mark.usefixtures("no_report")
def test_names_and_settings_are_escaped(tmp_path: Path) -> None:
    directory = tmp_path / "<script>alert('$x_{')<b> & \"q\" 图"
    config = make_config(directory, epochs=1)
    run(config)
    assert write_report(directory, config) is not None
    page = Page(directory / "report.html")
    assert page.texts["h1"] == page.texts["title"] == [f"Training run {directory.name}"]
    assert f"Settings: {config}" in page.texts["p"]
    assert not {"script", "b"} & set(page.texts)
    assert len(page.pictures) == 1


@pytest.mark.usefixtures("no_report")
def test_the_same_log_gives_the_same_report(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run(make_config(tmp_path))
    change_log(tmp_path, "val_loss", [float("nan"), float("inf"), 0.5])  # NaN in validation does not stop a run.
    seen, before = list[dict[str, bytes]](), read_files(tmp_path)
    for _ in range(2):
        write_report(tmp_path)
        seen.append(read_files(tmp_path))
    assert seen[0] == seen[1]
    assert seen[0].keys() == before.keys() | {"report.html", "report.png"}
    page = Page(tmp_path / "report.html")
    assert [row[3] for row in page.rows[1:]] == ["nan", "inf", "0.5000"]
    assert "validation" in size_and_curves(page.pictures[0])[1]
    request.getfixturevalue("no_matplotlib")
    write_report(tmp_path)
    plain = Page(tmp_path / "report.html")
    assert (plain.rows, plain.pictures) == (page.rows, [])
    assert "Plots need matplotlib: pip install matplotlib." in plain.texts["p"]
    assert not (tmp_path / "report.png").exists()


@pytest.mark.parametrize("after", [1, 7])
def test_the_report_of_a_killed_run_shows_what_was_logged(tmp_path: Path, after: int) -> None:
    records = run_until_killed(make_config(tmp_path), after)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"kind": "steps", "st')
    assert not (tmp_path / "report.html").exists()
    num_epochs = after // STEPS_PER_EPOCH
    assert write_report(tmp_path) == tmp_path / "report.html"
    page = Page(tmp_path / "report.html")
    assert len(page.rows) == (1 + num_epochs if num_epochs else 0)
    assert page.texts["p"][0] == f"Complete epochs: {num_epochs}. Steps: {after}."
    assert "steps" in size_and_curves(page.pictures[0])[1]
    assert make_curves(*read_figures(tmp_path))["loss"]["steps"] == [(one.step, one.loss) for one in records]


def test_an_empty_log_gives_an_empty_report_and_no_log_gives_none(tmp_path: Path) -> None:
    assert write_report(tmp_path) is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "log.jsonl").write_bytes(b'{"kind": "st')
    write_report(tmp_path)
    page = Page(tmp_path / "report.html")
    assert page.texts["p"] == ["Complete epochs: 0. Steps: 0.", "Nothing was logged."]
    assert (page.pictures, page.rows, (tmp_path / "report.png").exists()) == ([], [], False)


@pytest.mark.slow
def test_a_resumed_run_is_reported_completely_and_a_new_run_removes_the_report(tmp_path: Path) -> None:
    run(make_config(tmp_path, epochs=2))
    for _ in range(2):  # The second run has nothing left to train, and keeps the report.
        run(make_config(tmp_path, epochs=3))
        assert [row[0] for row in Page(tmp_path / "report.html").rows[1:]] == ["0", "1", "2"]
    run_until_killed(make_config(tmp_path, resume=False), 1)
    assert not list(tmp_path.glob("report.*"))


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_matplotlib_is_loaded_only_to_draw_and_without_pyplot(tmp_path: Path) -> None:
    run(make_config(tmp_path, epochs=1))
    assert_passes_in_fresh_process(_load_matplotlib_only_to_draw, tmp_path)


def _load_matplotlib_only_to_draw(directory: Path) -> None:
    for name in list(sys.modules):  # Unload the modules that the code below imports.
        if name.partition(".")[0] in ("matplotlib", "mpl_toolkits", "shardio"):
            del sys.modules[name]
    module = importlib.import_module("shardio.train.callbacks")
    assert module.write_report is not write_report
    assert "matplotlib" not in sys.modules
    module.write_report(directory)
    assert "matplotlib" in sys.modules
    assert "matplotlib.pyplot" not in sys.modules


def test_a_failed_picture_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(figure: Figure, file: Any, **options: Any) -> None:
        file.write(b"\x89PNG")
        raise OSError("no space left")

    run(make_config(tmp_path, epochs=1))
    before = read_files(tmp_path).keys()
    monkeypatch.setattr(Figure, "savefig", fail)
    draws: list[Callable[[], Any]] = [
        lambda: write_report(tmp_path),
        lambda: plot_rates(tmp_path / "lr.png", [(0, 1.0)], []),
    ]
    for draw in draws:
        with pytest.raises(OSError, match="no space left"):
            draw()
    # The old picture is removed, because it does not belong to the new page.
    assert read_files(tmp_path).keys() == before - {"report.png"}


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


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("killed_after", [5, 7])
def test_a_resumed_run_also_draws_the_earlier_rates_each_once(tmp_path: Path, killed_after: int) -> None:
    """The run resumes from the last complete epoch, while the log contains later steps."""
    config = make_config(tmp_path)
    run_until_killed(config, killed_after)
    plot, listener = RatePlot(tmp_path / "lr.png", config, STEPS_PER_EPOCH), Listener()
    run(config, plot, listener)
    assert listener.records[0].step == killed_after // STEPS_PER_EPOCH * STEPS_PER_EPOCH + 1
    assert plot.planned is not None
    np.testing.assert_allclose(plot.taken, plot.planned, rtol=1e-12)
    # A new run in the same directory does not draw the earlier rates.
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


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_the_plot_fails_before_the_training(tmp_path: Path) -> None:
    path = tmp_path / "lr.png"
    for draw in (
        lambda: RatePlot(path, make_config(None), STEPS_PER_EPOCH),
        lambda: plot_rates(path, None, [(0, 1.0)]),
    ):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            draw()
    assert not list(tmp_path.iterdir())
