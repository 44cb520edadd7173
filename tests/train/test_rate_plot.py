from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from shardio.train.callbacks import RatePlot, plot_rates
from tests.train.report_runs import (
    STEPS_PER_EPOCH,
    Listener,
    hide_matplotlib,
    make_report_config,
    size_and_curves,
    train_reported,
    train_until_killed,
)


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "cyclic", "step", "constant"])
def test_actual_rates_equal_planned_ones(tmp_path: Path, schedule: str) -> None:
    config = make_report_config(None, schedule=schedule)
    plot = RatePlot(tmp_path / "pictures" / "lr.png", config, STEPS_PER_EPOCH)
    train_reported(config, plot)
    assert plot.planned is not None
    assert [step for step, _ in plot.taken] == list(range(15))
    np.testing.assert_allclose(plot.taken, plot.planned, rtol=1e-12)
    assert size_and_curves(plot.path.read_bytes()) == ((1100, 550), {"planned", "taken"})


def test_plateau_has_no_plan_and_only_its_actual_rates_are_drawn(tmp_path: Path) -> None:
    config = make_report_config(None, schedule="plateau")
    plot = RatePlot(tmp_path / "lr.png", config, STEPS_PER_EPOCH)
    train_reported(config, plot)
    assert plot.planned is None
    assert len(plot.taken) == 15
    assert size_and_curves(plot.path.read_bytes())[1] == {"taken"}


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("killed_after", [5, 7])
def test_a_resumed_run_also_draws_the_earlier_rates_each_once(tmp_path: Path, killed_after: int) -> None:
    """It resumes from the last complete epoch; the log still contains later steps."""
    config = make_report_config(tmp_path)
    train_until_killed(config, killed_after)
    plot = RatePlot(tmp_path / "lr.png", config, STEPS_PER_EPOCH)
    listener = Listener()
    train_reported(config, plot, listener)
    assert listener.records[0].step == killed_after // STEPS_PER_EPOCH * STEPS_PER_EPOCH + 1
    assert plot.planned is not None
    np.testing.assert_allclose(plot.taken, plot.planned, rtol=1e-12)
    # A new run in its place starts without them.
    fresh = make_report_config(tmp_path, resume=False, epochs=1)
    plot = RatePlot(tmp_path / "lr.png", fresh, STEPS_PER_EPOCH)
    train_reported(fresh, plot)
    assert [step for step, _ in plot.taken] == list(range(5))


def test_only_rank_0_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, expected in ((1, []), (0, ["lr.png"])):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        plot = RatePlot(tmp_path / "lr.png", make_report_config(None), STEPS_PER_EPOCH)
        plot.on_start(0, 0)
        plot.on_end([])
        assert [path.name for path in tmp_path.iterdir()] == expected


def test_pictures_show_the_given_curves(tmp_path: Path) -> None:
    lines: dict[str, list[tuple[int, float]]] = {"planned": [(0, 1.0), (9, 0.0)], "taken": [(3, 0.5), (4, 0.6)]}
    for has_plan, has_taken in itertools.product([True, False], repeat=2):
        path = tmp_path / "lr.png"
        plot_rates(path, lines["planned"] if has_plan else None, lines["taken"] if has_taken else [])
        names = ({"planned"} if has_plan else set()) | ({"taken"} if has_taken else set())
        assert size_and_curves(path.read_bytes()) == ((1100, 550), names)


def test_without_matplotlib_the_plot_fails_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_matplotlib(monkeypatch)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        RatePlot(tmp_path / "lr.png", make_report_config(None), STEPS_PER_EPOCH)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_rates(tmp_path / "lr.png", None, [(0, 1.0)])
    assert not list(tmp_path.iterdir())
