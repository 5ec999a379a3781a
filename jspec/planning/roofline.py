"""How long passes and rounds take on a device at best, from published facts: bytes, products and launches."""

import dataclasses

from jspec.core.devices import Device
from jspec.planning.memory import Footprint, Weights, footprint, slots_of

# Kernels that a GPU launches, as `python -m bench compiled` counts them for an H100 and a T4: for each layer of a pass,
# beside its layers (embedding, head, sampling), and in a round outside of its passes (acceptance, commit).
KERNELS_A_LAYER, KERNELS_A_PASS, KERNELS_A_ROUND = {"bfloat16": 9, "float16": 18}, 14, 26
# Those that a layer has more of: norms of queries and keys are not in the fused kernel, nor are scales.
KERNELS_OF = {"bfloat16": {"quantized": 2, "qk_norm": 10, "attention_bias": 1, "mlp_bias": 1},
              "float16": {"quantized": 4, "qk_norm": 2, "attention_bias": 0, "mlp_bias": 0}}  # fmt: skip


def kernels_a_layer(model: Weights, dtype: str) -> int:
    """How many kernels a layer of `model` is for a device of that dtype."""
    more = KERNELS_OF[dtype]
    has = {"quantized": model.quantized} | {name: getattr(model.config, name) for name in more if name != "quantized"}
    return KERNELS_A_LAYER[dtype] + sum(more[name] for name, there in has.items() if there)


def pass_seconds(model: Weights, device: Device, batch: int, rows: int, slots: int) -> float:
    """Of a pass of `model` over ``batch x rows`` tokens: the longer of its bytes and its products, and its launches.

    All `slots` of the cache are read; the products of attention are left out.
    """
    moved = (model.bytes_read + model.cache_bytes(batch, slots)) / device.read_bandwidth
    multiplied = 2 * model.parameters_read * batch * rows / device.flops
    kernels = kernels_a_layer(model, device.dtype) * model.config.num_hidden_layers + KERNELS_A_PASS
    return max(moved, multiplied) + kernels * device.launch


@dataclasses.dataclass(frozen=True)
class Load:
    """What a device is to decode.

    Attributes:
        batch: texts at once.
        length: positions of each, prompt and new tokens.
        prompt: how many of them are read first.
    """

    device: Device
    batch: int
    length: int
    prompt: int

    def plain_seconds(self, target: Weights) -> float:
        """Of one step of plain decoding."""
        return self._seconds(target, 1, 0) + KERNELS_A_ROUND * self.device.launch

    def round_seconds(self, target: Weights, draft: Weights, k: int) -> float:
        """Of K = `k` steps of the draft, of which the first reads two rows, and a verification of K + 1 rows."""
        drafting = self._seconds(draft, 2, k) + (k - 1) * self._seconds(draft, 1, k)
        return drafting + self._seconds(target, k + 1, k) + KERNELS_A_ROUND * self.device.launch

    def footprint(self, k: int, *models: Weights) -> Footprint:
        """Of target and draft, or for K = 0 of the target alone."""
        return footprint(models, self.batch, self.length, self.prompt, k)

    def fits(self, k: int, *models: Weights) -> bool:
        """Whether the device's memory holds that."""
        return self.footprint(k, *models).total <= self.device.memory

    def _seconds(self, model: Weights, rows: int, k: int) -> float:
        return pass_seconds(model, self.device, self.batch, rows, slots_of(self.length, k))
