"""Responses of the Responses API: output items as JSON, either whole or in stream events."""

import dataclasses
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np

from jspec.core.types import Json
from jspec.serve.answers import token_logprobs
from jspec.serve.errors import Refusal
from jspec.serve.job import Job
from jspec.serve.parts import Cursor, Part
from jspec.serve.responses_schemas import ResponsesBody, renamed
from jspec.serve.tools.tool_format import Reply, ToolCall


@dataclasses.dataclass(frozen=True)
class Item:
    """An output item: a message or a function call.

    Attributes:
        text: the message, or the arguments of the call.
        function: the name of the called function; None for a message.
    """

    text: str
    function: str | None = None


def output_items(reply: Reply) -> list[Item]:
    """Return the messages and calls in the order in which the model wrote them. Only the last item may still grow."""
    items, start = list[Item](), 0
    for call, end in zip(reply.calls, reply.before, strict=True):
        items += _message(reply.content, start, end)
        items.append(Item(call.arguments, call.name))
        start = end
    return items + _message(reply.content, start, len(reply.content))


def _message(content: str, start: int, end: int) -> list[Item]:
    """Return the message in a range of the content, or nothing. A line break separates it from an earlier message."""
    text = content[start:end].removeprefix("\n" if start else "")
    return [Item(text)] if text else []


