"""Arrow tables of prompts. pyarrow, which has no types, is optional."""

import io
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

from jspec.cluster.batch.completed import COLUMNS, Completed

Table: TypeAlias = Any


def read_parquet(path: Path) -> Table:
    """Return the table in `path`.

    Raises:
        ValueError: pyarrow is not installed, or the file is not a Parquet file.
        OSError: the file cannot be read.
    """
    if find_spec("pyarrow") is None:
        raise ValueError(f"{path} is a Parquet file, which needs pyarrow; run pip install pyarrow.")
    pyarrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    try:
        return parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def parquet_bytes(table: Table) -> bytes:
    """Return `table` as a Parquet file."""
    parquet: Any = import_module("pyarrow.parquet")
    parquet.write_table(table, buffer := io.BytesIO())
    return buffer.getvalue()


def prompt_columns(table: Table) -> list[dict[str, Any]]:
    """Return the values of the columns "prompt" and "messages" in each row, without absent fields of messages."""
    names = [name for name in ("prompt", "messages") if name in table.column_names]
    rows = (
        cast(list[dict[str, Any]], table.select(names).to_pylist())
        if names
        else [dict[str, Any]() for _ in range(len(table))]
    )
    for row in rows:
        if isinstance(messages := row.get("messages"), list):  # in a column, all messages have the same fields
            row["messages"] = [_without_nulls(message) for message in cast(list[Any], messages)]
    return rows


def with_completions(table: Table, completed: Sequence[Completed]) -> Table:
    """Return `table` with the completions in additional columns."""
    pyarrow: Any = import_module("pyarrow")
    types: dict[str, Any] = {"generated_tokens": pyarrow.list_(pyarrow.int32()), "prompt_index": pyarrow.int64()}
    for name in COLUMNS:
        values = [cast(dict[str, Any], one)[name] for one in completed]
        table = table.append_column(name, pyarrow.array(values, types.get(name, pyarrow.string())))
    return table


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in cast(dict[str, Any], message).items() if value is not None}
