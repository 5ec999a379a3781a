"""Completions and chats as JSON, either whole or in chunks. A chunk is a part of the whole response."""

import bisect
import itertools
import math
import secrets
from collections.abc import AsyncIterator

from anyio import to_thread

from jspec.core.detokenizer import Pieces
from jspec.core.origins import NAMES
from jspec.core.types import Json
from jspec.engine import Result
from jspec.serve.chat_schemas import ChatBody
from jspec.serve.choice import Choice
from jspec.serve.errors import Refusal
from jspec.serve.job import Job
from jspec.serve.parts import CallPart, Cursor, Part
from jspec.serve.schemas import StreamOptions
from jspec.serve.token_text import Names

_LEAST = -9999.0  # represents minus infinity, as in other servers


class Answer:
    """One job's response, in the format of the completions API or the chat API."""

    last_data = "[DONE]"

    def __init__(self, job: Job):
        self._job, self._parsed, self._names = job, job.parsed, job.served.names
        self._is_chat = isinstance(job.parsed.body, ChatBody)
        self._id = ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12)
        self._read: dict[int, list[str]] = {}
        lists_tokens = self._parsed.top is not None or self._parsed.body.return_token_ids
        self._cursors = [Cursor(choice, lists_tokens, self._parsed.call_parser is not None) for choice in job.choices]

    def whole(self) -> dict[str, Json]:
        """Return the whole response. All choices must have ended."""
        choices = [self._choice(cursor.next(), "message") for cursor in self._cursors]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": self._job.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Json]]:
        """Yield new output whenever there is any, and the usage at the end if the request asks for it.

        Raises:
            Refusal: a choice has failed.
        """
        options = self._parsed.body.stream_options or StreamOptions()
        head = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        if self._parsed.echoes:
            await to_thread.run_sync(self._read_prompts)  # a prompt may be long
        async for _ in self._job.news():
            for cursor in self._cursors:
                if cursor.has_more():
                    part = cursor.next()
                    is_large = part.is_first and self._parsed.echoes
                    choice = (
                        await to_thread.run_sync(self._choice, part, "delta")
                        if is_large
                        else self._choice(part, "delta")
                    )
                    yield head | {"choices": [choice]} | self._running_usage(options)
        if options.include_usage:
            yield head | {"choices": [], "usage": self._job.usage()}

    def failure(self, refusal: Refusal) -> dict[str, Json]:
        """Return the last chunk of an output that cannot continue."""
        return refusal.as_json()

    def _running_usage(self, options: StreamOptions) -> dict[str, Json]:
        if options.continuous_usage_stats:
            return {"usage": self._job.usage()}
        return {"usage": None} if options.include_usage else {}

    def _head(self, kind: str) -> dict[str, Json]:
        return {"id": self._id, "object": kind, "created": self._job.created, "model": self._job.served.name}

    def _choice(self, part: Part, name: str) -> dict[str, Json]:
        choice, body = part.choice, self._parsed.body
        ending = {"finish_reason": _reason(choice), "stop_reason": choice.stop_reason} if part.is_last else {}
        if not self._is_chat:
            text = self._echo(part) + part.content
            fields = _plain_choice(choice.index, text=text, logprobs=self._logprobs(part), **ending)
        else:
            message = {name: self._message(part) if name == "message" else self._delta(part)}
            fields = _plain_choice(choice.index, logprobs=self._chat_logprobs(part), **message, **ending)
        if body.return_token_ids:
            fields["token_ids"] = choice.result.tokens[part.tokens]
            fields |= {"prompt_token_ids": list(choice.request.tokens)} if part.is_first else {}
        if body.return_origins:
            fields["jspec"] = _origins(part)
        return fields

    def _message(self, part: Part) -> dict[str, Json]:
        content = part.content or (None if part.calls else "")
        message: dict[str, Json] = {"role": "assistant", "content": content, "refusal": None}
        return message | ({"tool_calls": [self._call(part, call) for call in part.calls]} if part.calls else {})

    def _delta(self, part: Part) -> dict[str, Json]:
        """Return a delta. The role comes with the first token, because clients measure the time to the first delta."""
        delta: dict[str, Json] = {"role": "assistant"} if part.is_first else {}
        if part.content or (part.is_first and not part.calls):
            delta["content"] = part.content
        if part.calls:
            delta["tool_calls"] = [{"index": call.index} | self._call(part, call) for call in part.calls]
        return delta

    def _call(self, part: Part, call: CallPart) -> dict[str, Json]:
        if call.name is None:
            return {"function": {"arguments": call.arguments}}
        parser = self._parsed.call_parser
        assert parser is not None, "the output has a call"
        identity: dict[str, Json] = {"id": parser.format.new_id(), "type": "function"}
        return identity | {"function": {"name": call.name, "arguments": call.arguments}}

    def _echo(self, part: Part) -> str:
        return self._prompt_text(part.choice) if self._parsed.echoes and part.is_first else ""

    def _read_prompts(self) -> None:
        for choice in self._job.choices:
            self._prompt_text(choice) if self._parsed.top is None else self._prompt_pieces(choice)

    def _prompt_text(self, choice: Choice) -> str:
        given = self._parsed.given_prompts[choice.prompt]
        return given if isinstance(given, str) else "".join(self._prompt_pieces(choice))

    def _prompt_pieces(self, choice: Choice) -> list[str]:
        if choice.prompt not in self._read:
            detokenizer = Pieces(self._job.served.tokenizer)
            self._read[choice.prompt] = [detokenizer.add(token) for token in choice.request.tokens]
        return self._read[choice.prompt]

    def _logprobs(self, part: Part) -> dict[str, Json] | None:
        """Return log-probabilities in the completions format: one list per field."""
        if self._parsed.top is None:
            return None
        choice, result, ids = part.choice, part.choice.result, part.choice.tokens[part.tokens]
        values, tops = result.raw_logprobs[part.tokens], _tops(result.top_logprobs, part)
        starts = choice.writer.starts[part.tokens]  # the tokens of the matched stop string start beyond the text's end
        if self._parsed.echoes:
            before = len(self._prompt_text(choice))
            starts = [before + start for start in starts]
            if part.is_first:
                ids = [*choice.request.tokens, *ids]
                values, tops = [*result.prompt_logprobs, *values], [*_prompt_tops(result, self._parsed.top), *tops]
                lengths = map(len, self._prompt_pieces(choice)[:-1])
                starts = [*itertools.accumulate(lengths, initial=0), *starts]
        return {
            "tokens": [self._names.text(token) for token in ids],
            "token_logprobs": [_number(value) for value in values],
            "top_logprobs": [self._top(*one) for one in zip(ids, values, tops, strict=True)],
            "text_offset": starts,
        }

    def _top(self, token: int, value: float, top: list[tuple[int, float]]) -> dict[str, float | None] | None:
        """Return the log-probabilities of the most likely tokens and of the token itself, keyed by name.

        Return None for the first token of a sequence, which has no distribution.
        """
        if math.isnan(value):
            return None
        others = {self._names.text(other): _number(logprob) for other, logprob in reversed(top)}
        return others | {self._names.text(token): _number(value)}

    def _chat_logprobs(self, part: Part) -> dict[str, Json] | None:
        if self._parsed.top is None:
            return None
        return {"content": token_logprobs(self._names, part, self._parsed.top), "refusal": None}


