"""Responses to clients: choices as JSON, either whole or in chunks. A chunk is a part of the whole response."""

import bisect
import dataclasses
import itertools
import math
import secrets
from collections.abc import AsyncIterator

from anyio import to_thread

from jspec.core.detokenizer import Pieces
from jspec.core.origins import NAMES
from jspec.core.types import Json
from jspec.engine import Result
from jspec.serve.choice import Choice
from jspec.serve.job import Job
from jspec.serve.schemas import ChatBody

_LEAST = -9999.0  # represents minus infinity, as in other servers


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a choice: its character and token ranges, and whether the choice begins or ends in it."""

    choice: Choice
    characters: slice
    tokens: slice
    is_first: bool
    is_last: bool

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.choice.writer.text[self.characters]


class Answer:
    """One job's response, in the format of the completions API or the chat API."""

    def __init__(self, job: Job):
        self._job, self._parsed, self._names = job, job.parsed, job.served.names
        self._is_chat = isinstance(job.parsed.body, ChatBody)
        self._id = ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12)
        self._read: dict[int, list[str]] = {}
        self._sent = {choice.index: (0, 0, False) for choice in job.choices}

    def whole(self) -> dict[str, Json]:
        """Return the whole response. All choices must have ended."""
        choices = [self._choice(self._next(choice), "message") for choice in self._job.choices]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": self._job.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Json]]:
        """Yield new output whenever there is any, and the usage at the end if the request asks for it.

        Raises:
            Refusal: a choice has failed.
        """
        options = self._parsed.body.stream_options
        usage: dict[str, Json] = {"usage": None} if options and options.include_usage else {}
        head = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        if self._parsed.echoes:
            await to_thread.run_sync(self._read_prompts)  # a prompt may be long
        async for _ in self._job.news():
            for choice in self._job.choices:
                if self._has_more(choice):
                    part = self._next(choice)
                    if part.is_first and self._is_chat:  # clients would mistake an earlier event for the first token
                        role = {"role": "assistant", "content": ""}
                        yield head | {"choices": [_plain_choice(choice.index, delta=role)]} | usage
                    is_large = part.is_first and self._parsed.echoes
                    found = (
                        await to_thread.run_sync(self._choice, part, "delta")
                        if is_large
                        else self._choice(part, "delta")
                    )
                    yield head | {"choices": [found]} | usage
        if usage:
            yield head | {"choices": [], "usage": self._job.usage()}

    def _head(self, kind: str) -> dict[str, Json]:
        return {"id": self._id, "object": kind, "created": self._job.created, "model": self._job.served.name}

    def _has_more(self, choice: Choice) -> bool:
        characters, tokens, ended = self._sent[choice.index]
        if ended or choice.finish_reason is not None:
            return not ended
        lists = self._parsed.top is not None or self._parsed.body.return_token_ids
        return choice.writer.shown > characters or (lists and choice.count > tokens)

    def _next(self, choice: Choice) -> Part:
        """Return the part of the choice that has not been sent yet."""
        characters, tokens, _ = self._sent[choice.index]
        end, ended = max(choice.writer.shown, characters), choice.finish_reason is not None
        self._sent[choice.index] = end, choice.count, ended
        is_first = characters == tokens == 0
        return Part(choice, slice(characters, end), slice(tokens, choice.count), is_first, ended)

    def _choice(self, part: Part, name: str) -> dict[str, Json]:
        choice, body = part.choice, self._parsed.body
        ending = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason} if part.is_last else {}
        if not self._is_chat:
            text = self._echo(part) + part.text
            found = _plain_choice(choice.index, text=text, logprobs=self._logprobs(part), **ending)
        elif name == "message":
            message = {"role": "assistant", "content": part.text, "refusal": None}
            found = _plain_choice(choice.index, message=message, logprobs=self._chat_logprobs(part), **ending)
        else:
            delta = {"content": part.text} if part.text else {}
            found = _plain_choice(choice.index, delta=delta, logprobs=self._chat_logprobs(part), **ending)
        if body.return_token_ids:
            found["token_ids"] = choice.result.tokens[part.tokens]
            found |= {"prompt_token_ids": list(choice.request.tokens)} if part.is_first else {}
        if body.return_origins:
            found["jspec"] = _origins(part)
        return found

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
        result = part.choice.result
        tops = _tops(result.top_logprobs, part)
        content = [
            self._entry(token, value) | {"top_logprobs": [self._entry(*one) for one in top[: self._parsed.top]]}
            for token, value, top in zip(
                result.tokens[part.tokens], result.raw_logprobs[part.tokens], tops, strict=True
            )
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Json]:
        return {"token": self._names.text(token), "logprob": _number(value), "bytes": self._names.utf8(token)}


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
