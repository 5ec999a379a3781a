# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Roll-outs of several turns, which keep the KV caches between turns."""

from typing import Self

import jax.numpy as jnp
from jax import Array
from numpy.typing import ArrayLike

from jspec.acceptance import RULES, Rule
from jspec.core.sampling import SamplingParams
from jspec.core.types import Output, pytree
from jspec.decoding.program import checked, guards, traced
from jspec.decoding.turns import RolloutSpec, RolloutState, append_tokens, begin_turns, take_turn
from jspec.decoding.validate_arguments import as_array, as_arrays, as_settings, check_drafted, check_rule
from jspec.decoding.validate_tree import number_of_drafts
from jspec.decoding.validate_turns import check_appended, check_start, check_turn
from jspec.drafters.base import DraftSource, is_user_defined
from jspec.drafters.draft_length import DEFAULT, DraftLength, Fixed
from jspec.drafters.duck_length import as_draft_length
from jspec.drafters.standalone.model import as_drafter
from jspec.models.llama import Llama


@pytree
class Rollout:
    """A batch of B texts that grow turn by turn, with the KV caches of all tokens so far.

    A turn either generates tokens (`generate`) or appends given tokens (`append`), such as the observation of an
    environment. No turn reads earlier tokens again.

    A roll-out is an immutable pytree. Its shapes never change, so it can be the carry of `jax.lax.scan`. Every leaf has
    one entry per row. The models are arguments of each call and not part of the roll-out. They may get new weights
    between turns, but the caches keep what the earlier weights computed.

    Attributes:
        state: the texts and the caches.
    """

    state: RolloutState

    @classmethod
    def start(
        cls,
        target: Llama,
        draft: DraftSource | None,
        tokens: ArrayLike,
        lengths: ArrayLike,
        keys: Array,
        *,
        max_length: int,
        num_draft_tokens: int | DraftLength = DEFAULT,
        accept: str | Rule = "rejection",
        samples_per_prompt: int = 1,
    ) -> Self:
        """Prefill the prompts.

        Args:
            target, tokens, lengths, keys, accept, samples_per_prompt: same as in `jspec.speculative_generate`. Every
                turn uses the same keys, because each draw also depends on the position of its token.
            draft: same as in `jspec.speculative_generate`, or None to decode without a draft.
            max_length: L, the largest number of tokens in a row, with all turns. The caches have room for L tokens per
                row from the beginning.
            num_draft_tokens: same as in `jspec.speculative_generate`, except that "auto" is not available.

        Returns:
            A roll-out of B G rows, where G is `samples_per_prompt`.

        Raises:
            ValueError: an argument is out of range, or the drafter cannot read appended tokens.
            TypeError: keys are raw, or an argument has the wrong type.
        """
        rule, drafter = check_rule(accept), None if draft is None else as_drafter(draft)
        prompts, *_ = as_arrays(tokens, lengths, keys, SamplingParams(), (), samples_per_prompt)
        number = None if drafter is None else number_of_drafts(target, drafter, num_draft_tokens, rule)
        check_start(target, drafter, prompts, max_length, number)
        spec = RolloutSpec(max_length, Fixed(0), RULES["rejection"])
        if drafter is not None:
            spec = RolloutSpec(max_length, as_draft_length(number), rule)
        with guards(spec.rule, prompts.tokens, prompts.lengths):
            return cls(begin_turns(target, checked(drafter), prompts, spec=spec))

    def generate(
        self,
        target: Llama,
        draft: DraftSource | None,
        *,
        max_new_tokens: int,
        sampling: SamplingParams = SamplingParams(),
        eos_ids: ArrayLike = (),
        pad_id: int = 0,
        active: ArrayLike | None = None,
    ) -> tuple[Self, Output]:
        """Generate the next tokens of each row.

        The output has the distribution of `jspec.generate` with the whole text so far as the prompt. Penalties and
        `min_tokens` therefore treat all earlier turns as the prompt. In float32, greedy decoding and the rule
        "coupled" return the same tokens as that call with the same keys, up to rounding.

        A row gains at most as many tokens as it has room for. Outside `jax.jit`, a row without room for
        `max_new_tokens` raises ValueError if its length is known. Inside `jax.jit`, the row stops when it is full.

        Args:
            target, draft: the models that were passed to `start`, perhaps with new weights.
            max_new_tokens, sampling, eos_ids, pad_id: same as in `jspec.speculative_generate`.
            active: ``bool[B]``, the rows that gain tokens in this turn; None for all rows. Other rows do not change.

        Returns:
            The new roll-out, and the `Output` of this turn.

        Raises:
            ValueError: an argument is out of range, there is too little room, or the models do not fit the caches.
            TypeError: an argument has the wrong type.
        """
        drafter = None if draft is None else as_drafter(draft)
        sampling, ends = as_settings(sampling, eos_ids)
        rows = None if active is None else as_array("active", active)
        check_turn(self.state, target, drafter, max_new_tokens, sampling, ends, pad_id, rows)
        settings = traced(sampling, ends, pad_id)
        rows = None if rows is None else jnp.asarray(rows)
        with guards(self.state.spec.rule):
            state, out, out_of_vocab = take_turn(
                target, checked(drafter), self.state, settings, rows, max_new_tokens=max_new_tokens
            )
        if is_user_defined(drafter):
            check_drafted(drafter, out_of_vocab, target.config.vocab_size)
        return type(self)(state), out

    def append(self, target: Llama, draft: DraftSource | None, tokens: ArrayLike, lengths: ArrayLike) -> Self:
        """Append tokens to each row, and read them with both models.

        Both models process all M columns, whatever `lengths` holds. Outside `jax.jit`, tokens without room raise
        ValueError if the rows' lengths are known. Inside `jax.jit`, they are dropped, and the row is full: its length
        is `max_length`, and it gains nothing more.

        Args:
            target, draft: the models that were passed to `start`, perhaps with new weights.
            tokens: ``int32[B, M]``, padded on the right with any values; M is at least 1 and at most `max_length`. Each
                M needs a separate program.
            lengths: ``int32[B]`` in 0..M, the number of tokens to append to each row.

        Returns:
            The new roll-out.

        Raises:
            ValueError: an argument is out of range, there is too little room, or the models do not fit the caches.
            TypeError: an argument has the wrong type.
        """
        drafter = None if draft is None else as_drafter(draft)
        new, counts = as_array("tokens", tokens), as_array("lengths", lengths)
        check_appended(self.state, target, drafter, new, counts)
        with guards(self.state.spec.rule, new, counts):
            return type(self)(append_tokens(target, checked(drafter), self.state, new, counts))

    @property
    def tokens(self) -> Array:
        """All tokens so far, ``int32[B, L]``; row b is valid up to ``lengths[b]``."""
        return self.state.text[:, : self.max_length]

    @property
    def lengths(self) -> Array:
        """The number of tokens in each row, ``int32[B]``, prompts included."""
        return self.state.lengths

    @property
    def max_length(self) -> int:
        """L, the largest number of tokens in a row."""
        return self.state.spec.max_length
