"""Planted bugs: each one was or might be shipped, and is put into jspec by wrapping one of its functions.

``patch(owner, name, value)`` is a `setattr` that is undone after the test. `test_mutants` says what catches each bug.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.acceptance import block, coupled, rejection, traversal, walk
from jspec.core import filters, keys, probs, sampling
from jspec.decoding import round as rounds
from jspec.decoding import verify as verification
from jspec.drafters import Context, Draft, FallbackDrafter, base, drafts
from jspec.drafters.standalone import autoregressive as drafting

RULE_MODULES = block, coupled, rejection, traversal, walk


def in_rules(patch, name, value):
    """Patch `name` in every rules module that uses it."""
    for module in RULE_MODULES:
        if hasattr(module, name):
            patch(module, name, value)


def shared_noise(patch):
    """Draw drafts with the noise that the correction will be drawn with."""
    noise = keys.target_noise
    patch(rounds, "draft_noise", lambda keys, positions, size, _: noise(keys, positions, size)[:, :, None])


def one_key_for_all_rows(patch):
    stream = keys.stream

    def mutant(keys, *name):
        return stream(jnp.broadcast_to(keys[:1], keys.shape), *name)

    in_rules(patch, "stream", mutant)
    patch(keys, "stream", mutant)


def raw_q(patch):
    """Draw the draft from its transformed distribution, but verify it against the raw one."""
    token_probs, draw, transformed = drafting.token_probs, Context.draw, []

    def raw(logits, transforms, token_counts):
        transformed.append(token_probs(logits, transforms, token_counts)[:, 0])
        return jax.nn.softmax(logits)

    patch(drafting, "token_probs", raw)
    patch(Context, "draw", lambda context, k, probs: draw(context, k, transformed.pop()))


def rounded_to_bfloat16(patch):
    count_accepted, next_probs = rejection.count_accepted, rejection.next_probs

    def rounded(law):
        return law.astype(jnp.bfloat16).astype(jnp.float32)

    def round_draft(draft):
        return Draft(draft.tokens, rounded(draft.probs))

    in_rules(patch, "count_accepted", lambda u, draft, p: count_accepted(u, round_draft(draft), rounded(p)))
    in_rules(patch, "next_probs", lambda n, draft, p: next_probs(n, round_draft(draft), rounded(p)))


def inclusive_comparison(patch):
    """Compare with ``u q <= p``: this differs from ``<`` only if both sides are 0, which is where it matters."""
    count_accepted, least = rejection.count_accepted, np.finfo(np.float32).tiny
    in_rules(patch, "count_accepted", lambda u, draft, p: count_accepted(u, draft, jnp.maximum(p, least)))


def bonus_from_q(patch):
    next_probs = rejection.next_probs

    def mutant(num_accepted, draft, target_probs):
        bonus = (num_accepted == draft.tokens.shape[1])[:, None]
        return jnp.where(bonus, draft.probs[:, -1], next_probs(num_accepted, draft, target_probs))

    in_rules(patch, "next_probs", mutant)


def temperature_on_one_side(patch):
    token_probs = verification.token_probs

    def mutant(logits, transforms, *history):
        at_one = dataclasses.replace(transforms, temperature=jnp.ones_like(transforms.temperature))
        return token_probs(logits, at_one, *history)

    patch(verification, "token_probs", mutant)


def unclamped_residual(patch):
    """Use ``norm(|p - q|)`` as the residual, which also counts the tokens for which q is larger."""

    def mutant(target_probs, draft_probs):
        left = target_probs - draft_probs
        return jnp.abs(left) / jnp.maximum(jnp.abs(left).sum(-1, keepdims=True), 1e-30)

    in_rules(patch, "residual", mutant)


def weight_left_out(patch):
    """Compute the residual after a rejected block from the whole of p, not from the share that the block left."""
    next_probs = rejection.next_probs
    in_rules(patch, "next_probs", lambda n, draft, p, weight=None: next_probs(n, draft, p))


def weight_not_carried(patch):
    """Weigh each token by itself, as if the tokens before it had been drawn from p."""
    block_weights = block.block_weights

    def mutant(draft, p):
        alone = [block_weights(Draft(draft.tokens[:, k:], draft.probs[:, k:]), p[:, k:])[:, 1] for k in range(2)]
        return jnp.stack([jnp.ones_like(alone[0]), *alone], axis=1)

    patch(block, "block_weights", mutant)


def verified_one_position_off(patch):
    token_probs = verification.token_probs
    patch(verification, "token_probs", lambda *args: jnp.roll(token_probs(*args), 1, axis=1))


def top_p_after_the_residual(patch):
    """Compare with the target without top-p, and apply top-p to the correction's distribution."""
    token_probs, next_probs, cut = verification.token_probs, rejection.next_probs, []

    def uncut(logits, transforms, *history):
        cut.append(transforms.tail_mass)
        return token_probs(logits, dataclasses.replace(transforms, tail_mass=None), *history)

    def mutant(*args):
        law = next_probs(*args)
        law = jnp.where(jax.vmap(filters._nucleus)(law, cut.pop()), law, 0)
        return law / law.sum(-1, keepdims=True)

    patch(verification, "token_probs", uncut)
    in_rules(patch, "next_probs", mutant)


