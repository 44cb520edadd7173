"""Arrays and labels in files: what is declared or written too large is refused before memory is allocated for it."""

from __future__ import annotations

import io
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardio
from shardio import ShardDataset
from shardio.decoding import FieldDecoder
from shardio.decoding.codecs import decode_npy, decode_npz
from shardio.errors import SampleError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import open_table, write_shard
from shardio.storage import parse_location
from shardio.transforms import Calls
from tests.sources import write_images


def write(shape: str, descr: str = "'<f8'", body: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + body


def save(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def save_zip() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


HOSTILE = {
    "elements": write("(1000000000000,)"),
    "elements-that-would-fit-in-memory": write("(20000000,)"),
    "item": write("(1,)", "'|V1000000000'"),
    "items-of-nothing": write("(10000000000,)", "'|V0'"),
    "negative": write("(-1,)", body=bytes(8)),
    "dimension": write("(0, 1" + "0" * 30 + ")"),
    "cut": save(np.arange(10))[:-1],
    "objects": save(np.array([{}], dtype=object), allow_pickle=True),
    "zip": save_zip(),
    "pickle": b"\x80\x04N.",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_hostile_file_is_refused_before_memory_is_allocated(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, OverflowError)):
            decode_npy(HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0:UserWarning")
def test_a_saved_array_is_read_back() -> None:
    big_endian, structured = np.arange(12, dtype=">i2").reshape(3, 4), np.array([(1, 2.0)], [("é", "i4"), ("b", "f8")])
    for array in (big_endian, np.asfortranarray(np.eye(3)), np.float32(1.5), np.empty((0, 7)), structured, "aü"):
        found = decode_npy(save(array))
        np.testing.assert_array_equal(found, array)
        assert found.dtype == np.asarray(array).dtype.newbyteorder("="), "torch takes no other byte order"


def test_objects_are_read_only_if_the_caller_trusts_them() -> None:
    content = save(np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert decode_npy(content, trusted=True).tolist() == [{"a": 1}]
    with pytest.raises(ValueError, match="trusted=True"):
        decode_npy(content)


@pytest.mark.parametrize("save_all", [np.savez, np.savez_compressed])
def test_npz_and_safetensors_files_are_dicts_of_arrays(save_all: Any, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"a": np.arange(12).reshape(3, 4), "b.c": np.zeros(0, np.float16), "d": np.array(3.5)}
    file = io.BytesIO()
    save_all(file, **arrays)
    write_images(tmp_path / "images", classes=1, per_class=2, width=16, height=16)
    for image in list((tmp_path / "images").rglob("*.jpg")):
        image.with_suffix(".npz").write_bytes(file.getvalue())
        image.with_suffix(".safetensors").write_bytes(safetensors.numpy.save(arrays))
    shardio.pack(tmp_path / "images", tmp_path / "packed")
    for sample in ShardDataset(tmp_path / "packed", fields=("npz", "safetensors")):
        for found in sample:
            assert found.keys() == arrays.keys()
            for name, array in arrays.items():
                assert found[name].dtype == array.dtype
                assert np.array_equal(found[name], array)


def test_damaged_npz_files_and_those_with_objects_are_refused() -> None:
    whole = save_zip()
    for content in (whole[:-10], whole[10:], whole.replace(b"NUMPY", b"NUMPI"), b""):
        with pytest.raises(ValueError, match=r"."):
            decode_npz(content)
    file = io.BytesIO()
    np.savez(file, a=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="it holds Python objects"):
        decode_npz(file.getvalue())
    assert decode_npz(file.getvalue(), trusted=True)["a"].tolist() == [{"a": 1}]


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
