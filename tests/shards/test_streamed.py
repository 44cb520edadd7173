"""A tar that is read as a stream has the samples that its index has, and is refused where an index is."""

from __future__ import annotations

import gzip
import io
import random
import re
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from shardio.errors import FormatError
from shardio.shards.sources import scan_contents
from shardio.shards.tar import END
from shardio.shards.tar_scan import IncompleteTarError, StreamedTar
from shardio.storage import Location
from tests.memory_store import MemoryStore
from tests.shards.hostile_tars import damage
from tests.shards.test_hostile_tars import HOSTILE, LONG_NAME, MEMBER, make_pax
from tests.tars import Samples, read_with_webdataset, write_tar

FIELDS = ("txt", "cls", "seg.png", "")


def stream(content: bytes, piece: int = 1000) -> Samples:
    """Return the samples of a tar that arrives in pieces."""
    file = io.BytesIO(content)
    tar = StreamedTar("a.tar", lambda: file.read(piece), FIELDS)
    return [(sample.key, sample.contents) for sample in tar.samples()]


def index(content: bytes) -> Samples:
    """Return the samples that an index of a tar would have."""
    location = Location(store=MemoryStore({"a.tar": content}), key="a.tar")
    with closing(location.open()) as file:
        found = scan_contents(file).samples
    return [
        (
            sample.key,
            {
                name: content[field.offset : field.offset + field.size]
                for name, field in sample.fields.items()
                if name in FIELDS
            },
        )
        for sample in found
    ]


@pytest.fixture(scope="module")
def tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    members = [(f"k/{i}.{field}", bytes([i]) * (i * 300)) for i in range(8) for field in ("txt", "CLS", "seg.png")]
    write_tar(path, [("README", b"x"), ("._a.txt", b"x"), *members, ("k/" + "ü" * 150 + ".txt", b"long")])
    return path


@pytest.mark.parametrize("piece", [1, 511, 512, 2**20])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_samples_are_those_of_webdataset(tar: Path, piece: int, is_compressed: bool) -> None:
    content = gzip.compress(tar.read_bytes()) if is_compressed else tar.read_bytes()
    expected = [each for each in read_with_webdataset(tar) if each[0] != "._a"]
    assert stream(content, piece) == expected == index(tar.read_bytes())


def test_a_tar_that_is_cut_anywhere_is_refused_after_complete_samples(tar: Path) -> None:
    content = tar.read_bytes()
    whole = stream(content)
    end = len(content.rstrip(b"\0")) // 512 * 512 + 1024  # After the first block of the end mark.
    for block in range(0, len(content), 512):
        for cut in (block - 1, block, block + 100):
            file, seen = io.BytesIO(content[: max(cut, 0)]), []
            samples = StreamedTar("a.tar", lambda file=file: file.read(700), FIELDS).samples()  # type: ignore[misc]
            try:
                seen += [(sample.key, sample.contents) for sample in samples]
                is_refused = False
            except IncompleteTarError:
                is_refused = True
            assert is_refused == (cut < end), cut
            assert seen == whole[: len(seen)]


def test_a_compressed_tar_that_is_cut_is_refused(tar: Path) -> None:
    content = gzip.compress(tar.read_bytes())
    for cut in (1, 9, len(content) // 2, len(content) - 5, len(content) - 1):
        with pytest.raises(IncompleteTarError):
            stream(content[:cut])


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_false_headers_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        stream(content + END, 2**16)


@pytest.mark.parametrize("content", [MEMBER, LONG_NAME + MEMBER, make_pax("size", "2") + MEMBER])
def test_right_headers_are_read(content: bytes) -> None:
    assert stream(content + END) == index(content + END)


@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_a_damaged_tar_is_read_or_refused_as_by_the_index(seed: int, piece: int) -> None:
    rng = random.Random(seed)
    content = bytearray(
        b"".join(LONG_NAME * (i % 3 == 0) + MEMBER.replace(b"a.txt", b"%d.txt" % i, 1) for i in range(4)) + END
    )
    damage(content, rng)
    try:
        expected: Samples | None = index(bytes(content))
    except FormatError:
        expected = None
    try:
        found: Samples | None = stream(bytes(content), piece)
    except FormatError:
        found = None
    assert found == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"<html>" * 200, "not a complete tar"),
        (2 * (MEMBER + END), r"a.tar has data after its end mark, at byte 2048"),
        (2 * MEMBER + END, r"a.tar holds field 'txt' of sample a twice, the second time at byte 1536"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), r"compressed with zstd.* zstd -dc"),
    ],
)
def test_what_is_no_tar_of_samples_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=re.compile(message)):
        stream(content)
