"""The campaign of crops passes for right pixels, and finds wrong ones."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from shardio.images import rendering
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import make_picture

crop_campaign = import_module("tools.crop_campaign")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i, size in enumerate([(90, 120), (120, 90), (61, 64)]):
        (tmp_path / f"{i}.jpg").write_bytes(by_pillow(make_picture(*size)))
    return tmp_path


def test_right_pixels_pass(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crop_campaign.main(photos, crops=200, seed=1)
    assert "crops of 3 photographs are right" in capsys.readouterr().out


def test_a_wrong_pixel_is_found(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render = rendering.render_by_kernel

    def change_one(crops: object, rows: list[list[np.ndarray]]) -> object:
        is_rendered = render(crops, rows)  # type: ignore[arg-type]  # passed on
        if is_rendered[3, 0]:
            rows[0][3][0, 0, 1] ^= 1
        return is_rendered

    monkeypatch.setattr(rendering, "render_by_kernel", change_one)
    with pytest.raises(AssertionError, match="other pixels by CropPlan"):
        crop_campaign.main(photos, crops=200, seed=1)
