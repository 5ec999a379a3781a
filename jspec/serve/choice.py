"""One choice of an answer: what the engine has brought so far, as text."""

import time

from jspec.engine import Request, Result
from jspec.engine.scheduler import Tenant
from jspec.serve.parse_request import Asked, Served
from jspec.serve.usage import Figures
from jspec.text.stop_strings import Writer


class Choice:
    """A request of the engine on its way.

    Attributes:
        index: in the answer.
        prompt: the index of its prompt.
        result: the engine's, which grows in another thread.
        count: how many of its tokens are delivered.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: the string or token that ended it, if the client asked for it.
        arrived, first, last: when the request came, and its first and last tokens, by `time.monotonic`.
    """

    def __init__(self, served: Served, asked: Asked, index: int, arrived: float):
        self.index, self.prompt, self._asked = index, index // asked.body.n, asked
        body, prompt = asked.body, asked.prompts[self.prompt]
        # An echo of token ids leaves a character that they do not complete to the text after them.
        shows_prompt = not asked.echoes or isinstance(getattr(body, "prompt", ())[self.prompt], str)
        options = {"keeps_stop": body.include_stop_str_in_output, "min_tokens": body.min_tokens}
        self.writer = Writer(served.tokenizer, prompt, asked.stop, **options, shows_prompt=shows_prompt)
        self.tenant: Tenant | None = None
        self.result = Result()
        self.count = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.arrived, self.first, self.last = arrived, 0.0, 0.0

    @property
    def request(self) -> Request:
        """What the engine was asked."""
        return self._asked.requests[self.index]

    @property
    def tokens(self) -> list[int]:
        """Those that are delivered."""
        return self.result.tokens[: self.count]

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not read again; not those of its own text, read again after a failure."""
        return min(self.result.cached, len(self.request.tokens))

    def figures(self) -> Figures:
        """How well it was drafted."""
        return Figures.of(self.result, self.count)

    def advance(self, result: Result) -> int:
        """Take in what is new of the engine's result; how many tokens that is."""
        if self.finish_reason is not None:
            return 0
        self.result, before = result, self.count
        ended = result.finish_reason  # before its tokens: there are none behind it
        for token in result.tokens[self.count : self._asked.most]:
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

    def stop(self, reason: str) -> None:
        """End it where it is."""
        if self.finish_reason is None:
            self._finish(reason)

    def _write(self, token: int) -> None:
        shows_end = token in self._asked.body.stop_token_ids and self._asked.body.include_stop_str_in_output
        if token in self._asked.ends and not shows_end:
            self.writer.add_silent()
        else:
            self.writer.add(token)

    def _end(self, reason: str) -> None:
        if reason == "eos" and self._asked.most != 0:  # of a mere echo the engine's token is nobody's
            self._finish("stop", self._asked.ends.get(self.tokens[-1]) if self.count else None)
        else:
            self._finish({"cancelled": "abort", "eos": "length"}.get(reason, reason))

    def _finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        self.writer.end()
        if self.writer.stopped is not None:  # what was held back has completed a string
            reason, stop_reason = "stop", self.writer.stopped
        self.finish_reason, self.stop_reason = reason, stop_reason
