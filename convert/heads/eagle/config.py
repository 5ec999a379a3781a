"""The configuration of an EAGLE head, and the other contents of its files."""

import dataclasses

from convert.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The configuration of the forward pass; hashable.

    Attributes:
        generation: 1 or 3.
        layer: the config of the head's one layer; `hidden_size` E is the head's own, `vocab_size` V the target's.
        target_hidden_size: the size of the target states that the head reads; that of `layer` in generation 1.
        features: the target states that the head reads: i is the input of layer i, -1 the output of the last layer.
        draft_vocab_size: D, the number of tokens that the head can draft; None for all of V.
        own_embedding: the head has its own embedding, and does not use the target's.
        own_head: the head has its own output head; always true if `draft_vocab_size` is less than V.
        fc_bias: whether `fc` has a bias, in generation 1.
        norm_before_residual: the residual stream of the layer starts with the normalised state.
        norm_before_fc: one norm over the concatenated target states.
        fc_norm: one norm over each of the target states (EAGLE-3.1).
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
    """The contents of a head's files beyond config and weights, kept to write the files again; hashable.

    Attributes:
        layout: a key of `convert.heads.eagle.tensor_names.LAYOUTS`.
        prefix: the prefix of the names of the head's layer.
        names: the names of all tensors.
        fields: the content of config.json.
        dtype: the dtype of the weights; None if they have several, or if the requested dtype is used instead.
    """

    layout: str
    prefix: str
    names: frozenset[str]
    fields: str
    dtype: str | None
