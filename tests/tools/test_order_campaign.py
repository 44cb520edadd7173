from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import typer

from tests.order.laws import Case, LawBrokenError
from tests.processes import run_python

# Not an import statement: tools/ is not a package, and mypy knows its files by other names.
order_campaign = import_module("tools.order_campaign")


@pytest.mark.slow
def test_a_campaign_reports_the_number_of_cases() -> None:
    script = Path(__file__).parents[2] / "tools" / "order_campaign.py"
    done = run_python(script, "--cases", 40, "--seed", 3, cwd=script.parent)
    assert done.stdout.startswith("the laws hold for all 40 cases of seed 3")


def test_a_seed_determines_its_case() -> None:
    assert order_campaign.draw_case(7) == order_campaign.draw_case(7)
    assert len({repr(order_campaign.draw_case(seed)) for seed in range(100)}) == 100


@pytest.mark.parametrize("error", [LawBrokenError("it does not hold"), IndexError("out of bounds")])
def test_a_failing_case_is_named_and_fails_again_when_run_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = order_campaign.draw_case(1234)

    def check_laws(case: Case) -> None:
        if case == wrong:
            raise error

    monkeypatch.setattr(order_campaign, "check_laws", check_laws)
    failure = order_campaign.check_chunk(range(1200, 1300))
    assert str(error) in failure
    assert repr(wrong) in failure
    assert "--only 1234" in failure
    with pytest.raises(typer.Exit) as exit_info:
        order_campaign.main(only=1234)
    assert exit_info.value.exit_code == 1
    out = capsys.readouterr().out
    assert str(error) in out
    assert repr(wrong) in out
    with pytest.raises(typer.Exit) as exit_info:
        order_campaign.main(only=1235)
    assert exit_info.value.exit_code == 0
