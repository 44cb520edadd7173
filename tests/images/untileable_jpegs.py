"""Files that cannot be tiled: other codings, files that do not end with their data, and damaged files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np

from tests.images.jpeg_files import (
    CV2_SAMPLINGS,
    GRAY,
    SAMPLINGS,
    JpegFile,
    by_cv2,
    by_pillow,
    flat,
    noise,
    patch,
    scan_start,
    segments_of,
)
from tests.images.jpeg_writer import JpegOptions as Options, segment, write_jpeg
from tests.images.pictures import Array, make_picture, save

Sizes = list[tuple[int, int]]


def other_codings(sizes: Sizes) -> Iterator[JpegFile]:
    for height, width in sizes:
        size = f"{width}x{height}"
        picture = make_picture(height, width)
        four = np.dstack([picture, picture[..., :1]])
        own_baseline = write_jpeg(picture, Options())
        files = {
            "progressive by pillow": by_pillow(picture, progressive=True),
            "progressive gray by pillow": by_pillow(picture[..., 0].copy(), progressive=True),
            "progressive 4:4:4 by cv2": by_cv2(
                picture, cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, CV2_SAMPLINGS["4:4:4"]
            ),
            "cmyk by pillow": by_pillow(four),
            "four components": _own(four, factors=((1, 1),) * 4, header="adobe"),
            "four components of two sizes": _own(four, factors=((2, 2), (1, 1), (1, 1), (2, 2)), header="none"),
            "two components": _own(picture[..., :2].copy(), factors=((1, 1),) * 2, header="none"),
            "12 bits": _own(picture, sof=0xC1, precision=12),
            "height in dnl": _own(picture, dnl=True),
            "height in dnl, one scan a component": _own(picture, dnl=True, scans=((0,), (1,), (2,))),
            "height in dnl, gray": _own(picture[..., 0].copy(), factors=GRAY, dnl=True),
            "2x2 for all, one scan a component": _own(picture, factors=((2, 2),) * 3, scans=((0,), (1,), (2,))),
        }
        # The data does not match the header's coding, but readers stop at the header.
        files |= {f"sof{number:x}": patch_sof(own_baseline, 0xC0 | number) for number in (2, 3, 5, 6, 7, 9, 10, 11, 13)}
        for sampling, factors in SAMPLINGS.items():
            if len(factors) == 3:
                files[f"{sampling}, one scan a component"] = _own(picture, factors=factors, scans=((0,), (1,), (2,)))
                files[f"{sampling}, luma and chroma in two scans"] = _own(
                    picture, factors=factors, scans=((0,), (1, 2))
                )
                files[f"{sampling}, scans with restarts"] = _own(
                    picture, factors=factors, scans=((0, 1), (2,)), restart_interval=2
                )
        for name, content in files.items():
            yield JpegFile(name=f"{name} {size}", content=content, tileable=False)


def other_ends(sizes: Sizes) -> Iterator[JpegFile]:
    for height, width in sizes:
        picture = make_picture(height, width)
        content = write_jpeg(picture, Options(restart_interval=1))
        plain = write_jpeg(picture, Options())
        files = {
            "no eoi": plain[:-2],
            "no eoi, restarts": content[:-2],
            "half an eoi": plain[:-1],
            "a line feed after eoi": plain + b"\n",
            "zeros after eoi": plain + bytes(1000),
            "ones after eoi": plain + b"\xff",
            "two eois": plain + b"\xff\xd9",
            "two files in one": plain + plain,
            "a video after eoi": plain + b"\0\0\0\x18ftypmp42" + bytes(500),
            "zeros before eoi": plain[:-2] + bytes(3) + b"\xff\xd9",
            "ones before eoi": plain[:-2] + b"\xff\x00\xff\x00\xff\xd9",
            "a restart marker before eoi": plain[:-2] + b"\xff\xd0\xff\xd9",
            "a comment before eoi": plain[:-2] + segment(0xFE, b"late") + b"\xff\xd9",
            "the scan twice": plain[:-2] + plain[_scan_header(plain) :],
        }
        for name, file in files.items():
            yield JpegFile(name=f"{name} {width}x{height}", content=file, tileable=False)


def broken_headers(sizes: Sizes) -> Iterator[JpegFile]:
    for height, width in sizes:
        good = write_jpeg(make_picture(height, width), Options(restart_interval=2))
        spans = {kind: (start, end) for kind, start, end in segments_of(good)}
        files = {
            "no frame": good[: spans[0xC0][0]] + good[spans[0xC0][1] :],
            "two frames": good[: spans[0xC0][1]] + good[spans[0xC0][0] :],
            "no tables, by pillow": by_pillow(make_picture(height, width), streamtype=2),
            "tables only, by pillow": by_pillow(make_picture(height, width), streamtype=1),
            "width 0": patch(patch(good, 0xC0, 3, 0), 0xC0, 4, 0),
            "height 0": patch(patch(good, 0xC0, 1, 0), 0xC0, 2, 0),
            "higher than its data": patch(good, 0xC0, 1, 1),
            "wider than its data": patch(good, 0xC0, 3, 1),
            "sampling factor 0": patch(good, 0xC0, 7, 0x01),
            "sampling factor 5": patch(good, 0xC0, 7, 0x51),
            "eleven blocks in an mcu": patch(good, 0xC0, 7, 0x33),
            "unknown component in the scan": patch(good, 0xDA, 1, 99),
            "one component twice in the scan": patch(good, 0xDA, 3, 1),
            "unknown huffman table": patch(good, 0xDA, 2, 0x22),
            "huffman table 15": patch(good, 0xDA, 2, 0xFF),
            "more codes than bits allow": patch(good, 0xC4, 1, 3),
            "spectral selection of a progressive scan": patch(good, 0xDA, 8, 5),
            "segment of length 0": good[:2] + b"\xff\xe1\0\0" + good[2:],
            "segment of length 1": good[:2] + b"\xff\xe1\0\1" + good[2:],
            "segment beyond the end": good[:2] + b"\xff\xe1\xff\xff" + good[2:],
            "stray byte between segments": good[:2] + b"\x00" + good[2:],
        }
        if max(height, width) > 8:  # One MCU would keep every interval.
            files["restart interval that the data does not keep"] = patch(good, 0xDD, 1, 1)
        for name, content in files.items():
            yield JpegFile(name=f"{name} {width}x{height}", content=content, tileable=False)


def broken_data(sizes: Sizes) -> Iterator[JpegFile]:
    for height, width in sizes:
        size = f"{width}x{height}"
        picture = noise(height, width)
        restarts = write_jpeg(picture, Options(restart_interval=1))
        plain = write_jpeg(picture, Options(quality=100))
        begin = scan_start(plain)
        middle = begin + (len(plain) - begin) // 2
        last_marker = max(restarts.rfind(bytes([0xFF, 0xD0 + number])) for number in range(8))
        files = {
            "no data": plain[:begin] + b"\xff\xd9",
            "no data and no eoi": plain[:begin],
            "half the data": plain[:middle].rstrip(b"\xff") + b"\xff\xd9",
            "half the data and no eoi": plain[:middle],
            "codes of ones only": plain[:begin] + b"\xff\x00" * 20 + b"\xff\xd9",
            "coefficients beyond the last": _overlong_block(),
            "a marker amid the data": plain[:middle] + segment(0xE5, b"amid") + plain[middle:],
        }
        if last_marker > scan_start(restarts):
            without = restarts[:last_marker] + restarts[last_marker + 2 :]
            other = (restarts[last_marker + 1] - 0xD0 + 3) % 8 + 0xD0
            files |= {
                "a restart marker is missing": without,
                "a restart marker too much": restarts[:last_marker] + restarts[last_marker : last_marker + 2] * 2,
                "a restart marker out of turn": restarts[: last_marker + 1]
                + bytes([other])
                + restarts[last_marker + 2 :],
                "the last interval is missing": restarts[:last_marker] + b"\xff\xd9",
                "cut after a restart marker": restarts[: last_marker + 2],
            }
        files |= {f"cut at {length}": plain[:length] for length in (1, 2, 3, 4, 20, 50, 160, begin - 5, begin + 1)}
        for name, content in files.items():
            yield JpegFile(name=f"{name} {size}", content=content, tileable=False)


def not_jpegs() -> Iterator[JpegFile]:
    yield JpegFile(name="empty file", content=b"", tileable=False)
    yield JpegFile(name="zeros", content=bytes(500), tileable=False)
    yield JpegFile(name="soi and eoi", content=b"\xff\xd8\xff\xd9", tileable=False)
    yield JpegFile(name="soi and fill bytes", content=b"\xff\xd8" + b"\xff" * 300, tileable=False)
    yield JpegFile(name="png", content=save(flat(20, 20), "PNG"), tileable=False)


def untileable_jpegs(sizes: Sizes) -> Iterator[JpegFile]:
    yield from other_codings(sizes)
    yield from other_ends(sizes)
    yield from broken_headers(sizes)
    yield from broken_data(sizes)


def truncations(content: bytes) -> Iterator[bytes]:
    return (content[:length] for length in range(len(content)))


def patch_sof(content: bytes, marker: int) -> bytes:
    start = next(start for kind, start, _ in segments_of(content) if kind == 0xC0)
    return content[: start + 1] + bytes([marker]) + content[start + 2 :]


def _own(picture: Array, **options: Any) -> bytes:
    return write_jpeg(picture, Options(**options))


def _scan_header(content: bytes) -> int:
    return list(segments_of(content))[-1][1]


def _overlong_block() -> bytes:
    """Return a gray file whose only block has the code for 16 zeros four times, and so 65 coefficients."""
    header = write_jpeg(flat(8, 8)[..., 0].copy(), Options(factors=GRAY))
    bits = "00" + "11111111001" * 4 + "11"
    return header[: scan_start(header)] + int(bits, 2).to_bytes(6, "big").replace(b"\xff", b"\xff\x00") + b"\xff\xd9"
