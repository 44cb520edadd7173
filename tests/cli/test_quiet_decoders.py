"""Lines that image libraries print name no file, so none reaches the user from shardio's own processes."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardio import DataLoader, ImageFolder
from shardio.images import decode_image, ignore_pillows_warnings
from tests.images.pictures import make_picture, read_by_pillow, save
from tests.images.stored_values import chunk
from tests.processes import run_python

PICTURE = make_picture(20, 30)


def palette(transparency: int | bytes) -> bytes:
    image = Image.fromarray(PICTURE).quantize(16)
    return save(image, "PNG", transparency=transparency)


def with_chunk(name: bytes, data: bytes) -> bytes:
    content = save(PICTURE, "PNG")
    return content[:33] + chunk(name, data) + content[33:]


FILES = {
    "bytes.png": palette(bytes(range(16))),
    "index.png": palette(3),
    "profile.png": with_chunk(b"iCCP", b"x\0\0no profile"),
    "chromaticity.png": with_chunk(b"cHRM", struct.pack(">8I", *range(1, 9))),
    "photo.jpg": save(PICTURE, "JPEG").replace(b"\xff\xdb", b"\xff\xe2\0\x14ICC_PROFILE\0\1\2ab\0\0\xff\xdb", 1),
    "exif.jpg": save(PICTURE, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0bad"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    (root / "class").mkdir()
    for name, content in FILES.items():
        (root / "class" / name).write_bytes(content)
    return root


def test_commands_print_nothing_of_the_libraries(folder: Path, tmp_path: Path) -> None:
    done = run_python("-m", "shardio", "pack", folder, tmp_path / "out", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run_python("-m", "shardio", "verify", "--deep", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_print_nothing_of_the_libraries(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dataset = ImageFolder(folder, orientation="apply")
    batches = list(DataLoader(dataset, batch_size=2, num_workers=1))
    assert sum(len(labels) for _, labels in batches) == len(FILES)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("transparency", [3, bytes(range(16)), bytes(3)], ids=str)
def test_a_transparent_palette_becomes_rgb_without_a_warning(transparency: int | bytes) -> None:
    content = palette(transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = read_by_pillow(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(decode_image(content), expected)


def test_the_users_own_filters_take_precedence() -> None:
    """A user who turns Pillow's warnings into errors has them everywhere."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        decode_image(FILES["exif.jpg"], orientation="apply")
        assert len(caught) == 1, "this file has a warning to ignore"
        ignore_pillows_warnings()
        decode_image(FILES["exif.jpg"], orientation="apply")
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Corrupt EXIF")
        ignore_pillows_warnings()
        with pytest.raises(ValueError, match="Corrupt EXIF data"):
            decode_image(FILES["exif.jpg"], orientation="apply")
