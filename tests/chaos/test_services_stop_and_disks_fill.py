"""Each case of whole runs with stopped services, jumping clocks, a full disk and cut stores, once."""

from pathlib import Path

import pytest

from chaos.cases import Case, Chosen
from chaos.service_cases import CASES, MADE

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_goes_on_once_the_cause_has_ended(
    case: Case, quickstart_model: Path, quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(quickstart_model)
    (tmp_path / "data").symlink_to(quickstart_data)
    monkeypatch.setenv(MADE, str(tmp_path))
    rows = case.play(Chosen(runs=1, kills=0, seed=7, quick=True, say=print))
    if not any(row.runs for row in rows):
        pytest.skip(rows[0].invariant)
    assert [violation for row in rows for violation in row.violations] == []
