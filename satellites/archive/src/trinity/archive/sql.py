"""The archive as tables of an SQL database: sqlite, or PostgreSQL by psycopg.

Table `<name>` has one row per experience, keyed by (run, log_sequence, index_in_group). Table `<name>_position` has the
position of each run. Several runs may share both. An append is one transaction. It begins by locking its run's
position, so two writers cannot both store a group.

Arrays are bytes, little-endian (token_ids int32, log-probabilities float32, action_mask a byte each); objects are JSON.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from trinity.archive.rows import ARRAYS, KEY, LATER, OBJECTS, TYPES, ExperienceRow, not_archived, rows_of
from trinity.data.experience import Group
from trinity.runtime.errors import InvalidInput, Unavailable

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_LOCK_SECONDS = 30
_CONNECT_SECONDS = 10
_OPENING = int.from_bytes(b"trinity", "big")


class _Text(sa.types.TypeDecorator[str]):
    """Text that may have NUL characters, which PostgreSQL refuses: NUL is stored as ␀0, and ␀ as ␀␀."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return value and value.replace("␀", "␀␀").replace("\0", "␀0")

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or "␀" not in value:
            return value
        return "␀".join(part.replace("␀0", "\0") for part in value.split("␀␀"))


_TYPES: dict[str, type[sa.types.TypeEngine[Any]]] = {
    **dict.fromkeys(("text", "json"), _Text),
    **dict.fromkeys(ARRAYS.values(), sa.LargeBinary),
    "int32": sa.Integer,
    "int64": sa.BigInteger,
    "float64": sa.Double,
}


class SqlArchive:
    """The groups of one run in a database. Raises Unavailable if it does not answer; the call may be repeated."""

    def __init__(self, path: str, name: str, run: str) -> None:
        self._database, self._run = Database(path), run
        self._rows, self._positions = _tables(name)
        if self._database.file is not None:
            self._database.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._prepare()
        except BaseException:
            self._database.close()
            raise

    def position(self) -> int:
        with self._database.transaction() as connection:
            return self._position(connection)

    def append(self, groups: Sequence[tuple[int, Group]], position: int) -> None:
        with self._database.transaction() as connection:
            mine = sa.update(self._positions).where(self._positions.c.run == self._run)
            connection.execute(mine.values(position=self._positions.c.position))
            archived = self._position(connection)
            new = not_archived(groups, archived, position)
            if new:
                connection.execute(sa.insert(self._rows), [_encoded(row) for row in rows_of(self._run, new)])
            connection.execute(mine.values(position=max(position, archived)))

    def close(self) -> None:
        self._database.close()

    def _position(self, connection: sa.Connection) -> int:
        query = sa.select(self._positions.c.position).where(self._positions.c.run == self._run)
        return connection.execute(query).scalar_one()

    def _prepare(self) -> None:
        """Create missing tables. Raises InvalidInput for tables of other programs."""
        tables = self._rows, self._positions
        with self._database.transaction() as connection:
            _one_at_a_time(connection)
            for table in tables:
                if sa.inspect(connection).has_table(table.name) and self._database.is_older(connection, table):
                    connection.execute(_with_later(table))
            for table in tables:
                connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
            known = sa.select(self._positions.c.run).where(self._positions.c.run == self._run)
            if connection.execute(known).first() is None:
                connection.execute(sa.insert(self._positions).values(run=self._run, position=0))


class SqlRows:
    """The rows of all runs in an archive's table. Only the keys of the groups are in memory."""

    def __init__(self, path: str, name: str) -> None:
        self._database = Database(path, must_exist=True)
        self._table, _ = _tables(name)
        with self._database.transaction() as connection:
            self._columns = [*self._table.c]
            if self._database.is_older(connection, self._table):
                self._columns = [column for column in self._table.c if column.name != LATER]

    def close(self) -> None:
        self._database.close()

    def groups(self) -> list[tuple[str, int]]:
        """(run, log sequence) of each group, in this order."""
        key = self._table.c.run, self._table.c.log_sequence
        with self._database.transaction() as connection:
            found = connection.execute(sa.select(*key).distinct().order_by(*key))
            return [(run, sequence) for run, sequence in found]

    def rows(self, group: tuple[str, int]) -> list[tuple[str, ExperienceRow]]:
        """Rows of a group with their places."""
        run, sequence = group
        columns = self._table.c
        query = sa.select(*self._columns).where(columns.run == run, columns.log_sequence == sequence)
        with self._database.transaction() as connection:
            found = connection.execute(query.order_by(columns.index_in_group)).all()
        place = f"{self._database} table {self._table.name} run {run} log_sequence {sequence} index_in_group"
        return [(f"{place} {row.index_in_group}", row._asdict()) for row in found]


