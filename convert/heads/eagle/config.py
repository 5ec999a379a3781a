"""An EAGLE head's configuration, and the other contents of its files."""

import dataclasses

from convert.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The configuration of an EAGLE head's forward pass. Instances are hashable.

    Attributes:
        generation: 1 or 3.
        layer: the config of the head's single layer. `hidden_size` E is the head's own, `vocab_size` V is the target's.
        target_hidden_size: the size of the target's hidden states. In generation 1 it equals E.
        features: the target's hidden states that the head reads: i is the input of layer i, -1 is the output of the
            last layer.
        draft_vocab_size: D, the number of tokens that the head can draft; None for all of V.
        own_embedding: whether the head has its own embedding instead of the target's.
        own_head: whether the head has its own output head; always true if `draft_vocab_size` is less than V.
        fc_bias: whether `fc` has a bias, in generation 1.
        norm_before_residual: whether the layer's residual stream starts with the normalised state.
        norm_before_fc: whether there is one norm over the concatenated target states.
        fc_norm: whether each target state has its own norm (EAGLE-3.1).
        norm_output: whether the final norm is applied to a state before the head reads it again (EAGLE-3.1).
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
    """Everything in a head's files besides config and weights, kept so that the files can be rewritten.

    Instances are hashable.

    Attributes:
        layout: a key of `convert.heads.eagle.tensor_names.LAYOUTS`.
        prefix: the tensor-name prefix of the head's layer.
        names: the names of all tensors, sorted. A set's order would differ between processes.
        fields: the content of config.json.
        dtype: the dtype of the weights; None if they have several, or if the requested dtype is used instead.
    """

    layout: str
    prefix: str
    names: tuple[str, ...]
    fields: str
    dtype: str | None
