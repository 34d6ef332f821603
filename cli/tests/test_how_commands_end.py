"""Exit codes and the one sentence of commands that do not end by themselves."""

import pytest

from trinity.cli.errors import RunError, ending_well

pytestmark = pytest.mark.core


def test_ctrl_c_before_anything_started_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert ending_well(interrupted) == 130
    assert capsys.readouterr().err == "trinity: ended by SIGINT\n"


def test_the_first_error_of_a_group_is_the_one_said(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> int:
        raise ExceptionGroup("tasks", [ExceptionGroup("more", [RunError("the disk is full", 7)]), RunError("second")])

    assert ending_well(failing) == 7
    assert capsys.readouterr().err == "trinity: the disk is full\n"


def test_a_defect_keeps_its_traceback() -> None:
    def broken() -> int:
        raise ExceptionGroup("tasks", [ZeroDivisionError()])

    with pytest.raises(ExceptionGroup):
        ending_well(broken)