def token_logprobs(names: Names, part: Part, top: int) -> list[dict[str, Json]]:
    """Return the log-probability of each token in the part, and those of the `top` most likely tokens."""

    def entry(token: int, value: float) -> dict[str, Json]:
        return {"token": names.text(token), "logprob": _number(value), "bytes": names.utf8(token)}

    result = part.choice.result
    return [
        entry(token, value) | {"top_logprobs": [entry(*one) for one in most_likely[:top]]}
        for token, value, most_likely in zip(
            result.tokens[part.tokens], result.raw_logprobs[part.tokens], _tops(result.top_logprobs, part), strict=True
        )
    ]


def _reason(choice: Choice) -> str | None:
    """Return the finish reason: "tool_calls" if there are calls and the last one is complete."""
    calls = choice.reply.calls
    return "tool_calls" if choice.finish_reason == "stop" and calls and calls[-1].is_complete else choice.finish_reason


def _plain_choice(index: int, **fields: Json) -> dict[str, Json]:
    return {"index": index, "logprobs": None, "finish_reason": None} | fields


def _tops(given: list[list[tuple[int, float]]], part: Part) -> list[list[tuple[int, float]]]:
    """Return the most likely tokens for each token in the part, or empty lists if none were requested."""
    count = part.tokens.stop - part.tokens.start
    return given[part.tokens] if given else [[]] * count


def _prompt_tops(result: Result, top: int | None) -> list[list[tuple[int, float]]]:
    return result.prompt_top_logprobs if top else [[]] * len(result.prompt_logprobs)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else max(value, _LEAST)


def _origins(part: Part) -> dict[str, list[str]]:
    """Return the part's text, split at token boundaries, and the origin of each piece."""
    choice, cut, names = part.choice, list[str](), list[str]()
    first, last = part.characters.start, part.characters.stop
    begin = max(0, bisect.bisect_right(choice.writer.starts, first) - 1)
    lists = (found[begin:] for found in (choice.writer.starts, choice.writer.pieces, choice.result.origins))
    for start, piece, origin in zip(*lists, strict=False):
        text = choice.writer.text[max(start, first) : min(start + len(piece), last)]
        if text and start < last:
            cut.append(text)
            names.append(NAMES.get(origin, "unknown"))
    return {"pieces": cut, "origins": names}
