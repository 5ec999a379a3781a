"""The memory that models and decoding need on a device, computed from configurations without loading a model.

Weights and caches are counted exactly, and temporaries are estimated. Shapes use the letters of `jspec.core.types`.
"""

import dataclasses
import math

from convert.config import LlamaConfig
from convert.keymap import shapes
from jspec.core.sharding import SHARDED_OUTPUTS
from jspec.models.kv_cache import whole_tiles
from jspec.models.quantized_matrix import MAX_REDUCTION_ROWS, ROWS_AT_ONCE, group_size
from jspec.planning.block_costs import BlockWeights

_FLOAT32, _HEAD = 4, "lm_head.weight"
_BITS = {"int8": 8, "int4": 4}
# Temporaries that XLA keeps alive simultaneously, as its `memory_analysis` reports them. Tests check that these numbers
# are within a factor of two. A round keeps 3 arrays ``float32[B, K + 2, V]`` (logits, distributions, noise). A prefill
# layer keeps the larger of two sets of arrays: the scores ``[B, H, P, P]``, both in float32 and in the dtype of the
# weights, or the MLP's gate, up and product, ``[B, P, 3 F]``.
PROB_ARRAYS, MLP_ROWS = 3, 3


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a model that one device holds: all of them, or its share if the model is sharded.

    Attributes:
        itemsize: the number of bytes per value in weights, activations and cache.
        quantized: "int8" or "int4" if matrices are quantised as on a GPU or TPU. See `jspec.quantize`.
        num_outputs: the number of tokens in a separate output head; None for the output head that `config` describes.
        num_devices: the number of devices over which each matrix is sharded. See `jspec.tensor_parallel`.
    """

    config: LlamaConfig
    itemsize: int
    quantized: str | None = None
    num_outputs: int | None = None
    num_devices: int = 1

    @property
    def divides_evenly(self) -> bool:
        """Whether every matrix can be split evenly over the devices, into whole groups if it is quantised."""
        for name, shape in shapes(self.config).items():
            if len(shape) == 2:
                axis = _sharded_axis(name)
                size = group_size(shape[1], self.quantized) if self.quantized and axis == 1 else 1
                whole_units = shape[axis] // size if size < shape[1] else shape[axis]
                if whole_units % self.num_devices:
                    return False
        return True

    @property
    def bytes(self) -> int:
        """The size of all weights, in bytes."""
        return sum(map(self._bytes, self._shapes().values()))

    @property
    def bytes_read(self) -> int:
        """The size of the weights that a pass reads, in bytes.

        An embedding that is not also the output head does not count, because a pass reads only a few of its columns.
        """
        return sum(self._bytes(shape) for shape in self._read())

    @property
    def parameters_read(self) -> int:
        """The number of weights that a pass reads. Each is multiplied once for every row of the pass."""
        return sum(map(math.prod, self._read()))

    def product_bytes(self, rows: int, dtype: str) -> int:
        """Return the bytes that a GPU's products of `rows` rows move in addition to quantised weights.

        They are the sums of groups, repeated reads of the codes, and widened matrices. See
        `jspec.models.quantized_matrix`.
        """
        if self.quantized is None:
            return 0
        shapes = (shape for shape in self._read() if len(shape) == 2)
        return sum(self._product_bytes(shape, group_size(shape[1], self.quantized), rows, dtype) for shape in shapes)

    def _product_bytes(self, shape: tuple[int, ...], size: int, rows: int, dtype: str) -> int:
        outputs, inputs = shape
        sums = 2 * _FLOAT32 * rows * outputs * (inputs // size) if size < inputs else 0  # written and read
        widened = 2 * self.itemsize * outputs * inputs
        if dtype == "float16":
            reads = -(-rows // ROWS_AT_ONCE)
            return (reads - 1) * self._bytes(shape) + sums if rows <= MAX_REDUCTION_ROWS else widened
        if size == inputs:
            return 0
        return widened if 2 * rows >= size else sums * max(rows, 2) // rows  # a single row is padded

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the size of the KV cache across all layers, in bytes."""
        config = self.config
        heads = config.num_key_value_heads // self.num_devices
        numbers = 2 * config.num_hidden_layers * heads * config.head_dim
        return batch * slots * numbers * self.itemsize

    def prefill_bytes(self, batch: int, prompt: int) -> int:
        """Return the estimated size of prefill temporaries, excluding weights and caches, in bytes. See `MLP_ROWS`."""
        scores = self.config.num_attention_heads * prompt * (_FLOAT32 + self.itemsize)
        inner = MLP_ROWS * self.config.intermediate_size * self.itemsize
        return batch * prompt * max(scores, inner) // self.num_devices

    def _bytes(self, shape: tuple[int, ...]) -> int:
        if self.quantized is None or len(shape) != 2:
            return math.prod(shape) * self.itemsize
        outputs, inputs = shape
        groups = inputs // group_size(inputs, self.quantized)
        return outputs * inputs * _BITS[self.quantized] // 8 + groups * outputs * _FLOAT32

    def _read(self) -> list[tuple[int, ...]]:
        stored = self._shapes()
        unread = ("embed_tokens.weight",) if _HEAD in stored else ()
        return [shape for name, shape in stored.items() if name not in unread]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        head = {} if self.num_outputs is None else {_HEAD: (self.num_outputs, self.config.hidden_size)}
        whole = shapes(self.config) | head
        return {name: self._share(name, shape) for name, shape in whole.items()}

    def _share(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape ``[out, in]`` of a device's share of a matrix. Vectors are on every device."""
        if len(shape) != 2:
            return shape
        axis = _sharded_axis(name)
        return tuple(size // self.num_devices if i == axis else size for i, size in enumerate(shape))


def _sharded_axis(name: str) -> int:
    """Return the axis of a matrix ``[out, in]`` that `jspec.tensor_parallel` shards."""
    return 0 if name.split(".")[-2] in SHARDED_OUTPUTS else 1


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The memory that decoding needs, in bytes, for both target and draft.

    `weights` and `caches` are counted exactly, and `temporaries` are estimated.
    """

    weights: int
    caches: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.temporaries


def slots_of(length: int, num_draft_tokens: int) -> int:
    """Return the number of cache slots that decoding allocates for a row.

    The slots hold `length` positions and the tokens that a round may write past them.
    """
    return whole_tiles(length + num_draft_tokens + 1)


def footprint(
    models: tuple[Weights, *tuple[Weights | BlockWeights, ...]],
    batch: int,
    length: int,
    prompt: int,
    num_draft_tokens: int,
) -> Footprint:
    """Return the memory needed to decode with the target ``models[0]`` and the draft ``models[1]``.

    If `num_draft_tokens` is 0, the target decodes alone.

    Args:
        length: the number of positions in a sequence, of which `prompt` are prefilled at once.
    """
    slots = slots_of(length, num_draft_tokens)
    prob_bytes = PROB_ARRAYS * _FLOAT32 * batch * (num_draft_tokens + 2) * models[0].config.vocab_size
    return Footprint(
        sum(model.bytes for model in models),
        sum(model.cache_bytes(batch, slots) for model in models),
        max(prob_bytes, *(model.prefill_bytes(batch, prompt) for model in models)),
    )
