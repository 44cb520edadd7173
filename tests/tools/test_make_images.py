from __future__ import annotations

import io
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

# An import statement would make mypy find this file under two names, because tools/ is not a package.
make_images = import_module("tools.make_images")


def _write(folder: Path, **options: Any) -> list[bytes]:
    defaults = {"class_id": 0, "num_classes": 2, "num_images": 2, "width": 96, "height": 64, "quality": 95, "seed": 0}
    job = make_images.Job(folder=folder, **{**defaults, **options})
    num_bytes = make_images.write_class(job)
    contents = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert num_bytes == sum(map(len, contents))
    return contents


@pytest.fixture
def _small_textures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut images from smaller noise textures, even in forked processes: each would need 2 s for the usual textures."""
    pool = partial(ProcessPoolExecutor, mp_context=get_context("fork"))
    monkeypatch.setattr(make_images, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(make_images, "TEXTURE_SIZE", 128)
    monkeypatch.setattr(make_images, "make_textures", cache(make_images.make_textures.__wrapped__))


@pytest.mark.usefixtures("_small_textures")
def test_the_command_writes_the_files_of_every_other_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "images"
    make_images.main(out, classes=2, per_class=2, width=96, height=64, quality=95, seed=0)
    assert capsys.readouterr().out.startswith("created 4 images of 2 classes in ")
    for class_id in range(2):
        paths = sorted((out / f"class-{class_id:02d}").iterdir())
        assert [path.name for path in paths] == ["0000.jpg", "0001.jpg"]
        assert _write(tmp_path / str(class_id), class_id=class_id) == [path.read_bytes() for path in paths]
    jobs = [{"num_images": 6}, {"class_id": 1, "num_images": 6}, {"seed": 1}]
    contents = [content for i, job in enumerate(jobs) for content in _write(tmp_path / f"job-{i}", **job)]
    assert len(set(contents)) == len(contents) == 14, "images of all classes and seeds differ"


def test_every_file_is_a_jpeg_of_the_requested_size_and_as_large_as_a_photograph(tmp_path: Path) -> None:
    for width, height in ((16, 16), (101, 37), (500, 375)):
        for content in _write(tmp_path / f"{width}", width=width, height=height):
            with Image.open(io.BytesIO(content)) as image:
                assert (image.format, image.size) == ("JPEG", (width, height))
                assert np.asarray(image.convert("RGB")).std() > 10
            assert width < 500 or 50_000 < len(content) < 110_000


def test_the_color_of_a_class_is_visible(tmp_path: Path) -> None:
    """The blobs shift the mean color, so that two distant classes differ by more than chance would explain."""
    means = []
    for class_id in range(2):
        contents = _write(tmp_path / str(class_id), class_id=class_id, num_images=60)
        images = [cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR) for content in contents]
        means.append(np.array([np.asarray(image, dtype=np.float64).mean(axis=(0, 1)) for image in images]))
    difference = np.abs(means[0].mean(axis=0) - means[1].mean(axis=0))
    error = np.sqrt(means[0].var(axis=0) / 60 + means[1].var(axis=0) / 60)
    assert (difference / error).max() > 4
