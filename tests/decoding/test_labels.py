from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardio.decoding import FieldDecoder
from shardio.errors import SampleError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import open_table, write_shard
from shardio.storage import parse_location
from shardio.transforms import Calls


def read_label(path: Path, content: bytes) -> object:
    write_shard(parse_location(path / "a.tar"), [Sample(key="a", fields={"cls": content}, origin="")])
    samples = SampleReader(open_table([path / "a.tar"])).read(np.array([0]), ["cls"])
    return FieldDecoder(fields="label").decode_columns(samples, np.zeros(1, np.uint64), Calls())[0][0]


@pytest.mark.parametrize("label", [-(2**63), 0, 2**63 - 1])
def test_a_label_of_64_bits_is_read(tmp_path: Path, label: int) -> None:
    assert read_label(tmp_path, b"%d\n" % label) == label


@pytest.mark.parametrize("content", [b"%d" % 2**63, b"1" + b"0" * 30, b"9" * 10**5])
def test_a_larger_label_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SampleError, match=r"'cls' of sample a in .*a\.tar at byte 512 cannot be decoded"):
        read_label(tmp_path, content)
