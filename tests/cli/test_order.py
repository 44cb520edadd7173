from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from shardio.cli.main import app, main


def order(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["order", *map(str, arguments)])


def rows(*arguments: object) -> dict[str, str]:
    done = order(*arguments)
    assert done.exit_code == 0, done.stderr
    # Names take up 11 columns.
    return {line[:11].strip(): line[12:] for line in done.stdout.splitlines()}


def test_order_prints_the_settings_and_the_measurements(packed: Path) -> None:
    found = rows(packed)
    assert found["epoch"] == "0, seed 0: 21 samples in 5 shards"
    assert (found["lanes"], found["window"]) == ("1", "21 samples")
    assert found["read by"] == "1 rank, batches of 256"
    assert found["moved by"].endswith("of the epoch on average (ideal 0.333)")
    assert found["neighbours"].endswith("of the epoch apart (ideal 0.333)")
    # One batch has all 21 samples, so its probability is the ideal one.
    probability, ideal = (found["same shard"].split()[i] for i in (1, -1))
    assert f"{probability})" == ideal
    assert found["shards open"].endswith(", 5 at most")
    assert found["bytes read"].startswith("1.00 times")


def test_options_change_the_order(packed: Path) -> None:
    found = rows(packed, "--lanes", 2, "--window", 3, "--world-size", 2, "--batch-size", 4, "--seed", 5, "--epoch", 7)
    assert found["epoch"] == "7, seed 5: 21 samples in 5 shards"
    assert (found["lanes"], found["window"]) == ("2", "3 samples")
    assert found["read by"] == "2 ranks, batches of 4"
    assert found != rows(packed, "--lanes", 2, "--window", 3, "--world-size", 2, "--batch-size", 4)


def test_there_may_be_more_ranks_than_samples(packed: Path) -> None:
    assert rows(packed, "--world-size", 50)["shards open"] == "1.0 per rank on average, 1 at most"


def test_the_plot_is_a_png(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "order.png"
    rows(packed, "--plot", path)
    assert path.stat().st_size > 0
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    # There are points of the lane's colour, not only axes and text.
    assert np.ptp(pixels.astype(int), axis=2).max() > 50


def test_a_plot_in_another_format_is_wrong_usage(packed: Path, tmp_path: Path) -> None:
    done = order(packed, "--plot", tmp_path / "order.jpg")
    assert done.exit_code == 2
    assert "must end in .png" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_plot_to_a_missing_folder_is_an_error_that_names_the_file(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "order.png"
    monkeypatch.setattr(sys, "argv", ["shardio", "order", str(packed), "--plot", str(path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err == f"error: {path}: No such file or directory\n"


def test_without_matplotlib_the_error_says_what_to_install(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = order(packed, "--plot", tmp_path / "order.png")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: --plot needs matplotlib: pip install matplotlib\n"
    assert order(packed).exit_code == 0


@pytest.mark.parametrize("arguments", [["--lanes", "0"], ["--window", "-1"], ["--world-size", "0"], ["--epoch", "-1"]])
def test_values_out_of_range_are_wrong_usage(packed: Path, arguments: list[str]) -> None:
    assert order(packed, *arguments).exit_code == 2
