"""All cases of the checker's campaign. ``tools/check_campaign.py`` runs them, and the tests run the quick ones."""

from __future__ import annotations

from tests.check import (
    planted_keys,
    planted_runs,
    planted_samples,
    planted_shares,
    unusual_loaders,
    unusual_orders,
    unusual_runs,
    unusual_samples,
)

PLANTED = [case for part in (planted_samples, planted_shares, planted_keys, planted_runs) for case in part.case.cases]
_RIGHT = (unusual_loaders, unusual_orders, unusual_samples, unusual_runs)
UNUSUAL = [case for part in _RIGHT for case in part.case.cases]
