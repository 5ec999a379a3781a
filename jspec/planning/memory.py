"""Memory of models and of decoding with them, computed from configurations; nothing is loaded or run.

Weights and caches are counted, temporaries are estimated. The letters of shapes are those of `jspec.core.types`.
"""

import dataclasses
import math

from convert.config import LlamaConfig
from convert.keymap import shapes
from jspec.models.kv_cache import whole_tiles

_FLOAT32 = 4
# Temporaries that XLA keeps at once, by its own account (`memory_analysis`); tests hold these to within a factor of
# two. A round keeps 3 arrays ``float32[B, K + 2, V]`` (logits, distributions, noise). A layer in prefill keeps the
# scores in float32 and again in the dtype of the weights, ``[B, H, P, P]`` each, or else the MLP's gate, up and
# product, ``[B, P, 3 F]``.
LAWS, MLP_ROWS = 3, 3


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a model on a device.

    Attributes:
        itemsize: bytes per number in weights, activations and cache.
        quantized: whether matrices are int8 with a float32 scale for each output channel, see `jspec.models.quantize`.
    """

    config: LlamaConfig
    itemsize: int
    quantized: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of all weights."""
        return sum(map(self._bytes, shapes(self.config).values()))

    @property
    def bytes_read(self) -> int:
        """The bytes of the weights that a pass reads.

        An embedding that is not also the head does not count, because a pass looks up only a few of its columns.
        """
        return sum(self._bytes(shape) for shape in self._read())

    @property
    def parameters_read(self) -> int:
        """The number of weights that a pass reads; each is multiplied once for every row of the pass."""
        return sum(map(math.prod, self._read()))

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the bytes of keys and values of all layers."""
        config = self.config
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return batch * slots * numbers * self.itemsize

    def prefill_bytes(self, batch: int, prompt: int) -> int:
        """Return the estimated bytes of temporaries during prefill, beside the weights and caches; see `MLP_ROWS`."""
        scores = self.config.num_attention_heads * prompt * (_FLOAT32 + self.itemsize)
        return batch * prompt * max(scores, MLP_ROWS * self.config.intermediate_size * self.itemsize)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        if self.quantized and len(shape) == 2:  # [out, in] in `convert`
            return math.prod(shape) + shape[0] * _FLOAT32
        return math.prod(shape) * self.itemsize

    def _read(self) -> list[tuple[int, ...]]:
        unread = () if self.config.tie_word_embeddings else ("embed_tokens.weight",)
        return [shape for name, shape in shapes(self.config).items() if name not in unread]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The bytes of decoding: `weights` and `caches` of target and draft are counted, `temporaries` are estimated."""

    weights: int
    caches: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.temporaries


def slots_of(length: int, num_draft_tokens: int) -> int:
    """Return the cache slots of a row, as decoding allocates them.

    They hold `length` positions and the tokens that a round may write past them.
    """
    return whole_tiles(length + num_draft_tokens + 1)


def footprint(models: tuple[Weights, ...], batch: int, length: int, prompt: int, num_draft_tokens: int) -> Footprint:
    """Return the memory of decoding with the target ``models[0]`` and the draft ``models[1]``.

    If `num_draft_tokens` is 0, the target decodes alone.

    Args:
        length: the number of positions of a text, of which `prompt` are prefilled at once.
    """
    slots = slots_of(length, num_draft_tokens)
    laws = LAWS * _FLOAT32 * batch * (num_draft_tokens + 2) * models[0].config.vocab_size
    return Footprint(
        sum(model.bytes for model in models),
        sum(model.cache_bytes(batch, slots) for model in models),
        max(laws, *(model.prefill_bytes(batch, prompt) for model in models)),
    )
