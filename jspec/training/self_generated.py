"""Chats that the target writes itself: training data for a drafter if there is no other data.

A drafter has to draft what this target writes, and no other source matches the target better. The user's turns are
sampled too, after the text that the chat template puts before them, as in Xu et al. 2024, "Magpie", section 2.1.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jspec.core.keys import TRAINING, trial_keys
from jspec.core.sampling import SamplingParams
from jspec.generation.generate import generate
from jspec.text import eos_ids, request_keys
from jspec.text.chat_template import encode, rendered

QUESTION_TOKENS = 96
_MARK = "\ue000"  # a private character, which no template has


@dataclasses.dataclass(frozen=True)
class Frame:
    """The tokens that a chat template puts around the user's turn."""

    before: list[int]
    after: list[int]


def frame_of(tokenizer: Any) -> Frame:
    """Return the frame of a conversation's first turn, up to where the answer starts.

    Raises:
        ValueError: the tokenizer has no chat template, or one that changes the user's text.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The target has no chat template, and without one it cannot write chats by itself; give data, "
                         "texts or chats to train on.")  # fmt: skip
    turn = [{"role": "user", "content": _MARK}]
    text = rendered(tokenizer, turn, "The user's turn")
    if text.count(_MARK) != 1:
        raise ValueError("The target's chat template does not show the user's turn as it is; give data to train on.")
    before, after = (
        tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in text.split(_MARK)
    )
    return Frame(before, after)


def write_chats(
    target: Any, tokenizer: Any, seed: int, *, batch: int, answer_tokens: int, temperatures: tuple[float, ...]
) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers as ids, without duplicates.

    An answer ends with the token that ended it, or at `answer_tokens`.

    Args:
        target: a `jspec.Llama` with its `tokenizer`.
        seed: another seed gives other chats.
        batch: the most chats to write. The result is empty if no question came to an end.
        temperatures: the temperatures of the answers, used in turn; questions are sampled at 1.
    """
    frame, ends = frame_of(tokenizer), eos_ids(target, tokenizer)
    ones = np.ones(batch, np.float32)
    questions = _continue(target, tokenizer, ends, [frame.before] * batch, 2 * seed, QUESTION_TOKENS, ones)
    whole = [frame.before + ids[:-1] + frame.after for ids in questions if len(ids) > 1 and ids[-1] in ends]
    # Keep the number of rows, so that nothing compiles again. Some questions are answered twice, the second time at
    # another turn of the temperatures.
    count = len(whole)
    prompts = [whole[(i + i // count * (1 - count % 2)) % count] for i in range(batch)] if whole else []
    return write_answers(target, tokenizer, prompts, 2 * seed + 1, answer_tokens, temperatures) if whole else []


def write_answers(
    target: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    seed: int,
    answer_tokens: int,
    temperatures: tuple[float, ...],
) -> list[tuple[list[int], list[int]]]:
    """Return prompts as ids and the target's answers to them, without duplicates; otherwise like `write_chats`."""
    heat = np.resize(np.asarray(temperatures, np.float32), len(prompts))
    answers = _continue(target, tokenizer, eos_ids(target, tokenizer), prompts, seed, answer_tokens, heat)
    chats = {(*prompt, -1, *answer): (prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)}
    return list(chats.values())


def _continue(
    target: Any, tokenizer: Any, ends: tuple[int, ...], prompts: list[list[int]], seed: int, most: int, heat: np.ndarray
) -> list[list[int]]:
    rows = encode(tokenizer, prompts)
    keys = trial_keys(request_keys(seed, len(prompts)), TRAINING)  # a drafter must not know the noise of requests
    out = generate(target, rows.tokens, rows.lengths, keys, max_new_tokens=most,
                   sampling=SamplingParams(temperature=heat), eos_ids=ends)  # fmt: skip
    tokens, lengths = jax.device_get((out.tokens, out.lengths))
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
