"""What an EAGLE head computes, and what else its files say."""

import dataclasses

from convert.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """What the forward pass needs; hashable.

    Attributes:
        generation: 1 or 3.
        layer: of its one layer; `hidden_size` E is the head's own, `vocab_size` V the target's.
        target_hidden_size: of the states it is told; that of `layer` in generation 1.
        features: which of the target's states: i is what enters its layer i, -1 what leaves the last.
        draft_vocab_size: D, how many tokens it can guess; None for all of V.
        own_embedding: it has an embedding of its own, and does not use the target's.
        own_head: it has an output head of its own; always where `draft_vocab_size` is less than V.
        fc_bias: of generation 1.
        norm_before_residual: the residual stream of the layer starts with the normed state.
        norm_before_fc: one norm over the target's states, side by side.
        fc_norm: a norm over each of them (EAGLE-3.1).
        norm_output: a state goes through the final norm before it is read again (EAGLE-3.1).
    """

    generation: int
    layer: LlamaConfig
    target_hidden_size: int
    features: tuple[int, ...]
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclasses.dataclass(frozen=True)
class EagleOrigin:
    """What the files of a head say beyond what is computed with, kept so that they can be written again; hashable.

    Attributes:
        layout: of `convert.heads.eagle.tensor_names.LAYOUTS`.
        prefix: of the names of its layer.
        names: of all tensors.
        fields: the content of config.json.
        dtype: of the weights; None where they have several, or where the one that was asked for counts instead.
    """

    layout: str
    prefix: str
    names: frozenset[str]
    fields: str
    dtype: str | None
