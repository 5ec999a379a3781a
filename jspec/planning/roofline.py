"""Best-case times of passes and rounds on a device, from published bandwidth, peak rate and launch time."""

import dataclasses

from jspec.core.devices import COLLECTIVE_LATENCY, Device
from jspec.planning.block_costs import BlockWeights, draft_seconds
from jspec.planning.memory import Footprint, Weights, footprint, slots_of

# The number of kernels that a GPU launches, as counted by `python -m bench compiled` for an H100 and a T4: per layer in
# a pass, per pass outside its layers (embedding, head, sampling), per round outside its passes (acceptance, commit).
KERNELS_A_LAYER, KERNELS_A_PASS, KERNELS_A_ROUND = {"bfloat16": 10, "float16": 18}, 14, 26
# Additional kernels per layer: the fused kernels do not support quantised matrices, and on a T4 there are none.
KERNELS_OF = {
    "bfloat16": {"int8": 2, "int4": 3, "qk_norm": 0, "attention_bias": 1, "mlp_bias": 1},
    "float16": {"int8": 0, "int4": 6, "qk_norm": 2, "attention_bias": 0, "mlp_bias": 0},
}
# Additional kernels per layer of a sharded model, for one row and for several. Exchanges are not counted.
KERNELS_IF_SHARDED = {"bfloat16": (9, 15), "float16": (0, 0)}


def kernels_a_layer(model: Weights, dtype: str, rows: int = 1) -> int:
    """Return the number of kernels per layer of `model`, over `rows` tokens, on a device that computes in `dtype`."""
    more, config = KERNELS_OF[dtype], model.config
    has = {
        "int8": model.quantized == "int8",
        "int4": model.quantized == "int4",
        "qk_norm": config.qk_norm,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    divided = KERNELS_IF_SHARDED[dtype][rows > 1] if model.num_devices > 1 else 0
    return KERNELS_A_LAYER[dtype] + sum(count for name, count in more.items() if has[name]) + divided


def exchange_seconds(model: Weights, device: Device, tokens: int) -> float:
    """Return the duration of the exchanges between devices in a pass over `tokens` tokens, in seconds.

    Each layer all-reduces two arrays ``[tokens, E]``. The pass all-reduces its logits, ``float32[tokens, V]``, and
    all-gathers its embeddings, ``[tokens, E]``. In a ring of N devices, each device sends ``2 (N - 1) / N`` times the
    array in an all-reduce, and half of that in an all-gather.
    """
    config, count = model.config, model.num_devices
    sums = 2 * config.num_hidden_layers
    sent = tokens * ((sums + 0.5) * config.hidden_size * model.itemsize + 4 * config.vocab_size)
    return (sums + 2) * COLLECTIVE_LATENCY + 2 * (count - 1) / count * sent / device.link_bandwidth


def pass_seconds(model: Weights, device: Device, batch: int, rows: int, slots: int) -> float:
    """Return the duration of a pass of `model` over ``batch x rows`` tokens, in seconds.

    The duration is the longer of the memory time and the compute time, plus the time of the kernel launches and of the
    exchanges between devices. The pass reads all `slots` of the cache. Attention products are left out.
    """
    moved = model.bytes_read + model.cache_bytes(batch, slots)
    if device.platform == "cuda":
        moved += model.product_bytes(batch * rows, device.dtype)
    multiplied = 2 * model.parameters_read * batch * rows / device.flops
    kernels = kernels_a_layer(model, device.dtype, batch * rows) * model.config.num_hidden_layers + KERNELS_A_PASS
    exchanges = exchange_seconds(model, device, batch * rows) if model.num_devices > 1 else 0.0
    return max(moved / device.read_bandwidth, multiplied) + kernels * device.launch + exchanges


@dataclasses.dataclass(frozen=True)
class Load:
    """A device's workload: decoding a batch of sequences of equal length.

    Attributes:
        batch: the number of sequences decoded at once.
        length: the number of positions in each sequence, both prompt and new tokens.
        prompt: the number of these positions that are prefilled at once.
    """

    device: Device
    batch: int
    length: int
    prompt: int

    def plain_seconds(self, target: Weights) -> float:
        """Return the duration of one plain decoding step, in seconds."""
        return self._seconds(target, 1, 0) + KERNELS_A_ROUND * self.device.launch

    def round_seconds(self, target: Weights, draft: Weights | BlockWeights, k: int) -> float:
        """Return the duration of a round, in seconds.

        A round has K = `k` draft steps, the first of which has two rows, and a verification of K + 1 rows. A block
        drafter has a single draft step.
        """
        if isinstance(draft, BlockWeights):
            drafting = draft_seconds(draft, self.device, self.batch, k, slots_of(self.length, k))
        else:
            drafting = self._seconds(draft, 2, k) + (k - 1) * self._seconds(draft, 1, k)
        return drafting + self._seconds(target, k + 1, k) + KERNELS_A_ROUND * self.device.launch

    def footprint(self, k: int, target: Weights, *drafts: Weights | BlockWeights) -> Footprint:
        """Return the memory needed to decode with target and draft, or with the target alone if K = 0."""
        return footprint((target, *drafts), self.batch, self.length, self.prompt, k)

    def fits(self, k: int, target: Weights, *drafts: Weights | BlockWeights) -> bool:
        """Return whether the footprint fits in the device's memory."""
        return self.footprint(k, target, *drafts).total <= self.device.memory

    def _seconds(self, model: Weights, rows: int, k: int) -> float:
        return pass_seconds(model, self.device, self.batch, rows, slots_of(self.length, k))
