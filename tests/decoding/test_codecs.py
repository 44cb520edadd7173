"""Every field codec passes the conformance tests, and arrays that declare too large a size are refused."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import safetensors.numpy

import shardio
from shardio import ShardDataset
from shardio.decoding.codecs import DECODERS, TRUSTED_DECODERS, copy_arrays, decode_npy, extension_of
from shardio.images import encode_png
from shardio.testing.samples import FieldCodecTests, check_types
from tests.sources import write_images


def write(shape: str, descr: str = "'<f8'", body: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + body


def save(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def save_zip(array: Any = np.arange(3)) -> bytes:  # noqa: B008  # It is not changed.
    file = io.BytesIO()
    np.savez(file, a=array)
    return file.getvalue()


def damage_zip() -> list[bytes]:
    whole = save_zip()
    return [whole[:-10], whole[10:], whole.replace(b"NUMPY", b"NUMPI"), b"", save_zip(OBJECTS)]


OBJECTS = np.array([{"a": 1}], dtype=object)
DEEP = np.arange(20, dtype=np.uint16).reshape(4, 5) * 1000


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


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0:UserWarning")
def test_a_saved_array_is_read_back() -> None:
    big_endian, structured = np.arange(12, dtype=">i2").reshape(3, 4), np.array([(1, 2.0)], [("é", "i4"), ("b", "f8")])
    for array in (big_endian, np.asfortranarray(np.eye(3)), np.float32(1.5), np.empty((0, 7)), structured, "aü"):
        found = decode_npy(save(array))
        np.testing.assert_array_equal(found, array)
        assert found.dtype == np.asarray(array).dtype.newbyteorder("="), "torch supports no other byte order"


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0:UserWarning")
@pytest.mark.parametrize(
    "dtype", [">i4", "<f2", "?", "M8[s]", "U3", [("a", "<i2"), ("b", ">f4", (2,))], [("é", "i4")]], ids=str
)
def test_damaged_files_are_read_as_numpy_reads_them_or_refused(dtype: Any) -> None:
    random = np.random.default_rng(0)
    for _ in range(400):
        shape = random.integers(0, 5, random.integers(4))
        content = bytearray(save(np.zeros(shape, dtype, order=random.choice(["C", "F"]))))
        for _ in range(random.integers(3)):
            content[random.integers(128)] = random.integers(256)
        expected, found = (
            _read_if_good(read, bytes(content)) for read in (lambda each: np.load(io.BytesIO(each)), decode_npy)
        )
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            np.testing.assert_array_equal(found, expected)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype.newbyteorder("="))
            assert found.flags.writeable


def _read_if_good(read: Any, content: bytes) -> Any:
    try:
        return read(content)
    except Exception:  # numpy raises many types of errors.
        return None


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


CODECS: dict[str, tuple[str, dict[str, Any], bytes, Any, list[bytes]]] = {
    "cls": ("cls", {}, b"7\n", 7, [b"", b"x", b"1.5", b"%d" % 2**63, b"1" + b"0" * 30, b"9" * 10**5]),
    "smallest label": ("cls", {}, b"%d" % -(2**63), -(2**63), []),
    "largest label": ("cls", {}, b"%d" % (2**63 - 1), 2**63 - 1, []),
    "json": ("json", {}, b'{"a": [1, null]}', {"a": [1, None]}, [b"", b"{", b"\xff"]),
    "txt": ("txt", {}, "aé".encode(), "aé", [b"\xff"]),
    "npy": ("a.npy", {}, save(np.arange(12, dtype=">i2")), np.arange(12, dtype=">i2"), list(HOSTILE.values())),
    "npz": ("npz", {}, save_zip(), {"a": np.arange(3)}, damage_zip()),
    "safetensors": ("safetensors", {}, safetensors.numpy.save({"a": np.eye(2)}), {"a": np.eye(2)}, [b"", bytes(8)]),
    "msgpack": ("msgpack", {}, msgpack.packb({1: [2.5]}), {1: [2.5]}, [b"", b"\xc1"]),
    "mp": ("mp", {}, msgpack.packb("a"), "a", [b""]),
    "a mask": ("mask.png", {}, encode_png(DEEP), DEEP, [b"", encode_png(DEEP)[:-35], b"no image"]),
    "pickle": ("pkl", {"trusted": True}, pickle.dumps({1}), {1}, [b"", b"\x80"]),
    "objects": ("npy", {"trusted": True}, save(OBJECTS, allow_pickle=True), OBJECTS, [b"", b"\x93NUMPY"]),
    "zipped objects": ("npz", {"trusted": True}, save_zip(OBJECTS), {"a": OBJECTS}, [b"PK"]),
    "bytes": ("flac", {}, b"abc", b"abc", []),
    "a user decoder": ("flac", {"decoders": {"flac": bytes.decode}}, b"abc", "abc", [b"\xff"]),
}


class TestCodecs(FieldCodecTests):
    @pytest.fixture(params=CODECS)
    def codec(self, request: pytest.FixtureRequest) -> Any:
        return CODECS[request.param]

    field, settings, content, value, damaged = (
        pytest.fixture(lambda self, codec, number=number: codec[number]) for number in range(5)
    )


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ({"a": (1,)}, {"a": [1]}),
        ([1.0], [1]),
        ({True: 0}, {1: 0}),
        (({1.0},), ({1},)),
        ([np.eye(2)], [np.eye(2, 2, 0, int)]),
    ],
)
def test_the_suite_compares_the_types_of_parts(found: Any, value: Any) -> None:
    check_types(value, value)
    with pytest.raises(AssertionError):
        check_types(found, value)


def test_every_codec_is_tested() -> None:
    tested = {extension_of(field) for field, *_ in CODECS.values()}
    assert {*DECODERS, *TRUSTED_DECODERS} - tested <= {"msg", "pickle", "pyd"}, "other names of the same codecs"


@pytest.mark.parametrize(("field", "content"), [("npy", save(OBJECTS, allow_pickle=True)), ("npz", save_zip(OBJECTS))])
def test_objects_are_read_only_if_the_user_trusts_them(field: str, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"it holds Python objects.*trusted=True"):
        DECODERS[field](content)


def write_npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["<i4", "<f8", "|u1", "<c16", "?", "<f2"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 3)])
def test_equal_npy_files_are_copied_at_once(dtype: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    arrays = [np.asarray(random.integers(0, 2, shape)).astype(dtype) for _ in range(4)]
    destination = np.zeros((4, *shape), np.dtype(dtype))
    assert copy_arrays([write_npy(array) for array in arrays], destination)
    assert (destination == np.stack(arrays)).all()


def test_other_npy_files_are_left_to_the_decoder() -> None:
    fits = write_npy(np.arange(6, dtype=np.int32).reshape(2, 3))
    others = [
        None,
        b"",
        fits[:-1],
        fits + b"1",
        b"\x94" + fits[1:],
        fits.replace(b"'shape': (2, 3)", b"'shape': (3, 2)"),
        fits.replace(b"<i4", b">i4"),
        fits.replace(b"<i4", b"<f4"),
        write_npy(np.asfortranarray(np.ones((2, 3), np.int32))),
        write_npy(np.ones((2, 3), np.int64)),
        write_npy(np.array([None])),
        fits.replace(b"'descr'", b"'descX'"),
    ]
    for other in others:
        for contents in ([other, fits], [fits, other], [other]):
            destination = np.full((len(contents), 2, 3), 7, np.int32)
            assert not copy_arrays(contents, destination), other
            assert (destination == 7).all()
    assert not copy_arrays([], np.empty((0, 2, 3), np.int32))
