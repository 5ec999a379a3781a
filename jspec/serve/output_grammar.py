"""The constraint that a request puts on its output: a response format, or valid calls of its tools."""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Generator, Mapping

from jspec.engine.constraints import Constraint
from jspec.engine.grammars import Grammars, enforceable
from jspec.serve.chat_schemas import ChatBody
from jspec.serve.errors import wrong
from jspec.serve.parse_request import Served, call_format
from jspec.serve.schemas import Body
from jspec.serve.tools.tool_format import FunctionTool
from jspec.serve.tools.tool_grammar import grammar

_MOST_SECONDS = 5.0  # for checks of all schemas in one request


@dataclasses.dataclass(frozen=True)
class OutputConstraint:
    """A constraint on the output that is not yet compiled.

    Attributes:
        field: the request field that constrains the output.
        key: a text that is the same for equal constraints.
        compile: a function that compiles the constraint. It raises ValueError if the constraint cannot be enforced.
    """

    field: str
    key: str
    compile: Callable[[Grammars], Constraint]


def output_constraint(served: Served, body: Body) -> OutputConstraint | None:
    """Return the constraint that `body` puts on its output, or None.

    Raises:
        Refusal: the model's call notation is not supported, a schema is nested too deeply, or the fields cannot be
            combined.
    """
    field, response_format = body.constrained_by, body.response_format
    if isinstance(body, ChatBody) and field == "tools":
        return _calls(served, body)
    if response_format is None or not field:
        return None
    if (regex := response_format.regex) is not None:
        return OutputConstraint(field, f"regex {regex}", lambda grammars: grammars.regex(regex))
    schema = response_format.output_schema
    return OutputConstraint(field, f"schema {_key(field, schema)}", lambda grammars: grammars.json_schema(schema))


def _calls(served: Served, body: ChatBody) -> OutputConstraint:
    answer: Mapping[str, object] | None = None
    if body.response_format is not None and body.is_formatted and not body.must_call:
        if body.response_format.regex is not None:
            raise wrong(
                "response_format of type 'regex' cannot be combined with tools; use 'json_schema', or omit tools.",
                "response_format",
            )
        answer = body.response_format.output_schema
    tools = {i: tool.plain() for i, tool in enumerate(body.tools) if tool in body.callable_tools}
    is_parallel = _may_be_parallel(served, body)
    write = functools.partial(
        grammar,
        call_format(served, body),
        tokens=served.marker_ids,
        text_ids=served.text_ids,
        is_required=body.must_call,
        is_parallel=is_parallel,
    )
    schemas = [answer, *([tool.name, tool.parameters] for tool in tools.values())]
    key = _key("tools", [body.must_call, is_parallel, schemas])
    return OutputConstraint("tools", f"calls {key}", lambda grammars: _compile(grammars, write, tools, answer))


def _key(field: str, value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise wrong(f"{field} is nested too deeply; simplify it.", field) from None


def _may_be_parallel(served: Served, body: ChatBody) -> bool:
    """Return whether the output may contain several calls.

    A model that was not trained to call functions would not stop after its calls. Such a model makes several calls only
    if the request sets `parallel_tool_calls`.
    """
    if body.tool_choice.mode == "named" or "parallel_tool_calls" in body.model_fields_set or not body.must_call:
        return body.parallel_tool_calls and body.tool_choice.mode != "named"
    return served.tool_support is not None and served.tool_support.is_native


def _compile(
    grammars: Grammars,
    write: Callable[..., str],
    tools: Mapping[int, FunctionTool],
    answer: Mapping[str, object] | None,
) -> Constraint:
    """Compile the grammar for calls. If possible, an error names the tool whose schema cannot be enforced."""
    begun, checked = time.monotonic(), list[FunctionTool]()
    for i, tool in tools.items():
        with _naming_tool(i, tool):
            checked.append(dataclasses.replace(tool, parameters=enforceable(tool.schema)))
        if time.monotonic() > begun + _MOST_SECONDS:
            raise ValueError(f"Checking the schemas takes more than {_MOST_SECONDS:g} seconds; simplify them.")
    try:
        return grammars.lark(write(checked, answer=None if answer is None else enforceable(answer)))
    except ValueError:
        for i, tool in tools.items():
            if time.monotonic() > begun + _MOST_SECONDS:
                break
            with _naming_tool(i, tool):
                grammars.json_schema(tool.schema)
        raise


@contextlib.contextmanager
def _naming_tool(i: int, tool: FunctionTool) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"tools[{i}].function.parameters ({tool.name!r}): {error}") from None
