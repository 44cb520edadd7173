"""torchvision, the oracle for the tests of transforms. If torchvision is not installed, the tests that import this
module are skipped."""

from __future__ import annotations

from typing import Any

import pytest

from shardio.libraries import import_library

import_library("torchvision")
v1: Any = pytest.importorskip("torchvision.transforms")
v2: Any = pytest.importorskip("torchvision.transforms.v2")
tv_tensors: Any = pytest.importorskip("torchvision.tv_tensors")
functional: Any = v2.functional
