from __future__ import annotations

import base64
import importlib
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.train.callbacks import COLUMNS, make_curves, plot_rates, read_figures, write_report
from tests.processes import assert_passes_in_fresh_process
from tests.train.report_runs import (
    STEPS_PER_EPOCH,
    Listener,
    hide_matplotlib,
    make_report_config,
    size_and_curves,
    train_reported,
    train_until_killed,
)


class Page(HTMLParser):
    """The content of a page: texts by element, rows of the table, pictures. All elements must be closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.best: list[str] = []
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
                self.best.append(str(len(self.rows) - 2))  # The first row is the heading.

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("td", "th"):
            self.rows[-1].append(self.texts[tag][-1])

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("has_validation", [True, False])
def test_the_curves_show_the_figures_that_callbacks_get(tmp_path: Path, has_validation: bool) -> None:
    listener = Listener()
    results = train_reported(make_report_config(tmp_path), listener, has_validation=has_validation)
    records = listener.records
    steps, ends = list(range(1, 3 * STEPS_PER_EPOCH + 1)), [5, 10, 15]
    curves = make_curves(*read_figures(tmp_path))
    assert curves == {
        "loss": {
            "steps": list(zip(steps, [record.loss for record in records], strict=True)),
            "epochs": list(zip(ends, [result.loss for result in results], strict=True)),
            "validation": list(zip(ends, [result.val_loss for result in results], strict=True)) * has_validation,
        },
        "images/s": {
            "steps": list(zip(steps, [record.images_per_s for record in records], strict=True)),
            "epochs": list(zip(ends, [result.images_per_s for result in results], strict=True)),
        },
        "learning rate": {
            "steps": list(zip(steps, [record.lr for record in records], strict=True)),
            "epochs": [],
        },
        "time spent waiting for data [%]": {
            "steps": list(zip(steps, [100 * record.data_wait_share for record in records], strict=True)),
            "epochs": list(zip(ends, [100 * result.data_wait_share for result in results], strict=True)),
        },
    }
    # The loss of an epoch is the mean over its samples, and all batches have the same size here.
    for (_, loss), five in zip(curves["loss"]["epochs"], np.split(np.array(curves["loss"]["steps"]), 3), strict=True):
        assert loss == pytest.approx(five[:, 1].mean(), rel=1e-5)


@pytest.mark.parametrize("has_validation", [True, False])
def test_the_page_shows_all_epochs_and_the_picture(tmp_path: Path, has_validation: bool) -> None:
    config = make_report_config(tmp_path)
    results = train_reported(config, has_validation=has_validation)
    page, png = Page(tmp_path / "report.html"), (tmp_path / "report.png").read_bytes()
    assert page.pictures == [png]
    assert size_and_curves(png) == (
        (1430, 880),
        {"steps", "epochs"} | ({"validation"} if has_validation else set()),
    )
    heading, *rows = page.rows
    assert heading == list(COLUMNS)
    assert len(rows) == len(results) == 3
    for result, row in zip(results, rows, strict=True):
        cells = dict(zip(heading, row, strict=True))
        assert int(cells["epoch"]) == result.epoch
        assert float(cells["loss"]) == pytest.approx(result.loss, abs=1e-4)
        assert _percent(cells["accuracy"]) == pytest.approx(result.accuracy, abs=1e-3)
        assert float(cells["images/s"].replace(",", "")) == pytest.approx(result.num_images / result.train_s, abs=1)
        assert _percent(cells["waiting for data"]) == pytest.approx(result.data_wait_s / result.train_s, abs=1e-3)
        assert float(cells["learning rate"]) == pytest.approx(result.lr, rel=1e-2)
        if has_validation:
            assert float(cells["validation loss"]) == pytest.approx(result.val_loss, abs=1e-4)
            assert _percent(cells["validation accuracy"]) == pytest.approx(result.val_accuracy, abs=1e-3)
        else:
            assert cells["validation loss"] == cells["validation accuracy"] == "–"
    losses = [result.judged_by for result in results]
    assert page.best == [str(losses.index(min(losses)))]
    assert page.texts["h1"] == page.texts["title"] == [f"Training run {tmp_path.name}"]
    assert "Complete epochs: 3. Steps: 15." in page.texts["p"]
    assert f"Settings: {config}" in page.texts["p"]


def _percent(cell: str) -> float:
    assert cell.endswith("%")
    return float(cell[:-1]) / 100


@pytest.mark.usefixtures("no_report")
def test_the_page_marks_only_the_last_best_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log marks each epoch that was the best so far."""
    hide_matplotlib(monkeypatch)  # Drawing takes longest.
    train_reported(make_report_config(tmp_path, epochs=4))
    log = tmp_path / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "epoch":
            line["is_best"] = line["epoch"] in (0, 2)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert Page(tmp_path / "report.html").best == ["2"]


