"""One choice in a response: the engine's output so far, as text."""

import time
from typing import Any

from jspec.engine import Request, Result
from jspec.serve.backend import SubmittedRequest
from jspec.serve.parse_request import ParsedRequest, Served
from jspec.serve.tools.tool_format import Reply
from jspec.serve.usage import DraftUsage
from jspec.text.stop_strings import StopAwareDetokenizer

# Parse a long text, or a text with calls, again only after it has grown by this factor: each parse reads all of it.
_GROWTH, _LONG = 1.01, 2**14


class Choice:
    """One engine request in progress.

    Attributes:
        index: the index of the choice in the response.
        prompt: the index of the choice's prompt.
        result: the engine's result, which grows in another thread.
        count: the number of delivered tokens.
        finish_reason: "stop", "length", "abort" or "error"; None while the choice is in progress.
        stop_reason: the stop string or stop token that ended the text, if the client specified it.
        arrived, first, last: the `time.monotonic` times of the request's arrival, its first token and its last token.
    """

    def __init__(self, served: Served, parsed: ParsedRequest, index: int, arrived: float):
        self.index, self.prompt, self._parsed = index, index // parsed.body.n, parsed
        body, prompt = parsed.body, parsed.prompts[self.prompt]
        # If echoed token ids end with an incomplete character, the generated text shows that character.
        shows_prompt = not parsed.echoes or isinstance(parsed.given_prompts[self.prompt], str)
        options: dict[str, Any] = {"keeps_stop": body.include_stop_str_in_output, "min_tokens": body.min_tokens}
        # Stop strings apply to text. In a required call, they could cut off the arguments.
        stop = () if parsed.call_parser is not None and parsed.call_parser.is_only else parsed.stop
        self.writer = StopAwareDetokenizer(served.tokenizer, prompt, stop, **options, shows_prompt=shows_prompt)
        self.active_request: SubmittedRequest | None = None
        self.result = Result()
        self.count, self._restarts = 0, 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.arrived, self.first, self.last = arrived, 0.0, 0.0
        self._read: tuple[tuple[int, bool], Reply] | None = None

    @property
    def request(self) -> Request:
        """The engine request."""
        return self._parsed.requests[self.index]

    @property
    def tokens(self) -> list[int]:
        """The delivered tokens."""
        return self.result.tokens[: self.count]

    @property
    def cached(self) -> int:
        """The number of prompt tokens that needed no new prefill.

        Generated tokens, which are prefilled again after a failure, do not count.
        """
        return min(self.result.cached, len(self.request.tokens))

    def draft_usage(self) -> DraftUsage:
        """Return the drafting statistics of the choice."""
        return DraftUsage.of(self.result, self.count)

    def advance(self, result: Result) -> int:
        """Add the new tokens in the engine's result to the text, and return their number."""
        if self.finish_reason is not None:
            return 0
        if self.count and result.restarts > self._restarts:  # the client already has some of the discarded text
            self._finish("abort")
            return 0
        self._restarts = result.restarts
        self.result, before = result, self.count
        ended = result.finish_reason  # read before the tokens, because no token arrives after the finish reason
        for token in result.tokens[self.count : self._parsed.max_tokens]:
            self.count += 1
            self._write(token)
            if self.writer.stopped is not None:
                self._finish("stop", self.writer.stopped)
                break
        if self.finish_reason is None and ended is not None:
            self._end(ended)
        if self.count > before:
            self.last = time.monotonic()
            self.first = self.first or self.last
        return self.count - before

    @property
    def reply(self) -> Reply:
        """The text so far, split into content and function calls."""
        text, parser = self.writer.text[: self.writer.shown], self._parsed.call_parser
        if parser is None:
            return Reply(text, (), ())
        key = len(text), self.finish_reason is not None
        if self._read is not None and not key[1]:
            (length, _), reply = self._read
            if len(text) <= length * (_GROWTH if reply.calls or length > _LONG else 1):
                return reply
        if self._read is None or self._read[0] != key:
            self._read = key, parser.parse(text, key[1])
        return self._read[1]

    def stop(self, reason: str) -> None:
        """End the choice at its current length."""
        if self.finish_reason is None:
            self._finish(reason)

    def _write(self, token: int) -> None:
        shows_end = token in self._parsed.body.stop_token_ids and self._parsed.body.include_stop_str_in_output
        parser = self._parsed.call_parser
        if token in self._parsed.ends and not shows_end:
            self.writer.add_silent()
        elif parser is not None and token in parser.markers:
            self.writer.add_text(parser.markers[token])
        else:
            self.writer.add(token)

    def _end(self, reason: str) -> None:
        if reason == "eos" and self._parsed.max_tokens != 0:  # with max_tokens=0, the engine's token is dropped
            self._finish("stop", self._parsed.ends.get(self.tokens[-1]) if self.count else None)
        else:
            self._finish({"cancelled": "abort", "eos": "length"}.get(reason, reason))

    def _finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        self.writer.end()
        if self.writer.stopped is not None:  # held-back text has completed a stop string
            reason, stop_reason = "stop", self.writer.stopped
        self.finish_reason, self.stop_reason = reason, stop_reason
