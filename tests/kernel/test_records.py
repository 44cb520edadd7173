"""Python's records and constants are those of the C headers, with the same fields in the same places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardio.kernel import operations, records
from shardio.kernel.targets import FOLDER

NAMES_IN_C = {"IMAGES_AT_ONCE": "NUM_CHAINS", "READ_PADDING": "PADDING"}
"""The constants that have different names in C."""

OF_PYTHON = {"INTERPOLATION", "SLACK", "WORKSPACE_BYTES"}
"""The constants that C does not have: decoder.h itself checks the size of a workspace."""


def test_records_and_constants_are_those_of_the_headers(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="it is the compiler")
    lines = ['#include "decoder.h"']  # It includes kernel.h.
    for name, value in {**vars(operations), **vars(records)}.items():
        if isinstance(value, int) and name not in OF_PYTHON:
            lines.append(f'_Static_assert({NAMES_IN_C.get(name, name)} == {value}, "{name}");')
    assert len(lines) > 35, "all codes are compared"
    for name, record in vars(records).items():
        if isinstance(record, np.dtype) and record.fields is not None:
            struct = "".join(part.capitalize() for part in name.split("_"))
            lines.append(f'_Static_assert(sizeof({struct}) == {record.itemsize}, "{struct}");')
            for field, (kind, offset, *_) in record.fields.items():
                place = (
                    f"offsetof({struct}, {field}) == {offset} && sizeof((({struct} *)0)->{field}) == {kind.itemsize}"
                )
                lines.append(f'_Static_assert({place}, "{struct}.{field}");')
    assert len(lines) > 80, "all fields of all records are compared"
    (tmp_path / "records.c").write_text("\n".join(lines))
    command = [sys.executable, "-m", "ziglang", "cc", "-std=gnu11", "-c", f"-I{FOLDER}"]
    subprocess.run([*command, str(tmp_path / "records.c"), "-o", str(tmp_path / "records.o")], check=True)
