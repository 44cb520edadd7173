"""Campaigns pass if the laws hold, and name a case that breaks one."""

from __future__ import annotations

import os
import pickle
import re
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
from tests.images.jpeg_files import by_pillow, noise
from tests.images.pictures import make_picture
from tests.images.tiling_laws import check_file, read_by_simplejpeg
from tests.order.laws import Case, LawBrokenError
from tests.processes import run_python, start_python
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


CAMPAIGNS: dict[str, tuple[str, str]] = {
    "order_campaign": ("--cases 40 --seed 3", "the laws hold for all 40 cases of seed 3"),
    "tile_campaign": ("--limit 20 --photos {photos} --crops 5", r"the laws hold for all 23 files in .* s: 23 tiled\n$"),
    "fuzz_images": (
        "--files 60 --jobs 1 --seed 3 --save {save}",
        "(?s).*reading: the pixels of a full decode.*the laws hold for all 60 files of seed 3",
    ),
    "fuzz_tars": ("--cases 60 --seed 3 --save {save}", "(?s).*index: done.*0 of 60 inputs of seed 3 break a law"),
    "fuzz_kernel": (
        "--files 200 --start 77 --seed 2",
        "200 files of seed 2 from 77 on --target .*: no access outside the kernel's memory; ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_reports_its_outcomes_and_saves_nothing_that_is_right(photos: Path, name: str) -> None:
    options, message = CAMPAIGNS[name]
    folders = {"photos": photos, "save": photos / "kept"}
    done = run_python(TOOLS / f"{name}.py", *options.format(**folders).split(), cwd=TOOLS)
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
    with pytest.raises(typer.Exit):
        transform_campaign.operations(cases=5, seed=3)
    assert "differs: (" in capsys.readouterr().out


@pytest.mark.parametrize("laws", ["mixtures", "tokens"])
def test_the_laws_of_mixtures_and_tokens_are_checked(laws: str, capsys: pytest.CaptureFixture[str]) -> None:
    order_campaign.main(cases=3, processes=1, laws=laws)
    assert "the laws hold for all 3 cases" in capsys.readouterr().out


def test_a_seed_determines_its_case() -> None:
    one, other = ([repr(order_campaign.draw_case(seed)) for seed in range(100)] for _ in range(2))
    assert one == other
    assert len(set(one)) == 100


@pytest.mark.parametrize("error", [LawBrokenError("it does not hold"), IndexError("out of bounds")])
def test_a_failing_case_is_named_and_fails_again_when_run_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = order_campaign.draw_case(1234)

    def check_laws(case: Case) -> None:
        if case == wrong:
            raise error

    monkeypatch.setitem(order_campaign.LAWS, "order", (order_campaign.draw_case, check_laws))
    failure = order_campaign.check_chunk(range(1200, 1300))
    assert "--only 1234" in failure
    for only, exit_code in ((1234, 1), (1235, 0)):
        with pytest.raises(typer.Exit) as exit_info:
            order_campaign.main(only=only)
        assert exit_info.value.exit_code == exit_code
        out = capsys.readouterr().out
        assert exit_code == 0 or all(str(error) in text and repr(wrong) in text for text in (failure, out))


@pytest.fixture
def fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a campaign, checks that it fails, and returns its output."""

    def run(exit_code: int = 1, **options: Any) -> str:
        with pytest.raises(typer.Exit) as exit_info:
            tile_campaign.main(**{"photos": tmp_path, "corpus": False, "broken": tmp_path / "found.bin", **options})
        assert exit_info.value.exit_code == exit_code
        return capsys.readouterr().out

    return run


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
    monkeypatch.setattr(tile_campaign, "read_by_simplejpeg", lambda content: read_by_simplejpeg(content) ^ 1)
    assert "has different pixels" in fail(crops=1)


def test_without_files_or_jpegtran_it_is_refused(tmp_path: Path, fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no files" in fail(2)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "libjpeg-turbo-progs" in fail(2, photos=None, corpus=True, jpegtran=True)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("write(content)", "3 other scan, same pixels"),
        ("sys.exit(1)", "3 not read"),
        ("write(pickle.loads(folder.joinpath('tiled').read_bytes())[content])", "3 same scan"),
        ("write(folder.joinpath('other').read_bytes())", None),
    ],
    ids=["other scan", "not read", "same scan", "other pixels"],
)
def test_tiled_files_are_compared_with_jpegtrans(
    answer: str, outcome: str | None, photos: Path, fail: Any, monkeypatch: Any, capsys: Any
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
    if outcome is None:
        assert "the pixels of jpegtran's file differ" in fail(jpegtran=True)
        return
    tile_campaign.main(photos=photos, corpus=False, jpegtran=True)
    assert f"jpegtran: {outcome}; " in capsys.readouterr().out


class Forked:
    """A replacement for Popen that forks the process, so that it does not import torch again."""

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
