# pyright: strict, reportUnknownMemberType=false
"""What training makes small, and what is measured of it: a head's laws against the target's, depth by depth."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec.training.losses import LOSSES, acceptance, log_probs

_DECAY = 0.8  # of a later depth, which is reached less often (EAGLE-3)


class Judge(NamedTuple):
    """The target's laws of a batch, over the D tokens that can be guessed.

    Attributes:
        log_probs: ``float32[B, S, D]``, at t of the token t + 1, of those D alone.
        covered: ``float32[B, S]``, what they have of the whole law.
        likeliest: ``int32[B, S]``, which of the D is the target's likeliest token; D where none of them is.
        learned: ``bool[B, S]``, the tokens to be guessed.
    """

    log_probs: Array
    covered: Array
    likeliest: Array
    learned: Array


class Score(NamedTuple):
    """Of each depth, ``float32[depth]``: means over the tokens to be guessed.

    Attributes:
        loss: as asked for.
        acceptance: ``sum min(p, q)`` at temperature 1.
        agreement: how often both find the same token likeliest, of all V.
        tokens: how many.
    """

    loss: Array
    acceptance: Array
    agreement: Array
    tokens: Array


def judge(logits: Array, draft_ids: Array | None, learned: Array) -> Judge:
    """Of the target's ``logits[B, S, V]``; `draft_ids`, ``int32[D]``, are the tokens that can be guessed."""
    likeliest = logits.argmax(-1)
    if draft_ids is None:
        return Judge(log_probs(logits), jnp.ones(logits.shape[:2]), likeliest, learned)
    few = jnp.take(logits, draft_ids, axis=-1)
    known = jnp.take(draft_ids, few.argmax(-1)) == likeliest
    covered = jnp.exp(jax.nn.logsumexp(few, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
    return Judge(log_probs(few), covered, jnp.where(known, few.argmax(-1), draft_ids.size), learned)


def score(said: Iterable[Array], offset: int, judge: Judge, loss: str) -> Score:
    """Of logits ``[B, S', D]`` a depth: at t of the token ``t + 1 + offset``, the first `depth` positions left out."""
    rows = [_score_one(logits, offset, depth, judge, LOSSES[loss]) for depth, logits in enumerate(said)]
    return Score(*map(jnp.stack, zip(*rows, strict=True)))


def _score_one(
    logits: Array, offset: int, depth: int, judge: Judge, loss: Callable[[Array, Array], Array]
) -> tuple[Array, Array, Array, Array]:
    size = judge.learned.shape[1] - 1 - offset  # positions behind which there is a token to be guessed
    meant = judge.learned[:, 1 + offset :] & (jnp.arange(size) >= depth)
    count = jnp.maximum(meant.sum(), 1)
    log_q, log_p = log_probs(logits[:, :size]), judge.log_probs[:, offset : offset + size]
    covered = judge.covered[:, offset : offset + size]

    def mean(values: Array) -> Array:
        return jnp.where(meant, values, 0).sum() / count

    kept = acceptance(log_p + jnp.log(covered)[..., None], log_q)
    same = (judge.likeliest[:, offset : offset + size] == log_q.argmax(-1)).astype(jnp.float32)
    return mean(loss(log_p, log_q)), mean(kept), mean(same), meant.sum(dtype=jnp.float32)


def total(score: Score) -> Array:
    """The one number that is made small: later depths count less."""
    weights = _DECAY ** jnp.arange(score.loss.size)
    return (weights * score.loss).sum() / weights.sum()
