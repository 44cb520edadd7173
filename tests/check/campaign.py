"""All cases of the checker's campaign. ``tools/check_campaign.py`` runs them, as the tests do."""

from __future__ import annotations

from tests.check import planted, planted_runs, unusual

PLANTED = [*planted.case.cases, *planted_runs.case.cases]
UNUSUAL = unusual.case.cases
