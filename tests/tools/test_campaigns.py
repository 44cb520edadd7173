"""Campaigns pass if the laws hold, and otherwise name a case that breaks a law."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from shardio.images import rendering
from shardio.images.tiling import tile_jpeg
from tests.images.jpeg_files import by_pillow, noise
from tests.images.pictures import make_picture
from tests.images.tiling_laws import check_file, read_by_simplejpeg
from tests.order.laws import Case, LawBrokenError
from tests.processes import run_python
from tools import transform_campaign

# An import statement would make mypy find these files under two names, because tools/ is not a package.
crop_campaign, order_campaign, tile_campaign, train_campaign = (
    import_module(f"tools.{name}_campaign") for name in ("crop", "order", "tile", "train")
)
TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two baseline JPEGs and a progressive one in two folders, and a file that is not a JPEG."""
    (tmp_path / "more").mkdir()
    (tmp_path / "a.jpg").write_bytes(by_pillow(noise(40, 60)))
    (tmp_path / "more" / "B.JPEG").write_bytes(by_pillow(noise(50, 30)))
    (tmp_path / "more" / "c.jpeg").write_bytes(by_pillow(noise(50, 30), progressive=True))
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("order_campaign.py --cases 40 --seed 3", "the laws hold for all 40 cases with seed 3"),
        ("tile_campaign.py --limit 20 --photos PHOTOS --crops 5", r"the laws hold for all 23 files in .* s: 23 tiled"),
        (
            "fuzz_images.py --files 60 --jobs 1 --seed 3 --save KEPT",
            "(?s).*reading: the pixels .* hold for all 60 files",
        ),
        ("fuzz_tars.py --cases 60 --seed 3 --save KEPT", "(?s).*index: done.*0 of 60 inputs with seed 3 break a law"),
        (
            "fuzz_kernel.py --files 200 --start 77 --seed 2",
            "200 files with seed 2 from 77 on .*: no access outside the ker",
        ),
    ],
)
def test_a_campaign_reports_its_outcomes_and_saves_nothing_that_is_right(
    photos: Path, command: str, message: str
) -> None:
    name, *options = command.replace("PHOTOS", str(photos)).replace("KEPT", str(photos / "kept")).split()
    done = run_python(TOOLS / name, *options, cwd=TOOLS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(message, done.stdout)
    assert not (photos / "kept").exists()


def test_right_crops_and_operations_pass_and_a_wrong_pixel_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, size in enumerate([(90, 120), (120, 90), (61, 64)]):
        (tmp_path / f"{i}.jpg").write_bytes(by_pillow(make_picture(*size)))
    crop_campaign.main(tmp_path, crops=200, seed=1)
    assert "crops of 3 photographs are correct" in capsys.readouterr().out
    transform_campaign.operations(cases=25, seed=3)
    assert "0 of 25 images differ" in capsys.readouterr().out
    render = rendering.render_by_kernel

    def change_one(crops: Any, rows: list[list[np.ndarray]]) -> Any:
        is_rendered = render(crops, rows)
        if is_rendered[3, 0]:
            rows[0][3][0, 0, 1] ^= 1
        return is_rendered

    monkeypatch.setattr(rendering, "render_by_kernel", change_one)
    with pytest.raises(AssertionError, match="wrong pixels with CropPlan"):
        crop_campaign.main(tmp_path, crops=200, seed=1)
    monkeypatch.setattr(transform_campaign, "edit_compiled", lambda pixels, _: np.zeros_like(pixels))
    assert fails(transform_campaign.operations, cases=5, seed=3) == 1
    assert "differs: (" in capsys.readouterr().out


@pytest.mark.parametrize("laws", ["mixtures", "tokens"])
def test_the_laws_of_mixtures_and_tokens_are_checked(laws: str, capsys: pytest.CaptureFixture[str]) -> None:
    order_campaign.main(cases=3, processes=1, laws=laws)
    assert "the laws hold for all 3 cases" in capsys.readouterr().out


def fails(campaign: Callable[..., None], **options: Any) -> int:
    """Run a campaign that fails. Return its exit code."""
    with pytest.raises(typer.Exit) as exit_info:
        campaign(**options)
    return exit_info.value.exit_code


@pytest.mark.parametrize("error", [LawBrokenError("it does not hold"), IndexError("out of bounds")])
def test_a_failing_case_is_named_and_fails_again_when_run_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len({repr(order_campaign.draw_case(seed)) for seed in range(100)}) == 100
    wrong = order_campaign.draw_case(1234)

    def check_laws(case: Case) -> None:
        if case == wrong:
            raise error

    monkeypatch.setitem(order_campaign.LAWS, "order", (order_campaign.draw_case, check_laws))
    failure = order_campaign.check_chunk(range(1200, 1300))
    assert "--only 1234" in failure
    assert [fails(order_campaign.main, only=only) for only in (1235, 1234)] == [0, 1]
    for text in (failure, capsys.readouterr().out):
        assert str(error) in text
        assert repr(wrong) in text


@pytest.mark.parametrize("error", [AssertionError("a law does not hold"), IndexError("it is out of bounds")])
def test_what_breaks_a_law_is_saved(photos: Path, monkeypatch: Any, capsys: Any, error: Exception) -> None:
    def check(name: str, content: bytes) -> str:
        if name.endswith("B.JPEG"):
            raise type(error)(f"{name}: {error}")
        return check_file(name, content)

    options: dict[str, Any] = {"photos": photos, "corpus": False, "broken": photos / "found.bin"}
    with monkeypatch.context() as patch:
        patch.setattr(tile_campaign, "read_by_simplejpeg", lambda content: read_by_simplejpeg(content) ^ 1)
        assert fails(tile_campaign.main, **options, crops=1) == 1
        assert "with different pixels" in capsys.readouterr().out
    monkeypatch.setattr(tile_campaign, "check_file", check)
    assert fails(tile_campaign.main, **options) == 1
    assert f"B.JPEG: {error}" in capsys.readouterr().out
    assert (photos / "found.bin").read_bytes() == (photos / "more" / "B.JPEG").read_bytes()
    monkeypatch.setenv("PATH", str(photos))
    assert fails(tile_campaign.main, corpus=True, jpegtran=True) == 2
    assert "libjpeg-turbo-progs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("write(content)", "jpegtran: 3 other scan, same pixels; "),
        ("sys.exit(1)", "jpegtran: 3 not read; "),
        ("write(pickle.loads(folder.joinpath('tiled').read_bytes())[content])", "jpegtran: 3 same scan; "),
        ("write(folder.joinpath('other').read_bytes())", "the pixels of jpegtran's file differ"),
    ],
)
def test_tiled_files_are_compared_with_jpegtrans(
    answer: str, outcome: str, photos: Path, monkeypatch: Any, capsys: Any
) -> None:
    contents = [path.read_bytes() for path in (photos / "a.jpg", *(photos / "more").iterdir())]
    (photos / "tiled").write_bytes(pickle.dumps({content: tile_jpeg(content) for content in contents}))
    (photos / "other").write_bytes(by_pillow(noise(8, 8)))
    (photos / "jpegtran").write_text(
        f"#!{sys.executable}\nimport pathlib, pickle, sys\nfolder = pathlib.Path(__file__).parent\n"
        f"content, write = sys.stdin.buffer.read(), sys.stdout.buffer.write\n{answer}\n"
    )
    (photos / "jpegtran").chmod(0o755)
    monkeypatch.setenv("PATH", f"{photos}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(typer.Exit) if "differ" in outcome else nullcontext():
        tile_campaign.main(photos=photos, corpus=False, jpegtran=True, broken=photos / "found.bin")
    assert outcome in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(capsys: pytest.CaptureFixture[str]) -> None:
    train_campaign.main(kills=1, ranks=1, samples=30, seed=1)
    assert re.fullmatch(r"(?s)1 kills with seed 1 \(.*all equal the uninterrupted run\n", capsys.readouterr().out)
