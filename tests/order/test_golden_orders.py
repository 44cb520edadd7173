"""The orders of this release are those of the last one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from shardio.order import EpochOrder, OrderSettings
from shardio.order.state import STATE_VERSION
from tools.freeze_orders import SHARDS

GOLDEN = json.loads((Path(__file__).parent / "golden_orders.json").read_text())


def test_the_frozen_orders_belong_to_this_version() -> None:
    assert GOLDEN["version"] == STATE_VERSION
    assert len(GOLDEN["cases"]) == 4 * 3 * 3


def test_orders_are_the_frozen_ones() -> None:
    for case in GOLDEN["cases"]:
        settings = OrderSettings(shuffle=True, seed=case["seed"], lanes=case["lanes"], window=case["window"])
        order = EpochOrder(np.array(SHARDS[case["dataset"]]), settings, case["epoch"])
        assert order.samples_at(np.array(case["positions"])).tolist() == case["samples"], case
