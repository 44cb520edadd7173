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
    """Cut images from smaller noise, even in forks of this process, because the usual noise takes each process 2 s."""
    monkeypatch.setattr(
        make_images, "ProcessPoolExecutor", partial(ProcessPoolExecutor, mp_context=get_context("fork"))
    )
    monkeypatch.setattr(make_images, "TEXTURE_SIZE", 128)
    monkeypatch.setattr(make_images, "make_textures", cache(make_images.make_textures.__wrapped__))


@pytest.mark.usefixtures("_small_textures")
def test_the_command_writes_the_files_of_every_other_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "images"
    make_images.main(out, classes=2, per_class=2, width=96, height=64, quality=95, seed=0)
    assert capsys.readouterr().out.startswith("created 4 images of 2 classes in ")
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert names == ["class-00/0000.jpg", "class-00/0001.jpg", "class-01/0000.jpg", "class-01/0001.jpg"]
    for class_id in range(2):
        expected = [path.read_bytes() for path in sorted((out / f"class-{class_id:02d}").iterdir())]
        assert _write(tmp_path / str(class_id), class_id=class_id) == expected


@pytest.mark.usefixtures("_small_textures")
def test_images_of_all_classes_and_seeds_differ(tmp_path: Path) -> None:
    jobs = [{"num_images": 6}, {"class_id": 1, "num_images": 6}, {"seed": 1}]
    contents = [content for i, job in enumerate(jobs) for content in _write(tmp_path / str(i), **job)]
    assert len(set(contents)) == len(contents) == 14


@pytest.mark.parametrize("size", [(16, 16), (101, 37)])
def test_every_file_is_a_jpeg_of_the_requested_size(tmp_path: Path, size: tuple[int, int]) -> None:
    for content in _write(tmp_path / "a", width=size[0], height=size[1]):
        with Image.open(io.BytesIO(content)) as image:
            assert image.format == "JPEG"
            assert image.size == size
            pixels = np.asarray(image.convert("RGB"))
        assert pixels.std() > 10


def test_files_are_as_large_as_those_of_photographs(tmp_path: Path) -> None:
    for content in _write(tmp_path / "a", num_images=8, width=500, height=375):
        assert 50_000 < len(content) < 110_000


def test_the_color_of_a_class_is_visible(tmp_path: Path) -> None:
    """The blobs shift the mean color, so that two distant classes differ by more than chance."""
    means = []
    for class_id in range(2):
        contents = _write(tmp_path / str(class_id), class_id=class_id, num_images=60)
        images = [cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR) for content in contents]
        means.append(np.array([np.asarray(image, dtype=np.float64).mean(axis=(0, 1)) for image in images]))
    difference = np.abs(means[0].mean(axis=0) - means[1].mean(axis=0))
    error = np.sqrt(means[0].var(axis=0) / 60 + means[1].var(axis=0) / 60)
    assert (difference / error).max() > 4
