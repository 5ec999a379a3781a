"""The inputs of the decoding program in three bundles: prompts, traced parameters and static settings."""

import dataclasses
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.acceptance import Rule
from jspec.core.sampling import LogitsTransforms
from jspec.core.types import pytree
from jspec.drafters.draft_length import DraftLength

AnyArray: TypeAlias = Array | np.ndarray


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "lengths", "keys"], meta_fields=["samples_per_prompt"]
)
@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch of B prompts, each continued G times.

    Attributes:
        tokens: ``int32[B, P]``, padded on the right with any values.
        lengths: ``int32[B]`` in 1..P, the prompt lengths.
        keys: typed keys ``[B G]``. Row ``b G + g`` of the output is sample g of prompt b.
        samples_per_prompt: G.
    """

    tokens: AnyArray
    lengths: AnyArray
    keys: Array
    samples_per_prompt: int = 1

    def repeat_prompts(self) -> "PromptBatch":
        """Return an equivalent batch of B G prompts with one sample each."""
        if self.samples_per_prompt == 1:
            return self
        tokens, lengths = (jnp.repeat(part, self.samples_per_prompt, axis=0) for part in (self.tokens, self.lengths))
        return PromptBatch(tokens, lengths, self.keys)


@pytree
class TracedParams:
    """Parameters that may change between calls without recompilation, shared by all rows or with one entry per row.

    Attributes:
        transforms, draft_transforms: the logits transforms of the target and of the draft.
        max_tokens: ``int32[]`` or ``int32[B]``, each row's own maximum number of new tokens; 0 for no such limit.
        min_tokens: ``int32[]`` or ``int32[B]``, the number of initial tokens that must not be EOS; None for no minimum.
        eos_ids: ``int32[n]`` or ``int32[B, n]``, the tokens that end a row; -1 matches no token.
        pad_id: ``int32[]``, the token that fills the output after a row's end.
    """

    transforms: LogitsTransforms
    draft_transforms: LogitsTransforms
    max_tokens: AnyArray
    min_tokens: AnyArray | None
    eos_ids: AnyArray
    pad_id: AnyArray


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """The static argument of the decoding program, which compiles once per spec and set of argument shapes.

    Attributes:
        max_new_tokens: N, the number of columns of the output.
        draft_length: the maximum number of draft tokens per round, and how many of them each row drafts.
        rule: the acceptance rule.
        record: whether the output has a `Record` of all draft tokens.
        num_top: the number of most likely tokens to return for every new token.
    """

    max_new_tokens: int
    draft_length: DraftLength
    rule: Rule
    record: bool = False
    num_top: int = 0
