"""Conformance tests of shardio's interfaces.

Users pass their own transforms as ``transform=``, and their own field decoders as ``decoders=``. An implementation
of any other interface also needs a line in a table in shardio's source code; the interface's documentation names the
table.

Each class holds the pytest tests of one interface. Subclass it in your own tests and override its fixtures:

- ``executor.ExecutorTests``: the part of a loader that makes its batches.
- ``pack_source.PackSourceTests``: a kind of dataset that can be packed.
- ``store.StoreTests``: a storage backend.
- ``image_format.ImageFormatTests``: a format of images.
- ``samples.FieldCodecTests``: a decoder of a field.
- ``samples.TransformTests``: a transform of images.
- ``samples.RemainderPolicyTests``: the treatment of an epoch's last samples.

This module is also a pytest plugin, which provides the fixture ``assert_exactly_once``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(name="assert_exactly_once")
def _assert_exactly_once() -> Callable[..., None]:
    """Assert that a loader delivers every sample exactly once.

    See shardio.check.assert_exactly_once.

    ::

        def test_my_loader(assert_exactly_once):
            assert_exactly_once(make_loader(num_workers=4), expected=1000, key="id")
    """
    from shardio.check import assert_exactly_once

    return assert_exactly_once