@pytest.mark.usefixtures("no_report")
def test_names_and_settings_are_escaped(tmp_path: Path) -> None:
    directory = tmp_path / "<script>alert('$x_{')<b> & \"q\" 图"
    config = make_report_config(directory, epochs=1)
    train_reported(config)
    assert write_report(directory, config) is not None
    page = Page(directory / "report.html")
    assert page.texts["h1"] == page.texts["title"] == [f"Training run {directory.name}"]
    assert f"Settings: {config}" in page.texts["p"]
    assert not {"script", "b"} & set(page.texts)
    assert len(page.pictures) == 1


@pytest.mark.usefixtures("no_report")
def test_the_same_log_gives_the_same_report_and_no_other_files(tmp_path: Path) -> None:
    train_reported(make_report_config(tmp_path))
    before = {path.name for path in tmp_path.iterdir()}
    seen = set()
    for _ in range(2):
        write_report(tmp_path)
        seen.add(((tmp_path / "report.html").read_bytes(), (tmp_path / "report.png").read_bytes()))
    assert len(seen) == 1
    assert {path.name for path in tmp_path.iterdir()} == before | {"report.html", "report.png"}


@pytest.mark.parametrize("after", [1, 5, 12])
def test_the_report_of_a_killed_run_shows_what_was_logged(tmp_path: Path, after: int) -> None:
    records = train_until_killed(make_report_config(tmp_path), after)
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
    assert not page.pictures
    assert not page.rows
    assert not (tmp_path / "report.png").exists()


@pytest.mark.usefixtures("no_report")
def test_losses_that_are_not_finite_are_shown(tmp_path: Path) -> None:
    """Those of validation do not stop a run."""
    train_reported(make_report_config(tmp_path))
    log = tmp_path / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    for line, value in zip(epochs, [float("nan"), float("inf"), 0.5], strict=True):
        line["val_loss"] = value
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    page = Page(tmp_path / "report.html")
    assert [row[3] for row in page.rows[1:]] == ["nan", "inf", "0.5000"]
    assert "validation" in size_and_curves(page.pictures[0])[1]


def test_a_resumed_run_is_reported_completely_and_a_new_run_removes_the_report(tmp_path: Path) -> None:
    config = make_report_config(tmp_path, epochs=2)
    train_reported(config)
    longer = make_report_config(tmp_path, epochs=3)
    train_reported(longer)
    assert [row[0] for row in Page(tmp_path / "report.html").rows[1:]] == ["0", "1", "2"]
    # Nothing remains to be done, and the report stays the same.
    train_reported(longer)
    assert len(Page(tmp_path / "report.html").rows) == 4
    train_until_killed(make_report_config(tmp_path, resume=False), 1)
    assert not list(tmp_path.glob("report.*"))


@pytest.mark.usefixtures("no_report")
def test_without_matplotlib_the_page_has_the_table_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_reported(make_report_config(tmp_path))
    write_report(tmp_path)
    rows = Page(tmp_path / "report.html").rows
    hide_matplotlib(monkeypatch)
    write_report(tmp_path)
    page = Page(tmp_path / "report.html")
    assert page.rows == rows
    assert not page.pictures
    assert "Plots need matplotlib: pip install matplotlib." in page.texts["p"]
    assert not (tmp_path / "report.png").exists()


@pytest.mark.usefixtures("no_report")
def test_matplotlib_is_loaded_only_to_draw_and_without_pyplot(tmp_path: Path) -> None:
    train_reported(make_report_config(tmp_path, epochs=1))
    assert_passes_in_fresh_process(_load_matplotlib_only_to_draw, tmp_path)


def _load_matplotlib_only_to_draw(directory: Path) -> None:
    for name in list(sys.modules):  # They are imported again here.
        if name.partition(".")[0] in ("matplotlib", "mpl_toolkits", "shardio"):
            del sys.modules[name]
    module = importlib.import_module("shardio.train.callbacks")
    assert module.write_report is not write_report
    assert "matplotlib" not in sys.modules
    module.write_report(directory)
    assert "matplotlib" in sys.modules
    assert "matplotlib.pyplot" not in sys.modules


def test_a_failed_picture_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def fail(figure: Figure, file: Any, **options: Any) -> None:
        file.write(b"\x89PNG")
        raise OSError("no space left")

    train_reported(make_report_config(tmp_path, epochs=1))
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="no space left"):
        write_report(tmp_path)
    with pytest.raises(OSError, match="no space left"):
        plot_rates(tmp_path / "lr.png", [(0, 1.0)], [])
    assert {path.name for path in tmp_path.iterdir()} == before - {
        "report.png"
    }  # The old picture would belong to another page.
