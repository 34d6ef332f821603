"""Every mutation of tests/mutations finds its line, once, and its test. run_mutations.py shows that tests catch it."""

from pathlib import Path

import pytest
from mutations.mutation import Mutation
from mutations.run_mutations import mutate, mutations, problem

pytestmark = pytest.mark.core

A = Mutation("a.py", "x = 1", "x = 2", "test_a.py::test")


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_its_line_is_there_once_and_its_test_exists(mutation: Mutation, repository: Path) -> None:
    assert problem(mutation) == ""
    file, name = mutation.test.partition("[")[0].split("::")[0], mutation.test.partition("[")[0].split("::")[-1]
    assert f"def {name}(" in (repository / file).read_text()


@pytest.mark.parametrize("text", ["", "x = 1\nx = 1\n"], ids=["gone", "twice"])
def test_a_line_that_is_gone_or_there_twice_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "test_a.py").touch()
    with pytest.raises(ValueError, match=r"'x = 1' occurs [02] times in a\.py, not once"):
        mutate(A, tmp_path)


def test_a_line_that_is_there_once_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("# one\nx = 1\n")
    (tmp_path / "test_a.py").touch()
    mutate(A, tmp_path)
    assert (tmp_path / "a.py").read_text() == "# one\nx = 2\n"
