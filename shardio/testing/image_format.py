"""Conformance tests of an image format: its name, its pixels (whole and in parts), and its errors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from shardio.datasets import ImageFolder
from shardio.images import (
    IMAGE_FORMATS,
    CropPlan,
    Orientation,
    Pixels,
    TooManyPixels,
    decode_image,
    decode_pil,
    decode_unconverted,
    decode_unconverted_pil,
    find_field,
    find_format,
    open_image,
    read_format,
    render_chunk,
    sizes_of,
)
from shardio.images.jpeg import Box

TURNS: dict[int, list[Image.Transpose]] = {
    1: [],
    2: [Image.Transpose.FLIP_LEFT_RIGHT],
    3: [Image.Transpose.ROTATE_180],
    4: [Image.Transpose.FLIP_TOP_BOTTOM],
    5: [Image.Transpose.TRANSPOSE],
    6: [Image.Transpose.ROTATE_270],
    7: [Image.Transpose.TRANSVERSE],
    8: [Image.Transpose.ROTATE_90],
    0: [],
    9: [],
}
"""The operations that turn an image upright, for each EXIF orientation; undefined orientations need none."""


def is_in_pillow(suffix: str) -> bool:
    """Return whether Pillow reads the format that a suffix stands for."""
    Image.init()
    return IMAGE_FORMATS[suffix] in Image.OPEN


class ImageFormatTests:
    """The tests of one image format.

    Subclass it and override :meth:`suffix`. If Pillow cannot write the format, also override :meth:`content`, and if
    Pillow cannot read it, :meth:`pixels`. A format that Pillow reads needs one line in ``shardio/images/formats.py``.
    Any other format also needs a decoder in ``shardio/images/opening.py``::

        class TestQoi(ImageFormatTests):
            @pytest.fixture
            def suffix(self) -> str:
                return "qoi"

            @pytest.fixture
            def content(self) -> bytes:
                return Path("tests/picture.qoi").read_bytes()
    """

    @pytest.fixture
    def suffix(self) -> str:
        """Return the suffix of the format's files, which is also the field's name."""
        raise NotImplementedError

    @pytest.fixture
    def content(self, suffix: str) -> bytes:
        """Return a file with an image of at least 16×16 pixels, written by code that does not use ``formats.py``."""
        coarse = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
        return self.write(Image.fromarray(coarse).resize((47, 33), Image.Resampling.BICUBIC), suffix)

    def write(self, image: Image.Image, suffix: str, orientation: int | None = None) -> bytes:
        """Return a file in the format that Pillow writes for a suffix, with an EXIF orientation if one is given."""
        file, exif = io.BytesIO(), Image.Exif()
        if orientation is not None:
            exif[0x0112] = orientation
        pillow_format = Image.registered_extensions()[f".{suffix}"]
        image.save(file, pillow_format, **({} if orientation is None else {"exif": exif}))
        return file.getvalue()

    @pytest.fixture
    def pixels(self, content: bytes) -> Pixels:
        """Return the pixels of the file, uint8 [height, width, 3]; by default, as Pillow decodes them."""
        with Image.open(io.BytesIO(content)) as image:
            return np.array(image.convert("RGB"))

    @pytest.fixture
    def stored(self, content: bytes, suffix: str, pixels: Pixels) -> NDArray[Any]:
        """Return the values that the file stores.

        By default, these are Pillow's values if Pillow reads the format, or else the pixels.
        """
        if not is_in_pillow(suffix):
            return pixels
        with Image.open(io.BytesIO(content)) as image:
            return np.array(image)

    def test_the_format_is_found_by_the_content_whatever_the_name(
        self, suffix: str, content: bytes, tmp_path: Path
    ) -> None:
        if is_in_pillow(suffix):
            with Image.open(io.BytesIO(content)) as image:
                assert image.format == IMAGE_FORMATS[suffix], "Pillow gives the format the same name"
        assert find_format(content) == IMAGE_FORMATS[suffix]
        assert IMAGE_FORMATS[find_field(content)] == IMAGE_FORMATS[suffix]
        for name in ("a", "a.txt", "a.png", "a.jpg"):
            (tmp_path / name).write_bytes(content)
            assert read_format(tmp_path / name) == IMAGE_FORMATS[suffix]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Pillow deprecates some formats.
    def test_files_of_other_formats_keep_theirs(self, suffix: str) -> None:
        for other in Image.registered_extensions():
            try:
                content = self.write(Image.new("RGB", (16, 16)), other[1:])
                with Image.open(io.BytesIO(content)) as image:
                    expected = image.format
            except (KeyError, OSError, ValueError):
                continue  # Pillow does not write this format, or cannot read what it writes.
            assert find_format(content) == expected, f"the signature of {suffix} may match {other} files"
        for content in (b"", bytes(16), b"no image at all"):
            assert find_format(content) is None, f"the signature of {suffix} may match {content!r}"

    def test_its_signature_depends_on_at_least_three_bytes(self, suffix: str, content: bytes) -> None:
        if find_format(content[:16]) != IMAGE_FORMATS[suffix]:
            pytest.skip("it has no signature")
        changed = [content[:i] + bytes([content[i] ^ 0xFF]) + content[i + 1 : 16] for i in range(16)]
        assert sum(find_format(each) != IMAGE_FORMATS[suffix] for each in changed) >= 3

    @pytest.mark.parametrize("orientation", ["ignore", "apply"])
    def test_the_whole_image_is_a_writable_contiguous_array_or_a_pillow_image(
        self, content: bytes, pixels: Pixels, orientation: Orientation
    ) -> None:
        decoded = decode_image(content, orientation=orientation)
        np.testing.assert_array_equal(decoded, pixels, strict=True)
        assert decoded.flags.c_contiguous
        assert decoded.flags.writeable, "torch.from_numpy warns about read-only arrays"
        image = decode_pil(content, orientation=orientation)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), pixels)

    def test_the_field_of_an_image_holds_the_stored_values(self, content: bytes, stored: NDArray[Any]) -> None:
        found = decode_unconverted(content)
        np.testing.assert_array_equal(found, stored, strict=True)
        assert found.flags.writeable
        np.testing.assert_array_equal(np.asarray(decode_unconverted_pil(content)), stored)

    def test_parts_and_crops_are_those_of_the_whole_image(self, content: bytes, pixels: Pixels) -> None:
        random, (height, width) = np.random.default_rng(0), pixels.shape[:2]
        picture = open_image(content)
        assert picture.size == (height, width)
        corners = [np.sort(random.choice(side + 1, (20, 2), replace=True), axis=1) for side in (height, width)]
        boxes = [(t, le, b - t, r - le) for (t, b), (le, r) in zip(*corners, strict=True) if b > t and r > le]
        for top, left, rows, columns in [(0, 0, height, width), *boxes]:
            expected = pixels[top : top + rows, left : left + columns]
            np.testing.assert_array_equal(picture.read(Box(top, left, rows, columns)), expected)
            plan = CropPlan.whole(sizes_of([picture])).crop(np.array([[top, left, rows, columns]]))
            np.testing.assert_array_equal(render_chunk([picture], plan).images[0], expected)

    @pytest.mark.parametrize("orientation", ["ignore", "apply"])
    def test_the_limit_is_the_largest_number_of_pixels_that_is_opened(
        self, content: bytes, pixels: Pixels, orientation: Orientation
    ) -> None:
        height, width, _ = pixels.shape
        size = open_image(content, orientation=orientation, max_pixels=height * width).size
        assert size == (height, width)
        with pytest.raises(TooManyPixels, match=f"{width}×{height} pixels, more than max_pixels={height * width - 1}"):
            open_image(content, orientation=orientation, max_pixels=height * width - 1)

    @pytest.mark.parametrize("orientation", ["ignore", "apply"])
    def test_a_truncated_file_never_gives_pixels(self, content: bytes, orientation: Orientation) -> None:
        for stop in (0, 1, 2, 8, 16, *range(len(content) // 8, len(content) // 2, len(content) // 8)):
            with pytest.raises(ValueError, match=r".+"):
                decode_image(content[:stop], orientation=orientation)

    def test_apply_turns_the_image_upright(self, suffix: str) -> None:
        """Pillow applies the orientation of TIFFs when it loads them, so shardio always does the same."""
        if Image.registered_extensions().get(f".{suffix}") not in Image.SAVE:
            pytest.skip("Pillow cannot write this format")
        image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (18, 25, 3), np.uint8))
        stored = decode_image(self.write(image, suffix))
        for orientation, turns in TURNS.items():
            content, upright = self.write(image, suffix, orientation), Image.fromarray(stored)
            with Image.open(io.BytesIO(content)) as file:
                has_orientation = file.getexif().get(0x0112) == orientation  # Some formats store no EXIF data.
            for turn in turns if has_orientation else []:
                upright = upright.transpose(turn)
            np.testing.assert_array_equal(decode_image(content, orientation="apply"), np.asarray(upright))
            ignored = upright if IMAGE_FORMATS[suffix] == "TIFF" else stored
            np.testing.assert_array_equal(decode_image(content), np.asarray(ignored))

    def test_a_folder_of_such_files_is_a_dataset(
        self, suffix: str, content: bytes, pixels: Pixels, tmp_path: Path
    ) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / f"b.{suffix}").write_bytes(content)
        image, label = ImageFolder(tmp_path)[0]
        np.testing.assert_array_equal(image.permute(1, 2, 0).numpy(), pixels)
        assert label == 0
