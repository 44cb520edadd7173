"""Campaigns pass if the laws hold, and name what breaks one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer

from shardio.images import rendering
from shardio.images.tiling import tile_jpeg
from tests.images import crop_laws
from tests.images.jpeg_files import by_pillow, noise
from tests.images.pictures import make_picture
from tests.images.tiling_laws import check_file
from tests.order.laws import Case, LawBrokenError
from tests.processes import run_python, start_python
from tools import transform_campaign

crop_campaign = import_module("tools.crop_campaign")


@pytest.fixture
def croppable(tmp_path: Path) -> Path:
    for i, size in enumerate([(90, 120), (120, 90), (61, 64)]):
        (tmp_path / f"{i}.jpg").write_bytes(by_pillow(make_picture(*size)))
    return tmp_path


def test_right_crops_pass(croppable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crop_campaign.main(croppable, crops=200, seed=1)
    assert "crops of 3 photographs are right" in capsys.readouterr().out


def test_a_wrong_pixel_of_a_crop_is_found(croppable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render = rendering.render_by_kernel

    def change_one(crops: object, rows: list[list[np.ndarray]]) -> object:
        is_rendered = render(crops, rows)  # type: ignore[arg-type]  # passed on
        if is_rendered[3, 0]:
            rows[0][3][0, 0, 1] ^= 1
        return is_rendered

    monkeypatch.setattr(rendering, "render_by_kernel", change_one)
    with pytest.raises(AssertionError, match="other pixels by CropPlan"):
        crop_campaign.main(croppable, crops=200, seed=1)


# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
order_campaign = import_module("tools.order_campaign")


@pytest.mark.slow
def test_a_campaign_reports_the_number_of_cases() -> None:
    script = Path(__file__).parents[2] / "tools" / "order_campaign.py"
    done = run_python(script, "--cases", 40, "--seed", 3, cwd=script.parent)
    assert done.stdout.startswith("the laws hold for all 40 cases of seed 3")


def test_a_seed_determines_its_case() -> None:
    assert order_campaign.draw_case(7) == order_campaign.draw_case(7)
    assert len({repr(order_campaign.draw_case(seed)) for seed in range(100)}) == 100


@pytest.mark.parametrize("error", [LawBrokenError("it does not hold"), IndexError("out of bounds")])
def test_a_failing_case_is_named_and_fails_again_when_run_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = order_campaign.draw_case(1234)

    def check_laws(case: Case) -> None:
        if case == wrong:
            raise error

    monkeypatch.setattr(order_campaign, "check_laws", check_laws)
    failure = order_campaign.check_chunk(range(1200, 1300))
    assert str(error) in failure
    assert repr(wrong) in failure
    assert "--only 1234" in failure
    with pytest.raises(typer.Exit) as exit_info:
        order_campaign.main(only=1234)
    assert exit_info.value.exit_code == 1
    out = capsys.readouterr().out
    assert str(error) in out
    assert repr(wrong) in out
    with pytest.raises(typer.Exit) as exit_info:
        order_campaign.main(only=1235)
    assert exit_info.value.exit_code == 0


# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
tile_campaign = import_module("tools.tile_campaign")

TILE = Path(__file__).parents[2] / "tools" / "tile_campaign.py"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two baseline JPEGs and a progressive one in two folders, and a file that is not a JPEG."""
    (tmp_path / "more").mkdir()
    (tmp_path / "a.jpg").write_bytes(by_pillow(noise(40, 60)))
    (tmp_path / "more" / "B.JPEG").write_bytes(by_pillow(noise(50, 30)))
    (tmp_path / "more" / "c.jpeg").write_bytes(by_pillow(noise(50, 30), progressive=True))
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


