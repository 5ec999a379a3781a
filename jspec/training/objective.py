"""The training objective and its metrics: a head's distributions compared with the target's, depth by depth."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jspec.models.llama import Llama
from jspec.training.losses import LOSSES, covered_acceptance, log_probs
from jspec.training.target_states import DistributionStats, TargetStates, distribution_stats

_DECAY = 0.8  # factor for each later depth, which is reached less often (EAGLE-3)


class Judge(NamedTuple):
    """The target's distributions for a batch, over the D tokens that can be drafted.

    Attributes:
        log_probs: ``float32[B, S, D]``, at position t for the token t + 1, normalised over those D tokens.
        covered: ``float32[B, S]``, the share of the whole distribution that those D tokens have.
        top_token: ``int32[B, S]``, the index of the target's most likely token among the D tokens, or D if it is not
            among them.
        learned: ``bool[B, S]``, the tokens to learn.
    """

    log_probs: Array
    covered: Array
    top_token: Array
    learned: Array


class Score(NamedTuple):
    """Means over the tokens to learn, for each depth, ``float32[depth]``.

    Attributes:
        loss: the chosen loss.
        acceptance: ``sum min(p, q)`` at temperature 1.
        agreement: how often the draft and the target agree on the most likely of all V tokens.
        tokens: the number of tokens.
    """

    loss: Array
    acceptance: Array
    agreement: Array
    tokens: Array


def judge(target: Llama, target_states: TargetStates, draft_ids: Array | None, learned: Array) -> Judge:
    """Return the target's distributions, computed from its states for a sequence.

    `draft_ids`, ``int32[D]``, are the tokens that can be drafted.
    """
    if draft_ids is None:
        logits: Array = target.logits(target_states.hidden)
        return Judge(log_probs(logits), jnp.ones(learned.shape), logits.argmax(-1), learned)
    stats: DistributionStats = (
        distribution_stats(target, target_states.hidden) if target_states.stats is None else target_states.stats
    )
    few: Array = target.head.logits(target.norm(target_states.hidden), draft_ids)
    guess = few.argmax(-1)
    # Both sums share terms, but different rounding could make the sum over some tokens exceed the sum over all.
    covered = jnp.minimum(1, jnp.exp(jax.nn.logsumexp(few, axis=-1) - stats.log_mass))
    same = jnp.take(draft_ids, guess) == stats.top_token
    return Judge(log_probs(few), covered, jnp.where(same, guess, draft_ids.size), learned)


def score(said: Iterable[Array], offset: int, judge: Judge, loss: str) -> Score:
    """Return the score of logits ``[B, S', D]`` for each depth.

    The logits at position t are for the token ``t + 1 + offset``. The first `depth` positions do not count.
    """
    size = judge.learned.shape[1] - 1 - offset  # positions followed by a token to draft
    log_p, covered, top = (part[:, offset : offset + size] for part in judge[:3])
    learned = judge.learned[:, 1 + offset :]
    return by_depth(
        score_one(logits[:, :size], Judge(log_p, covered, top, learned & (jnp.arange(size) >= depth)), loss)
        for depth, logits in enumerate(said)
    )


def by_depth(scores: Iterable[Score]) -> Score:
    """Return the scores of single depths as one `Score`."""
    return Score(*map(jnp.stack, zip(*scores, strict=True)))


def score_one(logits: Array, judge: Judge, loss: str, confidence: Array | None = None) -> Score:
    """Return the score of a single depth, whose fields are scalars.

    Args:
        logits: ``[B, N, D]``.
        judge: the target's distributions for the same tokens. `learned` says which of them are to be learned.
        confidence: ``[B, N]``, estimates of the acceptance rate, as logits. The loss then includes their cross-entropy
            with the acceptance rate (DSpark, arXiv 2607.05147).
    """
    log_p, covered, top_token, learned = judge
    meant = learned & jnp.isfinite(log_p).all(-1) & jnp.isfinite(covered)
    count = jnp.maximum(meant.sum(), 1)
    # Mask the loss's inputs, too, because the gradient of values that are masked only afterwards would be 0 times NaN.
    log_q, log_p = (jnp.where(meant[..., None], part, 0) for part in (log_probs(logits), log_p))
    covered = jnp.where(meant, covered, 1)

    def mean(values: Array) -> Array:
        return jnp.where(meant, values, 0).sum() / count

    kept = covered_acceptance(log_p, log_q, covered)
    same = (top_token == log_q.argmax(-1)).astype(jnp.float32)
    value = LOSSES[loss](log_p, log_q, covered, mean)
    if confidence is not None:
        rate = jnp.clip(jax.lax.stop_gradient(kept), 0, 1)
        value += mean(optax.sigmoid_binary_cross_entropy(jnp.where(meant, confidence, 0), rate))
    return Score(value, mean(kept), mean(same), meant.sum(dtype=jnp.float32))


def total(score: Score) -> Array:
    """Return the scalar that training minimises. Later depths count less."""
    weights = _DECAY ** jnp.arange(score.loss.size)
    return (weights * score.loss).sum() / weights.sum()
