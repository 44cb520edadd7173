from __future__ import annotations

import numpy as np
import pytest
import typer

from tools import transform_campaign


def test_the_campaign_finds_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    transform_campaign.operations(cases=25, seed=3)
    assert "0 of 25 images differ" in capsys.readouterr().out


def test_the_campaign_reports_differences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(transform_campaign, "edit_compiled", lambda pixels, _: np.zeros_like(pixels))
    with pytest.raises(typer.Exit):
        transform_campaign.operations(cases=5, seed=3)
    assert "differs: (" in capsys.readouterr().out
