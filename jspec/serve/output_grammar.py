"""What a request demands of its output: a response format, or valid calls of its tools."""

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
class Demand:
    """A demand on the output.

    Attributes:
        field: the field of the request that makes the demand.
        key: a text that equal demands share.
        compile: a function that compiles the demand. It raises ValueError if the demand cannot be enforced.
    """

    field: str
    key: str
    compile: Callable[[Grammars], Constraint]


def demand_of(served: Served, body: Body) -> Demand | None:
    """Return what `body` demands of its output, or None.

    Raises:
        Refusal: the model's notation of calls is not known, a schema is nested too deeply, or the demands cannot be
            combined.
    """
    field, wanted = body.constrained_by, body.response_format
    if isinstance(body, ChatBody) and field == "tools":
        return _calls(served, body)
    if wanted is None or not field:
        return None
    if (regex := wanted.regex) is not None:
        return Demand(field, f"regex {regex}", lambda grammars: grammars.regex(regex))
    schema = wanted.schema_of_output
    return Demand(field, f"schema {_key(field, schema)}", lambda grammars: grammars.json_schema(schema))


def _calls(served: Served, body: ChatBody) -> Demand:
    answer: Mapping[str, object] | None = None
    if body.response_format is not None and body.is_formatted and not body.must_call:
        if body.response_format.regex is not None:
            raise wrong(
                "response_format has the type 'regex', which excludes tools; use 'json_schema', or omit tools.",
                "response_format",
            )
        answer = body.response_format.schema_of_output
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
    return Demand("tools", f"calls {key}", lambda grammars: _compile(grammars, write, tools, answer))


def _key(field: str, value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise wrong(f"{field} is nested too deeply.", field) from None


def _may_be_parallel(served: Served, body: ChatBody) -> bool:
    """Return whether the output may have several calls.

    Models that were not trained to call functions do not know when to stop, so they make several calls only on request.
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
    """Compile the grammar of calls. If possible, an error names the tool whose schema cannot be enforced."""
    begun, checked = time.monotonic(), list[FunctionTool]()
    for i, tool in tools.items():
        with _blaming(i, tool):
            checked.append(dataclasses.replace(tool, parameters=enforceable(tool.schema)))
        if time.monotonic() > begun + _MOST_SECONDS:
            raise ValueError(f"Checking the schemas takes more than {_MOST_SECONDS:g} seconds; simplify them.")
    try:
        return grammars.lark(write(checked, answer=None if answer is None else enforceable(answer)))
    except ValueError:
        for i, tool in tools.items():
            if time.monotonic() > begun + _MOST_SECONDS:
                break
            with _blaming(i, tool):
                grammars.json_schema(tool.schema)
        raise


@contextlib.contextmanager
def _blaming(i: int, tool: FunctionTool) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"tools[{i}].function.parameters ({tool.name!r}): {error}") from None
