"""Write the golden orders that every release must reproduce.

If an order changes between releases, runs cannot be resumed. An order must therefore change only on purpose: increment
STATE_VERSION in shardio/order/state.py, run this script, and document the change in CHANGELOG.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from shardio.order import EpochOrder, OrderSettings, choose_settings
from shardio.order.state import STATE_VERSION

GOLDEN = Path(__file__).parent.parent / "tests" / "order" / "golden_orders.json"

SHARDS = {
    "one small shard": [7],
    "unlike shards, one empty": [5, 0, 13, 1, 40, 8],
    "many equal shards": [100] * 64,
    "10^11 samples": [10**8] * 1000,
}


def make_cases() -> list[dict[str, Any]]:
    """Return the orders of several datasets and settings, at some positions of several epochs."""
    cases = []
    for name, sizes in SHARDS.items():
        shard_sizes = np.array(sizes, dtype=np.int64)
        num_samples = int(shard_sizes.sum())
        chosen = [choose_settings(shard_sizes, shuffle=True, seed=seed) for seed in (0, 2**63 - 1)]
        chosen.append(OrderSettings(shuffle=True, seed=1, window=8, strata=4))
        positions = np.unique(np.linspace(0, num_samples - 1, 24).astype(np.int64))
        for settings in chosen:
            for epoch in (0, 1, 2**40):
                samples = EpochOrder(shard_sizes, settings, epoch).samples_at(positions)
                cases.append(
                    {
                        "dataset": name,
                        "seed": settings.seed,
                        "window": settings.window,
                        "strata": settings.strata,
                        "epoch": epoch,
                        "positions": positions.tolist(),
                        "samples": samples.tolist(),
                    }
                )
    return cases


def main() -> None:
    """Write the file of golden orders."""
    rows = ",\n".join(json.dumps(case) for case in make_cases())
    GOLDEN.write_text(f'{{"version": {STATE_VERSION}, "cases": [\n{rows}\n]}}\n')
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    main()
