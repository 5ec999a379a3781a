"""Former names that users' own drafters may still use: `num_likeliest`, `likeliest` and `keeps_nothing`."""

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

Value = TypeVar("Value")

_FORMER, _CURRENT = "likeliest", "top_tokens"


def former_num_top_tokens(drafter: object) -> int:
    """Return the value of a drafter's former attribute `num_likeliest`, now `num_top_tokens`, or 0 if it has none."""
    return cast(int, getattr(drafter, "num_likeliest", 0))


def former_needs_prefill(drafter: object) -> bool:
    """Return False if a drafter's former attribute `keeps_nothing` is true, and True otherwise."""
    return not getattr(drafter, "keeps_nothing", False)


def to_current(arguments: Mapping[str, Value]) -> dict[str, Value]:
    """Return `arguments` with the current name in place of the former one."""
    return {_CURRENT if name == _FORMER else name: value for name, value in arguments.items()}


def as_named_by(method: Callable[..., object], arguments: Mapping[str, Value]) -> dict[str, Value]:
    """Return `arguments` under the names that `method` uses.

    If `method` has a parameter with the current or the former name, it receives that name. A method without such a
    parameter, for example one that takes ``**requested``, receives the former name if its drafter declares
    `num_likeliest`.
    """
    parameters = inspect.signature(method).parameters
    if _CURRENT in parameters:
        return to_current(arguments)
    if _FORMER in parameters or (inspect.ismethod(method) and former_num_top_tokens(method.__self__)):
        return {_FORMER if name == _CURRENT else name: value for name, value in arguments.items()}
    return dict(arguments)
