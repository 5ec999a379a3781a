"""The parts in which a client receives a choice."""

import dataclasses

from jspec.serve.choice import Choice


@dataclasses.dataclass(frozen=True)
class CallPart:
    """A part of a function call.

    Attributes:
        index: the index of the call within the choice.
        name: the function's name if the call begins in this part, or None.
        arguments: the new text of the arguments.
    """

    index: int
    name: str | None
    arguments: str


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a choice.

    Attributes:
        characters, tokens: the ranges of the output's text and tokens.
        content: the new text outside calls.
        calls: the new parts of calls.
        is_first, is_last: whether the choice begins or ends in this part.
    """

    choice: Choice
    characters: slice
    tokens: slice
    content: str
    calls: tuple[CallPart, ...]
    is_first: bool
    is_last: bool


class Cursor:
    """A position in a choice: everything before it has been sent.

    Args:
        choice: the choice, which may still be in progress.
        lists_tokens: whether parts also list tokens, so that a token without text is a part.
        begins_early: whether the first token is a part even without text. The text of a call may come
            many tokens later.
    """

    def __init__(self, choice: Choice, lists_tokens: bool, begins_early: bool):
        self.choice, self._lists_tokens, self._begins_early = choice, lists_tokens, begins_early
        self._characters, self._tokens, self._content, self._arguments = 0, 0, 0, list[int]()
        self._has_begun, self._has_ended = False, False

    def has_more(self) -> bool:
        """Return whether there is a part that has not been sent."""
        if self._has_ended or self.choice.finish_reason is not None:
            return not self._has_ended
        if self.choice.count > self._tokens and (self._lists_tokens or (self._begins_early and not self._has_begun)):
            return True
        reply = self.choice.reply
        return (len(reply.content), [len(call.arguments) for call in reply.calls]) != (self._content, self._arguments)

    def next(self) -> Part:
        """Return everything that has not been sent, and advance past it."""
        choice, reply = self.choice, self.choice.reply
        self._arguments += [-1] * (len(reply.calls) - len(self._arguments))  # calls that begin here
        calls = tuple(
            CallPart(i, call.name if sent < 0 else None, call.arguments[max(0, sent) :])
            for i, (call, sent) in enumerate(zip(reply.calls, self._arguments, strict=True))
            if len(call.arguments) > sent
        )
        part = Part(
            choice,
            slice(self._characters, max(choice.writer.shown, self._characters)),
            slice(self._tokens, choice.count),
            reply.content[self._content :],
            calls,
            not self._has_begun,
            choice.finish_reason is not None,
        )
        self._characters, self._tokens = part.characters.stop, choice.count
        self._content, self._arguments = len(reply.content), [len(call.arguments) for call in reply.calls]
        self._has_begun, self._has_ended = True, part.is_last
        return part
