"""A block drafter's configuration."""

import dataclasses
from typing import Literal, TypeAlias

from convert.config import LlamaConfig

MarkovKind: TypeAlias = Literal["vanilla", "gated", "rnn"]
ConfidenceInputs: TypeAlias = Literal["state", "state and token"]


@dataclasses.dataclass(frozen=True)
class MarkovConfig:
    """The configuration of a Markov head, which corrects a row's logits by the token before it.

    Attributes:
        kind: "vanilla" reads only the token, "gated" also the row's state, and "rnn" all earlier tokens of the block.
        rank: r, the size of a token's vector.
    """

    kind: MarkovKind
    rank: int


@dataclasses.dataclass(frozen=True)
class DFlash2Config:
    """The configuration of DFlash2's convolutions and candidate selector.

    Attributes:
        num_taps: T, the number of rows that a convolution reads: a row and the T - 1 rows before it.
        group_size: the number of channels that share the weights projected from the input.
        rank: the size of the selector's vectors.
        num_candidates: C, the number of tokens per row that can be drafted.
        embedding_scale: the factor that scales the rows' embeddings.
        logit_scale: the factor that scales the logits, before the selector.
        logit_cap: the bound on the logits after scaling, ``cap tanh(logits / cap)``; None for no bound.
    """

    num_taps: int
    group_size: int
    rank: int
    num_candidates: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """The configuration of a block drafter. Instances are hashable.

    Attributes:
        body: the config of the layers. `hidden_size` E is the drafter's own, `vocab_size` V is the target's.
        target_hidden_size: the size of the target's hidden states.
        features: the target's hidden states that the drafter reads: i is the input of layer i. The number of layers
            is the target's output after its final norm.
        block_size: R, the number of rows in a block, including the last token.
        mask_id: the token at all rows of a block except the first.
        causal: whether a row attends only to the rows before it, instead of to the whole block.
        drafts_from_first: whether the first row, which holds the last token, predicts the first draft token. Otherwise,
            each row predicts its own token, and the first row predicts nothing.
        markov: the Markov head; None if there is none.
        confidence: what the confidence head reads: a row's state, or also the Markov head's vector of the token before;
            None if there is none.
        draft_vocab_size: D, the number of tokens that can be drafted; None for all of V.
        dflash2: the convolutions and the candidate selector; None if there are none.
        windows: for each layer, the number of positions that a row attends to, ending at its own; None for all. Empty
            if no layer has a window.
        own_embedding: whether the drafter has its own embedding instead of the target's.
        own_head: whether the drafter has its own output head. If not, a reduced vocabulary uses rows of the target's
            output head.
    """

    body: LlamaConfig
    target_hidden_size: int
    features: tuple[int, ...]
    block_size: int
    mask_id: int
    causal: bool = False
    drafts_from_first: bool = False
    markov: MarkovConfig | None = None
    confidence: ConfidenceInputs | None = None
    draft_vocab_size: int | None = None
    dflash2: DFlash2Config | None = None
    windows: tuple[int | None, ...] = ()
    own_embedding: bool = False
    own_head: bool = False

    @property
    def num_draft_tokens(self) -> int:
        """The number of tokens that one block drafts."""
        return self.block_size if self.drafts_from_first else self.block_size - 1


@dataclasses.dataclass(frozen=True)
class BlockOrigin:
    """The contents of a block drafter's files besides config and weights, kept so that the files can be rewritten.

    Attributes:
        layout: the result of `convert.heads.block.parse_config.layout_of`.
        fields: the content of config.json.
        dtype: the dtype of the weights; None if they have several, or if the requested dtype is used instead.
    """

    layout: str
    fields: str
    dtype: str | None


def check_target_of(config: BlockConfig, sizes: LlamaConfig) -> None:
    """Check that a block drafter was made for this target.

    Raises:
        ValueError: the sizes differ.
    """
    body = config.body
    wants = [("hidden size", config.target_hidden_size, sizes.hidden_size)]
    wants.append(("vocabulary size", body.vocab_size, sizes.vocab_size))
    if not config.own_embedding or not config.own_head:
        wants.append(("hidden size", body.hidden_size, sizes.hidden_size))
    for name, own, found in wants:
        if own != found:
            raise ValueError(
                f"The block drafter was made for a target whose {name} is {own}, but this target's is {found}; use "
                "the drafter that was trained for this target."
            )
