"""Arrow tables of prompts. pyarrow, which has no type annotations, is an optional dependency."""

import io
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

from jspec.cluster.batch.completed import COLUMNS, Completed

Untyped: TypeAlias = Any
Table: TypeAlias = Untyped
Dataset: TypeAlias = Untyped  # of Ray


def read_parquet(path: Path) -> Table:
    """Return the table in `path`.

    Raises:
        ValueError: pyarrow is not installed, or cannot read the file.
    """
    if find_spec("pyarrow") is None:
        raise ValueError(f"{path} is a Parquet file, which needs pyarrow; run pip install pyarrow.")
    pyarrow: Untyped = import_module("pyarrow")
    parquet: Untyped = import_module("pyarrow.parquet")
    try:
        return parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as a Parquet file: {error}") from error


def parquet_bytes(table: Table) -> bytes:
    """Return the bytes of a Parquet file with `table`."""
    parquet: Untyped = import_module("pyarrow.parquet")
    parquet.write_table(table, buffer := io.BytesIO())
    return buffer.getvalue()


def prompt_columns(table: Table) -> list[dict[str, object]]:
    """Return the values of the columns "prompt" and "messages" in each row, without absent fields of messages."""
    names = [name for name in ("prompt", "messages") if name in table.column_names]
    rows = (
        cast(list[dict[str, object]], table.select(names).to_pylist())
        if names
        else [dict[str, object]() for _ in range(len(table))]
    )
    for row in rows:
        if isinstance(messages := row.get("messages"), list):  # in a column, all messages have the same fields
            row["messages"] = [_without_nulls(message) for message in cast(list[object], messages)]
    return rows


def rows_at(table: Table, indices: Sequence[int]) -> Table:
    """Return the rows at `indices`, which are in ascending order."""
    first, last = indices[0], indices[-1]
    rows = table.slice(first, last + 1 - first)
    if len(rows) == len(indices):
        return rows
    pyarrow: Untyped = import_module("pyarrow")
    wanted = set(indices)
    return rows.filter(pyarrow.array([i in wanted for i in range(first, last + 1)]))


def check_indices(column: Table, name: str) -> list[int]:
    """Return the values of the column `name`, which number the rows of a dataset.

    Raises:
        ValueError: the values are not distinct integers from 0 to 2**32 - 1.
    """
    pyarrow: Untyped = import_module("pyarrow")
    values = cast(list[int | None], column.to_pylist())
    if not pyarrow.types.is_integer(column.type):
        raise ValueError(f"The column {name!r} is of type {column.type}; expected integers.")
    if invalid := [value for value in values if value is None or not 0 <= value < 2**32]:
        raise ValueError(f"The column {name!r} has the value {invalid[0]}; expected integers from 0 to 2**32 - 1.")
    if len({*values}) < len(values):
        duplicate = next(value for value in values if values.count(value) > 1)
        raise ValueError(
            f"The column {name!r} has the value {duplicate} more than once; give each row its own integer."
        )
    return cast(list[int], values)


def with_completions(table: Table, completed: Sequence[Completed]) -> Table:
    """Return `table` with the completions in additional columns."""
    pyarrow: Untyped = import_module("pyarrow")
    types: dict[str, Untyped] = {"generated_tokens": pyarrow.list_(pyarrow.int32()), "prompt_index": pyarrow.int64()}
    for name in COLUMNS:
        values = [cast(dict[str, object], row)[name] for row in completed]
        table = table.append_column(name, pyarrow.array(values, types.get(name, pyarrow.string())))
    return table


def _without_nulls(message: object) -> object:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in cast(dict[str, object], message).items() if value is not None}
