"""Every field codec passes the conformance tests, and arrays that declare too large a size are rejected."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
import safetensors.numpy

from shardio.decoding.codecs import DECODERS, TRUSTED_DECODERS, copy_arrays, decode_npy, extension_of
from shardio.images import encode_png
from shardio.testing.samples import FieldCodecTests, check_types


def write(shape: str, descr: str = "'<f8'", body: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + body


def save(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def save_zip(save_all: Any = np.savez, **arrays: Any) -> bytes:
    file = io.BytesIO()
    save_all(file, **arrays)
    return file.getvalue()


def damage_zip() -> list[bytes]:
    whole = save_zip(a=np.arange(3))
    return [whole[:-10], whole[10:], whole.replace(b"NUMPY", b"NUMPI"), b"", save_zip(a=OBJECTS)]


OBJECTS = np.array([{"a": 1}], dtype=object)
DEEP = np.arange(20, dtype=np.uint16).reshape(4, 5) * 1000
ARRAYS: dict[str, Any] = {"a": np.arange(12).reshape(3, 4), "b.c": np.zeros(0, np.float16), "d": np.array(3.5)}

HOSTILE = {
    "elements": write("(1000000000000,)"),
    "elements-that-would-fit-in-memory": write("(20000000,)"),
    "item": write("(1,)", "'|V1000000000'"),
    "items-of-nothing": write("(10000000000,)", "'|V0'"),
    "negative": write("(-1,)", body=bytes(8)),
    "dimension": write("(0, 1" + "0" * 30 + ")"),
    "cut": save(np.arange(10))[:-1],
    "objects": save(np.array([{}], dtype=object), allow_pickle=True),
    "zip": save_zip(a=np.arange(3)),
    "pickle": b"\x80\x04N.",
    "nothing": b"",
}


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
            _read_if_good(lambda each: np.load(io.BytesIO(each)), content),
            _read_if_good(decode_npy, content),
        )
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            np.testing.assert_array_equal(found, expected)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype.newbyteorder("="))
            assert found.flags.writeable


def _read_if_good(read: Any, content: bytearray) -> Any:
    try:
        return read(bytes(content))
    except Exception:  # numpy raises many types of errors.
        return None


CODECS: dict[str, tuple[str, dict[str, Any], bytes, Any, list[bytes]]] = {
    "cls": ("cls", {}, b"7\n", 7, [b"", b"x", b"1.5", b"%d" % 2**63, b"1" + b"0" * 30, b"9" * 10**5]),
    "smallest label": ("cls", {}, b"%d" % -(2**63), -(2**63), []),
    "largest label": ("cls", {}, b"%d" % (2**63 - 1), 2**63 - 1, []),
    "json": ("json", {}, b'{"a": [1, null]}', {"a": [1, None]}, [b"", b"{", b"\xff"]),
    "txt": ("txt", {}, "aé".encode(), "aé", [b"\xff"]),
    "npy": ("a.npy", {}, save(np.arange(12, dtype=">i2")), np.arange(12, dtype=">i2"), list(HOSTILE.values())),
    "npz": ("npz", {}, save_zip(**ARRAYS), ARRAYS, damage_zip()),
    "compressed npz": ("npz", {}, save_zip(np.savez_compressed, **ARRAYS), ARRAYS, []),
    "safetensors": ("safetensors", {}, safetensors.numpy.save(ARRAYS), ARRAYS, [b"", bytes(8)]),
    "msgpack": ("msgpack", {}, msgpack.packb({1: [2.5]}), {1: [2.5]}, [b"", b"\xc1"]),
    "mp": ("mp", {}, msgpack.packb("a"), "a", [b""]),
    "a mask": ("mask.png", {}, encode_png(DEEP), DEEP, [b"", encode_png(DEEP)[:-35], b"no image"]),
    "pickle": ("pkl", {"trusted": True}, pickle.dumps({1}), {1}, [b"", b"\x80"]),
    "objects": ("npy", {"trusted": True}, save(OBJECTS, allow_pickle=True), OBJECTS, [b"", b"\x93NUMPY"]),
    "zipped objects": ("npz", {"trusted": True}, save_zip(a=OBJECTS), {"a": OBJECTS}, [b"PK"]),
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


def test_the_suite_compares_the_types_of_parts() -> None:
    for found, value in (
        ({"a": (1,)}, {"a": [1]}),
        ([1.0], [1]),
        ({True: 0}, {1: 0}),
        (({1.0},), ({1},)),
        ([np.eye(2)], [np.eye(2, 2, 0, int)]),
    ):
        check_types(value, value)
        with pytest.raises(AssertionError):
            check_types(found, value)


def test_every_codec_is_tested() -> None:
    tested = {extension_of(field) for field, *_ in CODECS.values()}
    assert {*DECODERS, *TRUSTED_DECODERS} - tested <= {"msg", "pickle", "pyd"}, "other names of the same codecs"


@pytest.mark.parametrize("dtype", ["<i4", "<f8", "|u1", "<c16", "?", "<f2"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 3)])
def test_equal_npy_files_are_copied_at_once(dtype: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    arrays = [np.asarray(random.integers(0, 2, shape)).astype(dtype) for _ in range(4)]
    destination = np.zeros((4, *shape), np.dtype(dtype))
    assert copy_arrays([save(array) for array in arrays], destination)
    assert (destination == np.stack(arrays)).all()


def test_other_npy_files_are_left_to_the_decoder() -> None:
    fits = save(np.arange(6, dtype=np.int32).reshape(2, 3))
    others = [None, b"", fits[:-1], fits + b"1", b"\x94" + fits[1:]]
    others += [
        fits.replace(b"'shape': (2, 3)", b"'shape': (3, 2)"),
        fits.replace(b"<i4", b">i4"),
        fits.replace(b"<i4", b"<f4"),
        save(np.asfortranarray(np.ones((2, 3), np.int32))),
        save(np.ones((2, 3), np.int64)),
        save(np.array([None]), allow_pickle=True),
        fits.replace(b"'descr'", b"'descX'"),
    ]
    for other in others:
        for contents in ([other, fits], [fits, other], [other]):
            destination = np.full((len(contents), 2, 3), 7, np.int32)
            assert not copy_arrays(contents, destination), other
            assert (destination == 7).all()
    assert not copy_arrays([], np.empty((0, 2, 3), np.int32))