class ResponsesAnswer:
    """One job's response, in the format of the Responses API."""

    last_data = ""

    def __init__(self, job: Job, body: ResponsesBody):
        self._job, self._body = job, body
        (self._choice,) = job.choices
        self._cursor = Cursor(self._choice, body.lists_logprobs, begins_early=True)
        self._id, self._ids = _new_id("resp"), list[dict[str, str]]()
        self._numbers = itertools.count()
        self._opened, self._sent = 0, 0  # the number of items sent so far, and of characters sent of the last item

    def whole(self) -> dict[str, Json]:
        """Return the whole response. The choice must have ended."""
        items, status = self._items(), self._last_status()
        output = [self._item(i, item, self._status(i, items)) for i, item in enumerate(items)]
        reason: Json = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status) | {"incomplete_details": reason, "output": output, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Json]]:
        """Yield the stream events whenever there is new output.

        The first events come with the first output, because no ping is sent after an event.

        Raises:
            Refusal: the choice has failed.
        """
        has_begun = False
        async for _ in self._job.news():
            if not self._cursor.has_more():
                continue
            if not has_begun:
                has_begun = True
                for kind in ("response.created", "response.in_progress"):
                    yield self._event(kind, response=self._response("in_progress"))
            for event in self._growth(self._cursor.next()):
                yield event
        yield self._event(f"response.{self._last_status()}", response=self.whole())

    def failure(self, refusal: Refusal) -> dict[str, Json]:
        """Return the last event of an output that cannot continue.

        OpenAI documents the code, the message and the param as fields of the event. OpenAI's client raises an
        exception only if the event also has the field "error".
        """
        error = renamed(refusal).as_json()["error"]
        assert isinstance(error, dict)
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **fields, error=error)

    def _event(self, kind: str, **fields: Json) -> dict[str, Json]:
        return {"type": kind, "sequence_number": next(self._numbers)} | fields

    def _growth(self, part: Part) -> Iterator[dict[str, Json]]:
        """Yield the events for the new output in a part."""
        items, first = self._items(), max(0, self._opened - 1)
        for i, item in enumerate(items[first:], first):
            if i == self._opened:
                yield from self._beginning(i, item)
                self._opened, self._sent = i + 1, 0
            logprobs = self._logprobs(part) if item.function is None else []
            if item.text[self._sent :] or logprobs:
                yield self._delta(i, item, logprobs)
                self._sent = len(item.text)
            if i < len(items) - 1 or part.is_last:
                yield from self._end(i, item, self._status(i, items))

    def _beginning(self, i: int, item: Item) -> Iterator[dict[str, Json]]:
        empty = dataclasses.replace(item, text="")
        added = self._item(i, empty, "in_progress")
        if item.function is None:
            added["content"] = []
        yield self._event("response.output_item.added", output_index=i, item=added)
        if item.function is None:
            yield self._event("response.content_part.added", **self._place(i, item), part=_part("", []))

    def _delta(self, i: int, item: Item, logprobs: list[dict[str, Json]]) -> dict[str, Json]:
        delta, place = item.text[self._sent :], self._place(i, item)
        if item.function is not None:
            return self._event("response.function_call_arguments.delta", **place, delta=delta)
        return self._event("response.output_text.delta", **place, delta=delta, logprobs=logprobs)

    def _end(self, i: int, item: Item, status: str) -> Iterator[dict[str, Json]]:
        place, done = self._place(i, item), self._item(i, item, status)
        if item.function is not None:
            yield self._event("response.function_call_arguments.done", **place, name=item.function, arguments=item.text)
        else:
            logprobs = self._all_logprobs()
            yield self._event("response.output_text.done", **place, text=item.text, logprobs=logprobs)
            yield self._event("response.content_part.done", **place, part=_part(item.text, logprobs))
        yield self._event("response.output_item.done", output_index=i, item=done)

    def _place(self, i: int, item: Item) -> dict[str, Json]:
        place: dict[str, Json] = {"item_id": self._identity(i, item)["id"], "output_index": i}
        return place | ({"content_index": 0} if item.function is None else {})

    def _items(self) -> list[Item]:
        """Return the output items so far. An output that ends without any item gets an empty message."""
        items = output_items(self._choice.reply)
        is_message = self._job.parsed.call_parser is None or self._choice.finish_reason is not None
        return items or ([Item("")] if is_message else [])

    def _item(self, i: int, item: Item, status: str) -> dict[str, Json]:
        fields: dict[str, Json] = {**self._identity(i, item), "status": status}
        if item.function is not None:
            return fields | {"type": "function_call", "name": item.function, "arguments": item.text}
        content = [_part(item.text, self._all_logprobs())]
        return fields | {"type": "message", "role": "assistant", "content": content}

    def _identity(self, i: int, item: Item) -> dict[str, str]:
        """Return the ids of an item, which stay the same in all events and in the whole response."""
        if i == len(self._ids):
            parser = self._job.parsed.call_parser
            if item.function is None or parser is None:
                self._ids.append({"id": _new_id("msg")})
            else:
                self._ids.append({"id": _new_id("fc"), "call_id": parser.format.new_id()})
        return self._ids[i]

    def _status(self, i: int, items: Sequence[Item]) -> str:
        """Return the status of a finished item. A call is completed if it can be run, wherever the response ends."""
        name, text = items[i].function, items[i].text
        if name is not None:
            return "completed" if ToolCall(name, text).is_complete else "incomplete"
        return self._last_status() if i == len(items) - 1 else "completed"

    def _last_status(self) -> str:
        """Return the status of the response once the choice has ended."""
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _logprobs(self, part: Part) -> list[dict[str, Json]]:
        names, top = self._job.served.names, self._body.top_logprobs
        return token_logprobs(names, part, top) if self._body.lists_logprobs else []

    def _all_logprobs(self) -> list[dict[str, Json]]:
        tokens = slice(0, self._choice.count)
        return self._logprobs(Part(self._choice, slice(0), tokens, "", (), is_first=True, is_last=True))

    def _response(self, status: str) -> dict[str, Json]:
        """Return the response without its output."""
        body, sampling = self._body, self._choice.request.sampling
        choice = body.tool_choice
        named: Json = {"type": "function", "name": choice.name}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": self._job.served.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": float(np.asarray(sampling.temperature)),
            "text": {"format": body.text.format.plain()},
            "tool_choice": named if choice.mode == "named" else choice.mode,
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": float(np.asarray(sampling.top_p)),
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self) -> dict[str, Json]:
        """Return the token counts under the names of this API, and the drafting statistics."""
        usage = self._job.usage()
        cached = sum(choice.cached for choice in self._job.choices)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "jspec": usage["jspec"],
        }


def _part(text: str, logprobs: list[dict[str, Json]]) -> dict[str, Json]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"
