"""A trained drafter's gain on this device: tokens per round, predicted and measured, and speed."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from jspec.core.keys import TRAINING, trial_keys
from jspec.core.sampling import SamplingParams
from jspec.core.types import Output
from jspec.drafters.base import DraftSource, own_tree
from jspec.generation.generate import generate, speculative_generate
from jspec.models.llama import Llama
from jspec.text import request_keys
from jspec.text.chat_template import Batch, encode
from jspec.training.fit import Progress, predicted

_NEW_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Result:
    """The gain at one draft length and one temperature, with batch size 1.

    Attributes:
        num_draft_tokens: K.
        temperature: 0 or 1.
        foreseen: tokens per round, predicted from the acceptance rates on held-out text.
        tokens_per_round: tokens per round, measured.
        speedup: tokens per second, relative to plain decoding.
    """

    num_draft_tokens: int
    temperature: float
    foreseen: float
    tokens_per_round: float
    speedup: float


def measure(
    target: Llama,
    drafter: DraftSource,
    prompts: Sequence[Sequence[int]],
    evaluation: Progress,
    num_draft_tokens: int,
    temperature: float,
) -> Result:
    """Continue every prompt both without and with the drafter. The first run compiles and does not count."""
    rates = evaluation.agreement if temperature == 0 else evaluation.acceptance
    rates = (rates + rates[-1:] * num_draft_tokens)[:num_draft_tokens]  # a draft model has one rate for all depths
    seconds, tokens, rounds = np.zeros(2), 0, 0
    batch = encode(None, [list(prompt) for prompt in prompts])  # one width, so that no call recompiles
    for number, row in enumerate([0, *range(len(prompts))]):
        one = Batch(batch.tokens[row : row + 1], batch.lengths[row : row + 1])
        most = min(_NEW_TOKENS, target.config.max_position_embeddings - int(batch.lengths.max()))
        turns = [
            _timed(target, drafted, one, number, num_draft_tokens, temperature, most) for drafted in (None, drafter)
        ]
        if number:
            seconds += [turn[0] / int(turn[1].lengths[0]) for turn in turns]
            tokens += int(turns[1][1].lengths[0])
            rounds += int(turns[1][1].stats.rounds[0])
    return Result(num_draft_tokens, temperature, predicted(rates), tokens / rounds, float(seconds[0] / seconds[1]))


def _timed(
    target: Llama,
    drafter: DraftSource | None,
    prompt: Batch,
    seed: int,
    num_draft_tokens: int,
    temperature: float,
    most: int,
) -> tuple[float, Output]:
    request = target, prompt.tokens, prompt.lengths, trial_keys(request_keys(seed, 1), TRAINING)
    # Decode only up to EOS, because the drafter has learned nothing about tokens after EOS.
    ends = tuple(i for i in target.config.eos_token_ids if i < target.config.vocab_size)
    options: dict[str, Any] = {
        "max_new_tokens": most,
        "eos_ids": ends,
        "sampling": SamplingParams(temperature=temperature),
    }
    start = time.perf_counter()
    if drafter is None:
        out = generate(*request, **options)
    else:
        draft_options = {} if own_tree(drafter) else {"num_draft_tokens": num_draft_tokens}
        out = speculative_generate(target, drafter, *request[1:], **draft_options, **options)
    out = cast(Output, jax.block_until_ready(out))
    return time.perf_counter() - start, out
