"""Planted bugs: each is a bug somebody shipped, put into jspec by wrapping one of its functions, and must be caught.

The judges are those of the other tests: the joint law of three tokens, the algebra of one round, the support at u = 0,
and the acceptance of a draft equal to the target. Unpatched, jspec passes every one of them on the same draws.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import toys
from oracle import ALPHA
from scipy import stats
from test_accept import algebra_error

from jspec import accept, sampling
from jspec import keys as streams
from jspec import round as rounds
from jspec.drafters import Context, ModelDrafter
from jspec.drafters import chain as drafting
from jspec.types import Draft

DRAWS, VOCAB, NUM_TOKENS, EOS, PROMPT = 50_000, 8, 3, 5, (3, 6)
SETTINGS = {"temperature": 0.7, "top_p": 0.85, "repetition_penalty": 1.2, "presence_penalty": 0.6,
            "frequency_penalty": 0.4}  # fmt: skip


def texts(sampling_settings, draft=None, draws=DRAWS, rule="rejection"):
    """`draws` texts of up to three tokens from whatever jspec is at this moment."""
    target, other = toys.markov_pair(7)
    fields = {name: jnp.float32(value) for name, value in sampling_settings.items()}
    warps = toys.warps(sampling.SamplingParams(**fields), draws)
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (draws, len(PROMPT)))
    keys = jax.random.split(jax.random.key(8), draws)
    return toys.decode(target, ModelDrafter(draft or other), tokens, jnp.full(draws, len(PROMPT)), keys, warps,
                       max_new_tokens=NUM_TOKENS, num_draft_tokens=2, eos_ids=(EOS,),
                       rule=accept.RULES[rule])  # fmt: skip


def law_p_value(rule="rejection"):
    """p of the joint law of the texts, and the power to see at `ALPHA` a bias of the size that was seen."""
    table = np.asarray(toys.markov_pair(7)[0].table)

    def next_law(text):
        last = text[-1] if text else PROMPT[-1]
        return oracle.sampling_law(table[last], prompt=PROMPT, generated=text, **SETTINGS)

    out = texts(SETTINGS, rule=rule)
    counts = np.bincount(np.asarray(out.tokens) @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**NUM_TOKENS)
    law = oracle.joint_law(next_law, VOCAB, NUM_TOKENS, eos=(EOS,))
    statistic, freedom = oracle.chi_square(counts, law)
    seen = max(statistic - freedom, 0)
    # scipy's noncentral law is slow and of no use where the statistic is astronomic.
    power = 1.0 if seen > 1e4 else stats.ncx2.sf(stats.chi2.isf(ALPHA, freedom), freedom, seen)
    return oracle.p_of(statistic, freedom), f"p = {oracle.p_of(statistic, freedom):.1e}, power {power:.4f}"


def block_law_p_value():
    """`law_p_value` of block verification."""
    return law_p_value("block")


def impossible_texts():
    """Tokens with p = 0 that are written when every acceptance draw is u = 0; as a p-value, 0 or 1."""
    out = texts({"temperature": 1.0, "top_k": 3})
    table = np.asarray(toys.markov_pair(7)[0].table)
    possible = np.stack([oracle.sampling_law(row, top_k=3) > 0 for row in table])
    tokens = np.concatenate([np.full((DRAWS, 1), PROMPT[-1]), out.tokens], axis=1)
    live = np.arange(NUM_TOKENS) < np.asarray(out.lengths)[:, None]
    count = (live & ~possible[tokens[:, :-1], tokens[:, 1:]]).sum()
    return float(count == 0), f"{count} impossible tokens of {live.sum()} at u = 0"


def algebra():
    """The algebra of one round in float32; as a p-value, 0 or 1."""
    error, _ = algebra_error(np.float32, pairs=2_000)
    return float(error <= 1e-6), f"algebra error {error:.1e}, tolerance 1e-06, no chance involved"


def acceptance_of_itself():
    """Refusals of a draft equal to the target, of which there are none; as a p-value, 0 or 1."""
    stats_ = texts(SETTINGS, draft=toys.markov_pair(7)[0]).stats
    refused = int((stats_.drafted - stats_.accepted).sum())
    return float(refused <= 2), f"{refused} of {int(stats_.drafted.sum())} drafts equal to the target refused"


def shared_noise(patch):
    """Drafts are drawn with the noise the correction will be drawn with."""
    patch(rounds, "draft_noise", streams.target_noise)


def one_key_for_all_rows(patch):
    stream = streams.stream
    for module in (accept, streams):
        patch(module, "stream", lambda keys, *name: stream(jnp.broadcast_to(keys[:1], keys.shape), *name))


def raw_q(patch):
    """The draft is drawn from its warped law, and judged by the unwarped one."""
    token_probs, draw, warped = drafting.token_probs, Context.draw, []

    def raw(logits, warp, seen):
        warped.append(token_probs(logits, warp, seen)[:, 0])
        return jax.nn.softmax(logits)

    patch(drafting, "token_probs", raw)
    patch(Context, "draw", lambda context, k, probs: draw(context, k, warped.pop()))


def rounded_to_bfloat16(patch):
    count_accepted, next_probs = accept.count_accepted, accept.next_probs

    def rounded(law):
        return law.astype(jnp.bfloat16).astype(jnp.float32)

    def round_draft(draft):
        return Draft(draft.tokens, rounded(draft.probs))

    patch(accept, "count_accepted", lambda u, draft, p: count_accepted(u, round_draft(draft), rounded(p)))
    patch(accept, "next_probs", lambda n, draft, p: next_probs(n, round_draft(draft), rounded(p)))


def inclusive_comparison(patch):
    """``u q <= p``: the same as ``<`` but where both are 0, which is where it matters."""
    count_accepted, least = accept.count_accepted, np.finfo(np.float32).tiny
    patch(accept, "count_accepted", lambda u, draft, p: count_accepted(u, draft, jnp.maximum(p, least)))


def bonus_from_q(patch):
    next_probs = accept.next_probs

    def mutant(num_accepted, draft, target_probs):
        bonus = (num_accepted == draft.tokens.shape[1])[:, None]
        return jnp.where(bonus, draft.probs[:, -1], next_probs(num_accepted, draft, target_probs))

    patch(accept, "next_probs", mutant)


def temperature_on_one_side(patch):
    token_probs = rounds.token_probs

    def mutant(logits, warp, *history):
        return token_probs(logits, dataclasses.replace(warp, temperature=jnp.ones_like(warp.temperature)), *history)

    patch(rounds, "token_probs", mutant)


def unclamped_residual(patch):
    """``norm(|p - q|)``: what is left where q is larger counts as well."""

    def mutant(target_probs, draft_probs):
        left = target_probs - draft_probs
        return jnp.abs(left) / jnp.maximum(jnp.abs(left).sum(-1, keepdims=True), 1e-30)

    patch(accept, "residual", mutant)


def weight_left_out(patch):
    """What is left after a refused block is taken off the whole of p, not off the share that the block left."""
    next_probs = accept.next_probs
    patch(accept, "next_probs", lambda n, draft, p, weight=None: next_probs(n, draft, p))


def weight_not_carried(patch):
    """Each token is weighed by itself, as if those before it had been drawn from p."""
    block_weights = accept.block_weights

    def mutant(draft, p):
        alone = [block_weights(Draft(draft.tokens[:, k:], draft.probs[:, k:]), p[:, k:])[:, 1] for k in range(2)]
        return jnp.stack([jnp.ones_like(alone[0]), *alone], axis=1)

    patch(accept, "block_weights", mutant)


def verified_one_position_off(patch):
    token_probs = rounds.token_probs
    patch(rounds, "token_probs", lambda *args: jnp.roll(token_probs(*args), 1, axis=1))


def top_p_after_the_residual(patch):
    """The target is compared without top-p, which then cuts the law of the correction."""
    token_probs, next_probs, cut = rounds.token_probs, accept.next_probs, []

    def uncut(logits, warp, *history):
        cut.append(warp.tail_mass)
        return token_probs(logits, dataclasses.replace(warp, tail_mass=None), *history)

    def mutant(*args):
        law = next_probs(*args)
        law = jnp.where(jax.vmap(sampling._nucleus)(law, cut.pop()), law, 0)
        return law / law.sum(-1, keepdims=True)

    patch(rounds, "token_probs", uncut)
    patch(accept, "next_probs", mutant)


def penalty_not_advanced_in_verify(patch):
    token_probs = rounds.token_probs

    def mutant(logits, warp, seen, drafted):
        return jnp.concatenate([token_probs(logits[:, s : s + 1], warp, seen) for s in range(logits.shape[1])], axis=1)

    patch(rounds, "token_probs", mutant)


def penalty_not_advanced_in_draft(patch):
    """Draft laws stay honest, so the text stays exact: what it costs is acceptance."""
    patch(drafting, "add_seen", lambda seen, tokens, keep: seen)


def eos_ignored(patch):
    commit = rounds._commit
    patch(rounds, "_commit", lambda request, *rest: commit(
        dataclasses.replace(request, eos_ids=jnp.full_like(request.eos_ids, -1)), *rest))  # fmt: skip


MUTANTS = {
    law_p_value: (shared_noise, raw_q, bonus_from_q, temperature_on_one_side,
                  verified_one_position_off, one_key_for_all_rows, top_p_after_the_residual,
                  penalty_not_advanced_in_verify, eos_ignored),
    block_law_p_value: (unclamped_residual, weight_left_out, weight_not_carried),
    impossible_texts: (inclusive_comparison,),
    algebra: (rounded_to_bfloat16,),
    acceptance_of_itself: (penalty_not_advanced_in_draft,),
}  # fmt: skip
PLANTED = [(judge, mutant) for judge, mutants in MUTANTS.items() for mutant in mutants]


@pytest.fixture
def patch(monkeypatch):
    """`setattr` that ends with the test. At u = 0 everywhere for the judge that asks for it."""
    return monkeypatch.setattr


def prepare(judge, patch):
    if judge is impossible_texts:
        patch(accept, "uniform", lambda keys: jnp.zeros(keys.shape, jnp.float32))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("judge", MUTANTS, ids=lambda judge: judge.__name__)
def test_unpatched_jspec_passes(report, judge, patch):
    prepare(judge, patch)
    p, figure = judge()
    report(unpatched=figure)
    assert p > 1e-3


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("judge", "mutant"), PLANTED, ids=lambda f: f.__name__)
def test_planted_bug_is_caught(report, judge, mutant, patch):
    prepare(judge, patch)
    mutant(patch)
    p, figure = judge()
    report(caught_at=figure, alpha=ALPHA)
    assert p < ALPHA