@pytest.fixture
def fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a campaign that fails; return what it prints."""

    def run(exit_code: int = 1, **options: Any) -> str:
        with pytest.raises(typer.Exit) as exit_info:
            tile_campaign.main(**{"photos": tmp_path, "corpus": False, "broken": tmp_path / "found.bin", **options})
        assert exit_info.value.exit_code == exit_code
        return capsys.readouterr().out

    return run


def install_jpegtran(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    program = folder / "jpegtran"
    program.write_text(f"#!{sys.executable}\nimport sys\ncontent = sys.stdin.buffer.read()\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
def test_a_campaign_reports_the_outcomes(photos: Path) -> None:
    done = run_python(TILE, "--limit", 20, "--photos", photos, "--crops", 5, cwd=TILE.parent)
    (line,) = done.stdout.splitlines()
    assert line.startswith("the laws hold for all 23 files in ")
    assert line.endswith(" s: 22 tiled, 1 progressive")


@pytest.mark.parametrize("error", [AssertionError("a law does not hold"), IndexError("it is out of bounds")])
def test_what_breaks_a_law_is_saved(photos: Path, fail: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def check(name: str, content: bytes) -> str:
        if name.endswith("B.JPEG"):
            raise type(error)(f"{name}: {error}")
        return check_file(name, content)

    monkeypatch.setattr(tile_campaign, "check_file", check)
    assert f"B.JPEG: {error}" in fail()
    assert (photos / "found.bin").read_bytes() == (photos / "more" / "B.JPEG").read_bytes()


@pytest.mark.usefixtures("photos")
def test_a_crop_with_different_pixels_breaks_a_law(fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_decode(*arguments: Any) -> Any:
        return crop_laws.full_decode(*arguments) ^ 1

    monkeypatch.setattr(tile_campaign, "full_decode", full_decode)
    assert "has other pixels" in fail(crops=1)


def test_without_files_or_jpegtran_it_is_refused(tmp_path: Path, fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no files" in fail(2)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "libjpeg-turbo-progs" in fail(2, photos=None, corpus=True, jpegtran=True)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("sys.stdout.buffer.write(content)", "2 other scan, same pixels"),
        ("sys.exit(1)", "2 not read"),
        ("import pathlib, pickle\ntiled = pickle.loads(pathlib.Path(__file__).with_name('tiled').read_bytes())\n"
         "sys.stdout.buffer.write(tiled[content])", "2 same scan"),
    ],
    ids=["other scan", "not read", "same scan"],
)  # fmt: skip
def test_tiled_files_are_jpegtrans(
    answer: str, outcome: str, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = [path.read_bytes() for path in (photos / "a.jpg", photos / "more" / "B.JPEG")]
    (photos / "tiled").write_bytes(pickle.dumps({content: tile_jpeg(content) for content in contents}))
    install_jpegtran(photos, monkeypatch, answer)
    tile_campaign.main(photos=photos, corpus=False, jpegtran=True)
    assert f"jpegtran: {outcome}; " in capsys.readouterr().out


def test_different_pixels_from_jpegtran_break_a_law(photos: Path, fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "other").write_bytes(by_pillow(noise(8, 8)))
    install_jpegtran(photos, monkeypatch, f"sys.stdout.buffer.write(open({str(photos / 'other')!r}, 'rb').read())")
    assert "the pixels of jpegtran's file differ" in fail(jpegtran=True)


# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
train_campaign = import_module("tools.train_campaign")


class Forked:
    """A stand-in for Popen, whose process is forked: it does not import torch again."""

    def __init__(self, command: list[str], cwd: Path, env: Mapping[str, str], **_: Any) -> None:
        self.command, self.errors = command, cwd / "errors"
        self.process = start_python(*command[1:], cwd=cwd, environment=env, output=cwd / "output", errors=self.errors)
        self.pid = self.process.pid

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        self.process.join(timeout)
        if self.process.is_alive():
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.command, timeout)
        return b"", self.errors.read_bytes()

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
    monkeypatch.setattr(train_campaign, "subprocess", replaced)
    train_campaign.main(kills=1, ranks=1, samples=30, seed=1)
    output = capsys.readouterr().out
    assert output.startswith("1 kills of seed 1 (")
    assert output.endswith("all equal the uninterrupted one\n")


def test_the_campaign_finds_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    transform_campaign.operations(cases=25, seed=3)
    assert "0 of 25 images differ" in capsys.readouterr().out


def test_the_campaign_reports_differences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(transform_campaign, "edit_compiled", lambda pixels, _: np.zeros_like(pixels))
    with pytest.raises(typer.Exit):
        transform_campaign.operations(cases=5, seed=3)
    assert "differs: (" in capsys.readouterr().out
