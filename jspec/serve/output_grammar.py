"""What a request demands of its output: a response format, or valid calls of its tools."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

from jspec.core.types import Json
from jspec.engine.constraints import Constraint
from jspec.engine.grammars import Grammars
from jspec.serve.chat_schemas import ChatBody
from jspec.serve.errors import wrong
from jspec.serve.parse_request import Served, call_format
from jspec.serve.schemas import Body, ResponseFormat
from jspec.serve.tools.tool_format import FunctionTool
from jspec.serve.tools.tool_grammar import grammar


@dataclasses.dataclass(frozen=True)
class Demand:
    """A demand on the output.

    Attributes:
        field: the field of the request that makes the demand.
        compile: a function that compiles the demand. It raises ValueError if the demand cannot be enforced.
    """

    field: str
    compile: Callable[[Grammars], Constraint]


def demand_of(served: Served, body: Body) -> Demand | None:
    """Return what `body` demands of its output, or None.

    Raises:
        Refusal: the model's notation of calls is not known, or the demands cannot be combined.
    """
    if isinstance(body, ChatBody) and body.constrained_by == "tools":
        return Demand(body.constrained_by, _calls(served, body))
    if body.response_format is not None and body.constrained_by:
        return Demand(body.constrained_by, _format(body.response_format))
    return None


def _format(wanted: ResponseFormat) -> Callable[[Grammars], Constraint]:
    if (regex := wanted.regex) is not None:
        return lambda grammars: grammars.regex(regex)
    schema = wanted.schema_of_output
    return lambda grammars: grammars.json_schema(schema)


def _calls(served: Served, body: ChatBody) -> Callable[[Grammars], Constraint]:
    tools = [tool.plain() for tool in body.callable_tools]
    answer: Json = None
    if body.response_format is not None and body.is_formatted and not body.must_call:
        if body.response_format.regex is not None:
            raise wrong(
                "response_format has the type 'regex', which excludes tools; use 'json_schema', or omit tools.",
                "response_format",
            )
        answer = cast(Json, body.response_format.schema_of_output)
    text = grammar(
        call_format(served, body),
        tools,
        tokens=served.call_markers,
        is_required=body.must_call,
        is_parallel=body.parallel_tool_calls and body.tool_choice.mode != "named",
        answer=answer,
    )
    places = {tool.function.name: i for i, tool in enumerate(body.tools)}
    return lambda grammars: _compile(grammars, text, tools, places)


def _compile(grammars: Grammars, text: str, tools: Sequence[FunctionTool], places: dict[str, int]) -> Constraint:
    """Compile the grammar of calls. If this fails, compile each tool's schema alone, to name the one that fails."""
    try:
        return grammars.lark(text)
    except ValueError:
        for tool in tools:
            try:
                grammars.json_schema(tool.schema)
            except ValueError as error:
                place = f"tools[{places[tool.name]}].function.parameters"
                raise ValueError(f"{place} ({tool.name!r}): {error}") from None
        raise
