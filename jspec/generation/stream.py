"""`stream`: the output for one prompt, in parts as they are decoded."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.core.sampling import SamplingParams
from jspec.core.tokenizer import Tokenizer
from jspec.core.transfers import explicit_transfers
from jspec.core.types import check_count
from jspec.drafters.base import DraftSource
from jspec.drafters.standalone.model import positions
from jspec.engine import Engine, Request, Result
from jspec.generation.complete import Completion, Task, engine_draft_length, prepare
from jspec.generation.statistics import statistics
from jspec.models.language_model import LanguageModel
from jspec.models.llama import Llama
from jspec.models.sampling_defaults import recommended
from jspec.text import request_keys
from jspec.text.chat_template import Prompt, room
from jspec.text.stop_strings import StopAwareDetokenizer


def stream(
    target: Llama,
    draft: DraftSource | None,
    tokenizer: Tokenizer,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    num_draft_tokens: int | str | None = None,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    template: Mapping[str, object] | None = None,
) -> Iterator[Completion]:
    """Complete a text prompt, or answer a conversation, and yield each new part as soon as it is decoded.

    The output equals that of `complete` without a draft and with the same seed. It does not depend on the draft,
    because drafts are verified with the rule "coupled". Each step of the iterator decodes a few rounds. Breaking out of
    the iterator ends decoding.

    Args:
        target, draft, tokenizer, max_new_tokens, sampling, seed, stop, template: same as in `complete`.
        prompt: one prompt, in any form that `complete` accepts.
        num_draft_tokens: K or "auto", same as in `jspec.engine.Engine`. The default is 4, or "auto" for a lookup
            drafter with a fallback.

    Yields:
        A `Completion` for each part, with the part's pieces, tokens, log-probabilities and origins, and statistics of
        the whole output so far. The `finish_reason` is None except in the last part.

    Raises:
        ValueError, TypeError: the same errors as in `complete`, raised before decoding begins.
        RuntimeError: the device failed.
    """
    check_count("max_new_tokens", max_new_tokens)
    task = prepare(tokenizer, [prompt], stop, template)
    known = positions(target, draft)
    size = room(max_new_tokens, task.batch, known)
    if draft is None and num_draft_tokens is not None:
        raise ValueError("draft is None, so num_draft_tokens cannot be used; pass a draft, or omit num_draft_tokens.")
    draft_length = engine_draft_length(draft) if num_draft_tokens is None else num_draft_tokens
    how: dict[str, Any] = {} if draft is None else {"num_draft_tokens": draft_length}
    # One slot, with one of a few possible lengths, so that other prompts reuse the compiled programs.
    engine = Engine(
        target,
        draft,
        slots=1,
        max_length=min(task.batch.tokens.shape[1] + size, known),
        **how,
    )
    sampling = recommended(target) if sampling is None else sampling
    with explicit_transfers():
        key = request_keys(seed, 1)[0]
    request = Request(task.rows[0], max_new_tokens, sampling, key, task.ends(target))
    return parts(target, task, request, engine.stream_sync(request))


def parts(target: LanguageModel, task: Task, request: Request, results: Iterator[Result]) -> Iterator[Completion]:
    """Yield each new part of the output for a task's only prompt, as the result grows."""
    writer, sent = StopAwareDetokenizer(task.tokenizer, request.tokens, task.stop), 0
    for result in results:
        for token in result.tokens[len(writer.pieces) :]:
            writer.add(token)
            if writer.stopped is not None:
                break
        if result.finish_reason == "error":
            raise RuntimeError(result.error)
        is_last = writer.stopped is not None or result.finish_reason is not None
        if is_last:
            writer.end()
        if (known := writer.settled) > sent:
            ends = [*writer.starts[sent : known + 1], len(writer.text)]
            pieces = [writer.text[start:end] for start, end in itertools.islice(itertools.pairwise(ends), known - sent)]
            reason = task.reason(target, writer.stopped, result.tokens[known - 1]) if is_last else None
            yield _part(task, result, slice(sent, known), pieces, reason)
            sent = known
        if is_last:
            return


def _part(task: Task, result: Result, new: slice, pieces: list[str], reason: str | None) -> Completion:
    longest = max(result.drafted, default=0)
    return Completion(
        prompt=task.prompts[0],
        pieces=pieces,
        tokens=result.tokens[new],
        logprobs=result.logprobs[new],
        origins=result.origins[new],
        finish_reason=reason,
        stats=statistics(
            len(result.drafted),
            sum(result.drafted),
            sum(result.judged),
            sum(result.accepted),
            [sum(number > i for number in result.accepted) for i in range(longest)],
            result.origins,
        ),
    )
