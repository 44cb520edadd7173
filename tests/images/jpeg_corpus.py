"""JPEG files of every kind, tileable and not, to test code that decodes parts of them or rewrites them without loss."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import cv2
import numpy as np

from tests.images.jpeg_files import (
    CONTENTS,
    CV2_SAMPLINGS,
    GRAY,
    PILLOW_SAMPLINGS,
    SAMPLINGS,
    Factors,
    JpegFile,
    by_cv2,
    by_pillow,
    by_simplejpeg,
    exif_with_thumbnail,
    flat,
    make_jpeg,
    noise,
    patch,
    readers_of,
    scan_start,
    segments_of,
)
from tests.images.jpeg_writer import DEEP, FLAT, dht_segment, dqt_segment, segment, write_jpeg
from tests.images.pictures import make_picture, save

Sizes = list[tuple[int, int]]


def other_codings(height: int, width: int) -> dict[str, bytes]:
    picture = make_picture(height, width)
    four = np.dstack([picture, picture[..., :1]])
    own_baseline = write_jpeg(picture)
    files = {
        "cmyk by pillow": by_pillow(four),
        "four components": write_jpeg(four, factors=((1, 1),) * 4, header="adobe"),
        "four components of two sizes": write_jpeg(four, factors=((2, 2), (1, 1), (1, 1), (2, 2)), header="none"),
        "two components": write_jpeg(picture[..., :2].copy(), factors=((1, 1),) * 2, header="none"),
        "12 bits": write_jpeg(picture, sof=0xC1, precision=12),
        "height in dnl": write_jpeg(picture, dnl=True),
        "height in dnl, one scan a component": write_jpeg(picture, dnl=True, scans=((0,), (1,), (2,))),
        "height in dnl, gray": write_jpeg(picture[..., 0].copy(), factors=GRAY, dnl=True),
        "2x2 for all, one scan a component": write_jpeg(picture, factors=((2, 2),) * 3, scans=((0,), (1,), (2,))),
    }
    # The data does not match the header's coding, but readers stop at the header.
    files |= {f"sof{number:x}": patch_sof(own_baseline, 0xC0 | number) for number in (2, 3, 5, 6, 7, 9, 10, 11, 13)}
    for sampling, factors in SAMPLINGS.items():
        if len(factors) == 3:
            write = partial(write_jpeg, picture, factors=factors)
            files[f"{sampling}, one scan a component"] = write(scans=((0,), (1,), (2,)))
            files[f"{sampling}, luma and chroma in two scans"] = write(scans=((0,), (1, 2)))
            files[f"{sampling}, scans with restarts"] = write(scans=((0, 1), (2,)), restart_interval=2)
    return files


def broken_progressives(height: int, width: int) -> dict[str, bytes]:
    good = by_pillow(make_picture(height, width), progressive=True, restart_marker_blocks=1)
    last = good.rindex(b"\xff\xc4")  # The last scan refines luma, with a table of its own.
    quantizers = dqt_segment({0: [200] * 64, 1: [200] * 64})
    files = {
        "no eoi": good[:-2],
        "the last scan is missing": good[:last] + b"\xff\xd9",
        "the last scan is missing, no eoi": good[:last],
        "the last scan twice": good[:-2] + good[last:],
        "a comment between scans": good[:last] + segment(0xFE, b"late") + good[last:],
        "quantization between scans": good[:last] + quantizers + good[last:],
        "zeros before eoi": good[:-2] + bytes(40) + b"\xff\xd9",
        "noise before eoi": good[:-2] + bytes(range(40, 90)) + b"\xff\xd9",
        "zeros after eoi": good + bytes(10),
        "the last byte is missing": good[:-3].rstrip(b"\xff") + b"\xff\xd9",
        "huge": patch(patch(good, 0xC2, 1, 0xFF), 0xC2, 3, 0xFF),
        "an unused dc symbol of 16 bits": _with_long_code(good, 16),
    }
    if b"\xff\xd0" in good:
        files["no restart markers"] = re.sub(rb"\xff[\xd0-\xd7]", b"", good)
    return {f"progressive, {name}": content for name, content in files.items()}


def other_ends(height: int, width: int) -> dict[str, bytes]:
    picture = make_picture(height, width)
    plain = write_jpeg(picture)
    return {
        "no eoi": plain[:-2],
        "no eoi, restarts": write_jpeg(picture, restart_interval=1)[:-2],
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


def broken_headers(height: int, width: int) -> dict[str, bytes]:
    good = write_jpeg(make_picture(height, width), restart_interval=2)
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
    if max(height, width) > 8:  # An image of a single MCU is valid with any restart interval.
        files["restart interval that the data does not keep"] = patch(good, 0xDD, 1, 1)
    return files


def broken_data(height: int, width: int) -> dict[str, bytes]:
    picture = noise(height, width)
    restarts = write_jpeg(picture, restart_interval=1)
    plain = write_jpeg(picture, quality=100)
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
            "a restart marker out of turn": restarts[: last_marker + 1] + bytes([other]) + restarts[last_marker + 2 :],
            "the last interval is missing": restarts[:last_marker] + b"\xff\xd9",
            "cut after a restart marker": restarts[: last_marker + 2],
        }
    files |= {f"cut at {length}": plain[:length] for length in (1, 2, 3, 4, 20, 50, 160, begin - 5, begin + 1)}
    return files


def not_jpegs() -> Iterator[JpegFile]:
    files = {"empty": b"", "zeros": bytes(500), "soi and eoi": b"\xff\xd8\xff\xd9", "png": save(flat(20, 20), "PNG")}
    for name, content in {**files, "soi and fill bytes": b"\xff\xd8" + b"\xff" * 300}.items():
        yield JpegFile(name=name, content=content, tileable=False)


def untileable_jpegs(sizes: Sizes) -> Iterator[JpegFile]:
    for make in (other_codings, broken_progressives, other_ends, broken_headers, broken_data):
        for height, width in sizes:
            for name, content in make(height, width).items():
                yield JpegFile(name=f"{name} {width}x{height}", content=content, tileable=False)


def truncations(content: bytes) -> Iterator[bytes]:
    return (content[:length] for length in range(len(content)))


def patch_sof(content: bytes, marker: int) -> bytes:
    start = next(start for kind, start, _ in segments_of(content) if kind == 0xC0)
    return content[: start + 1] + bytes([marker]) + content[start + 2 :]


def _with_long_code(content: bytes, symbol: int) -> bytes:
    """Return a file whose first Huffman table has one additional code, which is longer than all others."""
    start, stop = next((start, stop) for kind, start, stop in segments_of(content) if kind == 0xC4)
    counts = bytearray(content[start + 5 : start + 21])
    counts[len(counts.rstrip(b"\0"))] = 1
    table = content[start + 4 : start + 5] + counts + content[start + 21 : stop] + bytes([symbol])
    return content[:start] + segment(0xC4, table) + content[stop:]


def _scan_header(content: bytes) -> int:
    return list(segments_of(content))[-1][1]


def _overlong_block() -> bytes:
    """Return a gray file whose only block has 65 coefficients, because it repeats the code for 16 zeros four times."""
    header = write_jpeg(flat(8, 8)[..., 0].copy(), factors=GRAY)
    bits = "00" + "11111111001" * 4 + "11"
    return header[: scan_start(header)] + int(bits, 2).to_bytes(6, "big").replace(b"\xff", b"\xff\x00") + b"\xff\xd9"


ODD_FACTORS: dict[str, Factors] = {
    "4:1:0": ((4, 2), (1, 1), (1, 1)),
    "2x4": ((2, 4), (1, 1), (1, 1)),
    "1x4": ((1, 4), (1, 1), (1, 1)),
    "3x1": ((3, 1), (1, 1), (1, 1)),
    "1x3": ((1, 3), (1, 1), (1, 1)),
    "3x2": ((3, 2), (1, 1), (1, 1)),
    "4:4:4 as 2x1": ((2, 1), (2, 1), (2, 1)),
    "4:4:4 as 1x2": ((1, 2), (1, 2), (1, 2)),
    "4:4:4 as 3x1": ((3, 1), (3, 1), (3, 1)),
    "4:2:2 as 2x2, 1x2": ((2, 2), (1, 2), (1, 2)),
    "4:4:0 as 2x2, 2x1": ((2, 2), (2, 1), (2, 1)),
    "larger chroma": ((1, 1), (2, 2), (2, 2)),
    "wider chroma": ((1, 1), (4, 1), (4, 1)),
    "one larger chroma": ((1, 1), (2, 1), (1, 2)),
    "unequal chromas": ((2, 2), (2, 1), (1, 2)),
    "mixed": ((2, 1), (1, 2), (1, 1)),
    "fractional 3x1, 2x1": ((3, 1), (2, 1), (1, 1)),
    "fractional 2x3, 1x2": ((2, 3), (1, 2), (1, 1)),
    "gray 2x2": ((2, 2),),
    "gray 4x4": ((4, 4),),
    "gray 3x1": ((3, 1),),
}
"""Sampling factors that few encoders write. A baseline MCU holds at most ten blocks (T.81, B.2.3)."""
FACTORS = {
    **SAMPLINGS,
    **{name: factors for name, factors in ODD_FACTORS.items() if "simplejpeg" in readers_of(factors)},
}
"""Sampling factors that simplejpeg reads."""

FLAT_TABLES = dht_segment({(table_class, number): FLAT[table_class] for table_class in (0, 1) for number in (0, 1)})
UNUSED_TABLES = dqt_segment({3: [255] * 64}) + dht_segment({(0, 1): DEEP[0], (1, 1): DEEP[1]})
ONE_TABLE = {"dc_ids": (0, 0, 0), "ac_ids": (0, 0, 0)}
TABLES: dict[str, dict[str, Any]] = {
    "standard": {},
    "best": {"huffman": "best"},
    "deep": {"huffman": "deep"},
    "flat": {"huffman": "flat"},
    "one dht, one dqt": {"one_dht": True, "one_dqt": True},
    "one huffman table for all": {"huffman": "best", **ONE_TABLE},
    "one quantization table for all": {"quantization_ids": (0, 0, 0)},
    "shared ac tables": {"huffman": "best", "ac_ids": (1, 1, 1)},
    "swapped ids": {"dc_ids": (1, 0, 0), "ac_ids": (1, 0, 0), "quantization_ids": (3, 2, 2)},
    "crossed ids": {"dc_ids": (0, 1, 0), "ac_ids": (1, 0, 1)},
    "sof1": {"sof": 0xC1},
    "sof1, ids 2 and 3": {"sof": 0xC1, "dc_ids": (2, 3, 3), "ac_ids": (3, 2, 2), "quantization_ids": (2, 3, 3)},
    "sof1, three tables": {"sof": 0xC1, "dc_ids": (0, 1, 2), "ac_ids": (1, 3, 0), "huffman": "best"},
    "sof1, wide quantization": {"sof": 0xC1, "quality": 2, "wide_quantization": True},
    "huffman tables redefined": {"parts": (FLAT_TABLES, "header", "dqt", "sof", "dht")},
    "quantization redefined": {"parts": ("header", dqt_segment({0: [9] * 64, 1: [7] * 64}), "dqt", "sof", "dht")},
    "unused tables": {"parts": ("header", UNUSED_TABLES, "dqt", FLAT_TABLES, "sof", "dht"), **ONE_TABLE},
    "empty segments": {"parts": ("header", segment(0xC4), segment(0xDB), "dqt", "sof", "dht")},
    "tables first": {"parts": ("dht", "dqt", "dri", "header", "sof")},
    "frame first": {"parts": ("sof", "header", "dri", "dht", "dqt"), "restart_interval": 2},
}
ODD_FRAMES: dict[str, dict[str, Any]] = {
    "rgb by adobe": {"rgb": True, "header": "adobe"},
    "rgb by ids": {"rgb": True, "header": "none", "component_ids": tuple(b"RGB")},
    "rgb by adobe, 2x2": {"rgb": True, "header": "adobe", "factors": SAMPLINGS["4:2:0"]},
    "ycc by adobe": {"header": "adobe"},
    "no header": {"header": "none"},
    "ids 0, 1, 2": {"component_ids": (0, 1, 2)},
    "ids 255, 7, 0": {"component_ids": (255, 7, 0)},
    "padding of zeros": {"padding": 0},
    "padding of zeros, restarts": {"padding": 0, "restart_interval": 1},
    "fill bytes before markers": {"fill": 3},
    "fill bytes in the scan": {"fill_in_scan": 1, "restart_interval": 2},
    "many fill bytes in the scan": {"fill_in_scan": 50, "restart_interval": 1},
}
INTERVALS = [0, 1, 2, 3, 5, 8, 1000, 65535]
MARKERS_INSIDE = b"\xff\xd8\xff\xd9\xff\xda\xff\xc0\xff\x00\xff\xd0\xff"


def real_encoders(sizes: Sizes, quality: int = 85) -> Iterator[JpegFile]:
    for height, width in sizes:
        picture = make_picture(height, width)
        gray = picture[..., 0].copy()
        files = {f"simplejpeg {name}": by_simplejpeg(picture, name, quality) for name in SAMPLINGS}
        quality_option = (cv2.IMWRITE_JPEG_QUALITY, quality)
        for name, value in CV2_SAMPLINGS.items():
            files[f"cv2 {name}"] = by_cv2(picture, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, value, *quality_option)
        for name, number in PILLOW_SAMPLINGS.items():
            files[f"pillow {name}"] = by_pillow(picture, subsampling=number, quality=quality)
        files["pillow gray"] = by_pillow(gray, quality=quality)
        files["pillow optimized"] = by_pillow(picture, quality=quality, optimize=True)
        files["pillow gray optimized"] = by_pillow(gray, quality=quality, optimize=True)
        files["pillow rgb"] = by_pillow(picture, quality=quality, keep_rgb=True)
        files["pillow web preset"] = by_pillow(picture, quality="web_low")
        files["pillow restart blocks"] = by_pillow(picture, quality=quality, restart_marker_blocks=3)
        files["pillow restart rows"] = by_pillow(picture, quality=quality, restart_marker_rows=1)
        files["cv2 optimized"] = by_cv2(picture, cv2.IMWRITE_JPEG_OPTIMIZE, 1, *quality_option)
        files["cv2 restarts"] = by_cv2(picture, cv2.IMWRITE_JPEG_RST_INTERVAL, 2, *quality_option)
        for name, content in files.items():
            yield JpegFile(name=f"{name}, quality {quality}, {width}x{height}", content=content)


def progressive(sizes: Sizes, qualities: list[int]) -> Iterator[JpegFile]:
    for (height, width), quality in itertools.product(sizes, qualities):
        picture = make_picture(height, width)
        options: dict[str, Any] = {"quality": quality, "progressive": True}
        quality_options = (cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_QUALITY, quality)
        files = {
            f"pillow {name}": by_pillow(picture, subsampling=number, **options)
            for name, number in PILLOW_SAMPLINGS.items()
        }
        for name, value in CV2_SAMPLINGS.items():
            files[f"cv2 {name}"] = by_cv2(picture, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, value, *quality_options)
        files["pillow gray"] = by_pillow(picture[..., 0].copy(), **options)
        files["pillow rgb"] = by_pillow(picture, keep_rgb=True, **options)
        files["pillow restart blocks"] = by_pillow(picture, restart_marker_blocks=3, **options)
        restarts = by_pillow(picture, restart_marker_rows=1, **options)
        files["pillow fill bytes"] = re.sub(
            rb"\xff[\xc4\xd0-\xd7\xd9\xda]", lambda found: b"\xff\xff" + found[0], restarts
        )
        files["pillow wide quantization"] = by_pillow(picture, qtables=[[8] * 63 + [300]], **options)
        files["pillow metadata"] = by_pillow(picture, exif=exif_with_thumbnail(b""), comment=MARKERS_INSIDE, **options)
        for name, content in files.items():
            yield JpegFile(name=f"progressive {name}, quality {quality}, {width}x{height}", content=content)


def factors(sizes: Sizes, kinds: dict[str, Factors]) -> Iterator[JpegFile]:
    for (height, width), (name, values) in itertools.product(sizes, kinds.items()):
        yield make_jpeg(f"factors {name}, {width}x{height}", make_picture(height, width), factors=values)


def options(sizes: Sizes, kinds: dict[str, dict[str, Any]], samplings: list[str]) -> Iterator[JpegFile]:
    for (height, width), sampling, (name, chosen) in itertools.product(sizes, samplings, kinds.items()):
        values = {"factors": SAMPLINGS[sampling], **chosen}
        yield make_jpeg(f"{name}, {sampling}, {width}x{height}", make_picture(height, width), **values)


def restarts(sizes: Sizes, intervals: list[int], samplings: list[str]) -> Iterator[JpegFile]:
    for (height, width), sampling, interval in itertools.product(sizes, samplings, intervals):
        name = f"restart interval {interval}, {sampling}, {width}x{height}"
        yield make_jpeg(name, make_picture(height, width), factors=SAMPLINGS[sampling], restart_interval=interval)


def contents(sizes: Sizes, qualities: list[int], samplings: list[str]) -> Iterator[JpegFile]:
    for (height, width), sampling, quality, content in itertools.product(sizes, samplings, qualities, CONTENTS):
        picture = CONTENTS[content](height, width)
        name = f"{content}, quality {quality}, {sampling}, {width}x{height}"
        yield make_jpeg(name, picture, factors=SAMPLINGS[sampling], quality=quality, huffman="best")


def metadata(sizes: Sizes) -> Iterator[JpegFile]:
    for height, width in sizes:
        picture = make_picture(height, width)
        thumbnail = by_pillow(make_picture(40, 60))
        icc = np.random.default_rng(1).bytes(150_000)
        xmp = b"<x:xmpmeta>" + b" " * 2000 + b"</x:xmpmeta>"
        files = {
            "exif": by_pillow(picture, exif=exif_with_thumbnail(b"")),
            "exif with thumbnail": by_pillow(picture, exif=exif_with_thumbnail(thumbnail)),
            "icc in three segments": by_pillow(picture, icc_profile=icc),
            "xmp": by_pillow(picture, xmp=xmp),
            "comment": by_pillow(picture, comment="ein Bär"),
            "all of it": by_pillow(
                picture, exif=exif_with_thumbnail(thumbnail), icc_profile=icc, xmp=xmp, comment=MARKERS_INSIDE
            ),
        }
        for name, content in files.items():
            yield JpegFile(name=f"{name}, {width}x{height}", content=content)
        comment, empty, full = segment(0xFE, MARKERS_INSIDE), segment(0xFE), segment(0xEF, bytes(65533))
        everywhere = (comment, "header", empty, "dqt", comment, "sof", segment(0xE7, MARKERS_INSIDE), "dht", empty)
        yield make_jpeg(f"segments everywhere, {width}x{height}", picture, parts=everywhere)
        yield make_jpeg(f"segments and fill bytes everywhere, {width}x{height}", picture, parts=everywhere, fill=2)
        yield make_jpeg(f"longest segment, {width}x{height}", picture, parts=("header", full, "dqt", "sof", "dht"))
        late = ("dqt", "sof", "dht", "header", segment(0xE1, exif_with_thumbnail(thumbnail)))
        yield make_jpeg(f"late exif with thumbnail, {width}x{height}", picture, parts=late)


def large() -> Iterator[JpegFile]:
    """Yield a photograph-sized image, and images with the longest row and the longest column that libjpeg can write."""
    yield JpegFile(name="photograph", content=by_pillow(make_picture(375, 500), quality=92))
    yield JpegFile(name="longest row", content=by_pillow(flat(1, 65500)))
    yield JpegFile(name="longest column", content=by_pillow(flat(65500, 1)))


@cache
def small_corpus() -> tuple[JpegFile, ...]:
    """Return a few hundred files, some of every kind. Creating the files takes several seconds."""
    return tuple(_small_corpus())


def _small_corpus() -> Iterator[JpegFile]:
    yield from real_encoders([(20, 35)])
    yield from real_encoders([(1, 1)], quality=95)
    yield from progressive([(20, 35)], [85])
    yield from factors([(37, 29)], ODD_FACTORS)
    yield from options([(19, 33)], TABLES, ["4:2:0"])
    yield from options([(19, 33)], ODD_FRAMES, ["4:4:4"])
    yield from restarts([(30, 50)], INTERVALS, ["gray", "4:2:0"])
    yield from contents([(24, 32)], [1, 100], ["gray", "4:2:0"])
    yield from contents([(80, 96)], [100], ["gray"])
    yield from contents([(17, width) for width in (1, 2, 3, 4)], [90], ["4:1:1"])
    yield from metadata([(16, 24)])
    yield from large()
    yield from untileable_jpegs([(20, 30)])
    yield from not_jpegs()
