"""Python's records and those of kernel.h have the same fields, at the same places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardio.kernel import records
from shardio.kernel.targets import FOLDER


def test_records_are_those_of_the_header(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="it is the compiler")
    lines = ['#include "kernel.h"']
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