def penalty_not_advanced_in_verify(patch):
    token_probs = verification.token_probs

    def mutant(logits, transforms, token_counts, *drafted):
        alone = [token_probs(logits[:, s : s + 1], transforms, token_counts) for s in range(logits.shape[1])]
        return jnp.concatenate(alone, axis=1)

    patch(verification, "token_probs", mutant)


def penalty_not_advanced_in_draft(patch):
    """Keep the penalty fixed while drafting. Draft distributions stay correct, so only the acceptance rate drops."""
    patch(drafting, "add_tokens", lambda token_counts, tokens, keep: token_counts)


def eos_ignored(patch):
    stop = rounds._stop
    patch(
        rounds,
        "_stop",
        lambda params, *rest: stop(dataclasses.replace(params, eos_ids=jnp.full_like(params.eos_ids, -1)), *rest),
    )


def picked_by_position(patch):
    """Choose a token's drafter row by row, but the drafter of its distribution position by position."""

    def propose(self, state, context, num_draft_tokens):
        context = dataclasses.replace(context, unread=context.unread + num_draft_tokens - 1)
        first, first_state = self.first.propose(state[0], context, num_draft_tokens)
        second, second_state = self.second.propose(state[1], context, num_draft_tokens)
        first = drafts.as_draft(self.first, first, context, num_draft_tokens)
        second = drafts.as_draft(self.second, second, context, num_draft_tokens)
        guessed = first.probs.sum(-1) > 0
        draft = Draft(
            jnp.where(guessed[:, :1], first.tokens, second.tokens),
            jnp.where(guessed[..., None], first.probs, second.probs),
        )
        return draft, (first_state, second_state)

    patch(FallbackDrafter, "propose", propose)


def _forgets(patch, forgotten):
    names = {"repetition", "presence", "frequency"} - {forgotten}
    looked_at = property(lambda transforms: any(getattr(transforms, name) is not None for name in names))
    patch(sampling.LogitsTransforms, "penalised", looked_at)


def repetition_forgotten(patch):
    """Hide one penalty from `LogitsTransforms.penalised`, so that this penalty alone has no effect."""
    _forgets(patch, "repetition")


def presence_forgotten(patch):
    _forgets(patch, "presence")


def frequency_forgotten(patch):
    _forgets(patch, "frequency")


def temperature_forgotten_alone(patch):
    """Take a shortcut: without filters, report the draft's distribution at temperature 1."""
    token_probs, draw, transformed = drafting.token_probs, Context.draw, []

    def mutant(logits, transforms, token_counts):
        transformed.append(token_probs(logits, transforms, token_counts)[:, 0])
        filters = jax.tree.leaves(dataclasses.replace(transforms, temperature=None, bias=None))
        return transformed[-1][:, None] if filters else jax.nn.softmax(logits)

    patch(drafting, "token_probs", mutant)
    patch(Context, "draw", lambda context, k, probs: draw(context, k, transformed.pop()))


def _wrap_stream(patch, change):
    """Apply ``change(positions, purpose)`` before `keys.stream`."""
    stream = keys.stream

    def mutant(row_keys, *name):
        return stream(row_keys, *change(*name))

    in_rules(patch, "stream", mutant)
    patch(keys, "stream", mutant)


def streams_begin_anew_after_512(patch):
    _wrap_stream(patch, lambda positions, purpose: (positions % 512, purpose))


def two_purposes_with_one_number(patch):
    _wrap_stream(patch, lambda positions, purpose: (positions, min(purpose, keys.Purpose.ACCEPT)))


def stride_below_the_number_of_purposes(patch):
    patch(keys, "STRIDE", 2)


def trials_with_the_keys_of_texts(patch):
    patch(keys, "trial_keys", lambda row_keys, number: jax.vmap(jax.random.fold_in, (0, None))(row_keys, number))


def gumbel_of_low_mode(patch):
    gumbel = jax.random.gumbel
    patch(jax.random, "gumbel", lambda *args, mode: gumbel(*args, mode="low"))


def masses_rounded_to_bfloat16(patch):
    """Round with `lax.reduce_precision`, because XLA removes a pair of casts."""

    class Numpy:
        def __getattr__(self, name):
            return getattr(jnp, name)

        def log(self, masses):
            return jnp.log(lax.reduce_precision(masses, exponent_bits=8, mantissa_bits=7))

    patch(probs, "jnp", Numpy())


def tokens_in_16_bits(patch):
    draw = probs.sample_with_noise
    for module in (coupled, base, probs):
        patch(module, "sample_with_noise", lambda *args: draw(*args).astype(jnp.int16).astype(jnp.int32))
