"""Rows and errors of datasets, and rows of an SQL table.

SQLAlchemy is imported when a table is read.
"""

import datetime
import decimal
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.config.errors import Problem

Row = dict[str, Any]


class DatasetError(ValueError):
    """The dataset cannot be read; the message names file, line and cause."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def at(self, key: str) -> Problem:
        return Problem(key, self.message)


def column_value(row: Row, column: str) -> tuple[bool, Any]:
    """(found, value) of a row's column. `a.b` is column `a.b`, or else `b` inside column `a`."""
    if column in row:
        return True, row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def sql_url(path: str) -> str:
    """A path (of sqlite) or a URL as an SQLAlchemy URL; PostgreSQL through psycopg 3."""
    if "://" not in path:
        return f"sqlite:///{Path(path).expanduser()}"
    scheme, _, rest = path.partition("://")
    return f"postgresql+psycopg://{rest}" if scheme in ("postgresql", "postgres") else path


def read_table(path: str, name: str) -> Sequence[Row]:
    """All rows of a table or view, as JSON values. Raises DatasetError, which never shows a password.

    The order is always the same: by primary key, else by sqlite's order of insertion, else sorted by content. Dates
    become ISO text. Text with a JSON list of chat messages becomes the list.
    """
    try:
        import sqlalchemy as sa
    except ImportError:
        raise DatasetError("storage_type sql needs SQLAlchemy: pip install -e '.[sql]'") from None
    try:
        url = sa.make_url(sql_url(path))
    except (sa.exc.ArgumentError, ValueError):  # the port is no number
        raise DatasetError("the path is no URL of a database; write sqlite:///file.db or postgresql://...") from None
    shown = url.render_as_string(hide_password=True)
    if url.drivername == "sqlite" and not Path(url.database or "").is_file():
        raise DatasetError(f"{url.database!r} does not exist")
    try:
        engine = sa.create_engine(url)
        try:
            with engine.connect() as connection:
                rows, in_order = _all_rows(connection, name, shown)
        finally:
            engine.dispose()
    except ImportError as error:
        raise DatasetError(f"{shown} needs psycopg ({error}): pip install 'psycopg[binary]'") from None
    except sa.exc.SQLAlchemyError as error:
        raise DatasetError(f"{shown} cannot be read: {str(error).splitlines()[0]}") from None
    if not rows:
        raise DatasetError(f"table {name!r} of {shown} has no rows")
    return rows if in_order else sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def _all_rows(connection: Any, name: str, shown: str) -> tuple[list[Row], bool]:
    """The rows, and True if the table defines their order."""
    import sqlalchemy as sa

    inspector = sa.inspect(connection)
    tables = inspector.get_table_names()
    if name not in (*tables, *inspector.get_view_names()):
        known = ", ".join(sorted((*tables, *inspector.get_view_names()))) or "none"
        raise DatasetError(f"{shown} has no table {name!r}; it has: {known}. The buffer's name is the table's")
    table = sa.Table(name, sa.MetaData(), autoload_with=connection)
    order: list[Any] = list(table.primary_key.columns)
    if not order and connection.dialect.name == "sqlite" and name in tables:
        order = [sa.text("rowid")]
    found = connection.execute(sa.select(table).order_by(*order)).mappings()
    place = f"table {name!r} of {shown}, row"
    rows = [{c: _plain(v, f"{place} {number}, column {c}") for c, v in row.items()} for number, row in enumerate(found)]
    return rows, bool(order)


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("["):
        return _messages(value)
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (datetime.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, (bytes, memoryview)):
        raise DatasetError(f"{place}: is binary; read a view without this column")
    return value


def _messages(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_chat = bool(value) and all(isinstance(message, dict) and "role" in message for message in value)
    return value if is_chat else text