class Database:
    """An SQLAlchemy engine whose errors are Trinity's exceptions. `file` is the path of an sqlite database."""

    def __init__(self, path: str, must_exist: bool = False) -> None:
        url = _url(path)
        self.file = Path(url.database or "") if url.drivername == "sqlite" else None
        self._shown = url.set(query={}).render_as_string(hide_password=True)
        if must_exist and self.file is not None and not self.file.is_file():
            raise InvalidInput("path", f"{self.file} does not exist")
        try:
            self.engine = sa.create_engine(
                url, connect_args=_connect_args(url), pool_pre_ping=True, hide_parameters=True
            )
        except ImportError as error:
            raise InvalidInput(
                "path", f"is {self}; PostgreSQL needs psycopg ({error}); pip install -e '.[postgresql]'"
            ) from None

    def __str__(self) -> str:
        return self._shown

    def close(self) -> None:
        self.engine.dispose()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        try:
            with self.engine.begin() as connection:
                yield connection
        except exc.OperationalError as error:
            raise Unavailable(f"{self}: {error.orig}") from error
        except exc.DBAPIError as error:
            raise InvalidInput("path", f"{self}: {error.orig}") from error

    def is_older(self, connection: sa.Connection, table: sa.Table) -> bool:
        """Returns True if the table lacks LATER. Raises InvalidInput unless it has exactly the other columns."""
        try:
            there = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
        except exc.NoSuchTableError:
            raise InvalidInput("name", f"{self} has no table {table.name}; {self.tables(connection)}") from None
        older = LATER in table.columns and LATER not in there
        if there | ({LATER} if older else set()) != set(table.columns.keys()):
            other = ", ".join(sorted(there ^ set(table.columns.keys())))
            raise InvalidInput(
                "name", f"{self} has a table {table.name} that is no archive (differs in {other}); name another one"
            )
        return older

    def tables(self, connection: sa.Connection) -> str:
        inspector = sa.inspect(connection)
        names = sorted(inspector.get_table_names() + inspector.get_view_names())
        return f"its tables are {', '.join(names)}" if names else "it has no tables"


def _one_at_a_time(connection: sa.Connection) -> None:
    """Makes other processes that open an archive in this database wait for the end of the transaction."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_OPENING)))


def _tables(name: str) -> tuple[sa.Table, sa.Table]:
    metadata = sa.MetaData()
    columns = [
        sa.Column(column, _TYPES[kind], primary_key=column in KEY, autoincrement=False)
        for column, kind in TYPES.items()
    ]
    positions = sa.Table(
        f"{name}_position",
        metadata,
        sa.Column("run", _Text, primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False),
    )
    return sa.Table(name, metadata, *columns), positions


def _with_later(table: sa.Table) -> sa.DDL:
    return sa.DDL(f"ALTER TABLE %(fullname)s ADD COLUMN {LATER} TEXT").against(table)


def _encoded(row: dict[str, Any]) -> dict[str, Any]:
    given = {column: dtype for column, dtype in ARRAYS.items() if row[column] is not None}
    arrays = {column: row[column].astype(dtype, copy=False).tobytes() for column, dtype in given.items()}
    objects = {column: json.dumps(row[column], ensure_ascii=False) for column in OBJECTS}
    return row | arrays | objects


def _url(path: str) -> sa.URL:
    if "://" not in path:
        return sa.URL.create("sqlite", database=str(Path(path).expanduser()))
    try:
        url = sa.make_url(path)
    except (exc.ArgumentError, ValueError):
        raise InvalidInput("path", "cannot be read as a URL; postgresql://user:password@host:5432/database") from None
    if url.drivername not in _DRIVERS:
        raise InvalidInput("path", f"is a {url.drivername}:// URL; use one of {', '.join(_DRIVERS)}")
    url = url.set(drivername=_DRIVERS[url.drivername])
    if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
        raise InvalidInput("path", "is an sqlite database in memory, which ends with the process; name a file")
    return url


def _connect_args(url: sa.URL) -> dict[str, Any]:
    """Time limits that the URL does not set."""
    if url.drivername == "sqlite":
        ours = {"timeout": _LOCK_SECONDS}
    else:
        ours = {"connect_timeout": _CONNECT_SECONDS, "tcp_user_timeout": 1000 * _LOCK_SECONDS}
    return {name: value for name, value in ours.items() if name not in url.query}


def columns_of(path: str, name: str) -> set[str]:
    """Names of a table's columns. Returns an empty set for an unknown table."""
    with contextlib.closing(Database(path, must_exist=True)) as database, database.transaction() as connection:
        try:
            return {column["name"] for column in sa.inspect(connection).get_columns(name)}
        except exc.NoSuchTableError:
            return set()
