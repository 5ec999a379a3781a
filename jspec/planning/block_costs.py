"""The memory and time of a block drafter, computed from its configuration without loading or running it."""

import dataclasses
import math
from collections.abc import Mapping

from convert.heads.block import tensor_names
from convert.heads.block.config import BlockConfig
from jspec.core.devices import Device
from jspec.models.kv_cache import whole_tiles

# The number of kernels that a GPU launches, as counted by `python -m bench compiled` for an H100: per layer in a block,
# per block outside its layers, per later draft token (Markov head and sampling), and per layer and per round to read
# the target's hidden states.
KERNELS_A_LAYER, KERNELS_A_BLOCK, KERNELS_A_TOKEN, KERNELS_A_LAYER_READ, KERNELS_A_READ = 10, 33, 22, 5, 9
_BODY = ("layers.", "norm.", "hidden_norm.")
_PARTS = {"fc": "fc.", "embedding": "embed_tokens.", "head": "lm_head.", "Markov head": "markov_head."}
_CONFIDENCE, _SELECTOR = "confidence_head.", "candidate_selector."


@dataclasses.dataclass(frozen=True)
class BlockWeights:
    """A block drafter's weights on a device.

    Attributes:
        itemsize: the number of bytes per value in weights, activations and cache.
    """

    config: BlockConfig
    itemsize: int

    @property
    def parts(self) -> dict[str, int]:
        """The size of each part of the weights, in bytes. An embedding or head that is the target's has size 0."""
        return {
            "body": self._bytes(*_BODY),
            **{name: self._bytes(prefix) for name, prefix in _PARTS.items()},
            "confidence head": self._bytes(_CONFIDENCE),
            "candidate selector": self._bytes(_SELECTOR),
        }

    @property
    def bytes(self) -> int:
        """The size of all weights, in bytes."""
        return sum(self.parts.values())

    @property
    def num_outputs(self) -> int:
        """The number of tokens that can be drafted, D."""
        return self.config.draft_vocab_size or self.config.body.vocab_size

    @property
    def head_bytes(self) -> int:
        """The size of the output head, which may be the target's, in bytes."""
        return self.num_outputs * self.config.body.hidden_size * self.itemsize

    @property
    def correction_bytes(self) -> int:
        """The bytes that the Markov head or the candidate selector reads per draft token.

        The Markov head reads everything except the table that embeds the token before. The selector reads its
        projection, and one row of its codebooks for each candidate.
        """
        markov, dflash2 = self._bytes("markov_head.") - self._bytes("markov_head.markov_w1."), self.config.dflash2
        if dflash2 is None:
            return markov
        return markov + self._bytes(f"{_SELECTOR}hidden_") + dflash2.num_candidates * dflash2.rank * self.itemsize

    @property
    def store_bytes(self) -> int:
        """The bytes that a round reads to store the target's hidden states: `fc`, and the layers' projections."""
        return self._bytes("fc.") + sum(
            size for name, size in self._sizes().items() if ".qkv_proj." in name or ".k_norm." in name
        )

    def bytes_read(self, k: int) -> int:
        """Return the size of the weights that a round with K = `k` draft tokens reads, in bytes.

        A round reads the layers and the output head once for all rows, the Markov head once per draft token, and `fc`
        and the layers' projections for the accepted tokens.
        """
        return self._bytes(*_BODY) + self.head_bytes + k * self.correction_bytes + self.store_bytes

    def products(self, k: int) -> int:
        """Return the number of multiplications per sequence in a round with `k` draft tokens."""
        parts = self._bytes(*_BODY) * self.rows(k) + (self.head_bytes + self.correction_bytes) * k
        return (parts + self.store_bytes * (k + 1)) // self.itemsize

    def rows(self, k: int) -> int:
        """Return the number of rows in a block. A bidirectional block runs all of its rows, whatever K is."""
        config = self.config
        return (k if config.drafts_from_first else k + 1) if config.causal else config.block_size

    def kernels(self, k: int) -> int:
        """Return the number of kernels that drafting adds to a round on a GPU."""
        layers = (KERNELS_A_LAYER + KERNELS_A_LAYER_READ) * self.config.body.num_hidden_layers
        return layers + KERNELS_A_BLOCK + KERNELS_A_TOKEN * (k - 1) + KERNELS_A_READ

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the size of the keys and values of the context and of the block itself, in bytes."""
        body, slots = self.config.body, whole_tiles(slots + self.config.block_size)
        return batch * slots * 2 * body.num_hidden_layers * body.num_key_value_heads * body.head_dim * self.itemsize

    def feature_bytes(self, batch: int, rows: int) -> int:
        """Return the size of the target's hidden states that the drafter reads at `rows` positions, in bytes."""
        return batch * rows * len(self.config.features) * self.config.target_hidden_size * self.itemsize

    def prefill_bytes(self, batch: int, prompt: int) -> int:
        """Return the estimated size of prefill temporaries in bytes: the hidden states, stacked and concatenated."""
        return 2 * self.feature_bytes(batch, prompt)

    def all_parts(self, batch: int, length: int, k: int) -> dict[str, int]:
        """Return `parts`, and the bytes of the context cache and of the features that a round reads."""
        memory = {"context cache": self.cache_bytes(batch, whole_tiles(length + k + 1))}
        return self.parts | memory | {"features": self.feature_bytes(batch, k + 1)}

    def _sizes(self) -> Mapping[str, int]:
        return {entry.name: math.prod(entry.shape) * self.itemsize for entry in tensor_names.entries(self.config)}

    def _bytes(self, *prefixes: str) -> int:
        return sum(size for name, size in self._sizes().items() if name.startswith(prefixes))


def draft_seconds(block: BlockWeights, device: Device, batch: int, k: int, slots: int) -> float:
    """Return the time that drafting takes in a round, in seconds. See `jspec.planning.roofline.pass_seconds`."""
    moved = block.bytes_read(k) + block.cache_bytes(batch, slots) + 2 * block.feature_bytes(batch, k + 1)
    multiplied = 2 * block.products(k) * batch / device.flops
    return max(moved / device.read_bandwidth, multiplied) + block.kernels(k) * device.launch
