"""Best-case times of passes and rounds on a device, from published facts: bytes, products and launches."""

import dataclasses

from jspec.core.devices import Device
from jspec.planning.memory import Footprint, Weights, footprint, slots_of

# Kernels that a GPU launches, as `python -m bench compiled` counts them for an H100 and a T4: for each layer of a pass,
# in a pass outside its layers (embedding, head, sampling), and in a round outside its passes (acceptance, commit).
KERNELS_A_LAYER, KERNELS_A_PASS, KERNELS_A_ROUND = {"bfloat16": 9, "float16": 18}, 14, 26
# Additional kernels of a layer: the fused kernel does not include norms of queries and keys, nor scales.
KERNELS_OF = {"bfloat16": {"quantized": 2, "qk_norm": 10, "attention_bias": 1, "mlp_bias": 1},
              "float16": {"quantized": 4, "qk_norm": 2, "attention_bias": 0, "mlp_bias": 0}}  # fmt: skip


def kernels_a_layer(model: Weights, dtype: str) -> int:
    """Return the number of kernels of one layer of `model` on a device of that dtype."""
    more = KERNELS_OF[dtype]
    has = {"quantized": model.quantized} | {name: getattr(model.config, name) for name in more if name != "quantized"}
    return KERNELS_A_LAYER[dtype] + sum(more[name] for name, there in has.items() if there)


def pass_seconds(model: Weights, device: Device, batch: int, rows: int, slots: int) -> float:
    """Return the seconds of a pass of `model` over ``batch x rows`` tokens.

    They are the longer of its bytes and its products, plus its launches. The pass reads all `slots` of the cache. The
    products of attention are left out.
    """
    moved = (model.bytes_read + model.cache_bytes(batch, slots)) / device.read_bandwidth
    multiplied = 2 * model.parameters_read * batch * rows / device.flops
    kernels = kernels_a_layer(model, device.dtype) * model.config.num_hidden_layers + KERNELS_A_PASS
    return max(moved, multiplied) + kernels * device.launch


@dataclasses.dataclass(frozen=True)
class Load:
    """The work that a device is to do: decoding texts of one length.

    Attributes:
        batch: the number of texts at once.
        length: the number of positions of each text, prompt and new tokens.
        prompt: how many of them are prefilled at once.
    """

    device: Device
    batch: int
    length: int
    prompt: int

    def plain_seconds(self, target: Weights) -> float:
        """Return the seconds of one step of plain decoding."""
        return self._seconds(target, 1, 0) + KERNELS_A_ROUND * self.device.launch

    def round_seconds(self, target: Weights, draft: Weights, k: int) -> float:
        """Return the seconds of a round: K = `k` draft steps, the first of two rows, and verification of K + 1 rows."""
        drafting = self._seconds(draft, 2, k) + (k - 1) * self._seconds(draft, 1, k)
        return drafting + self._seconds(target, k + 1, k) + KERNELS_A_ROUND * self.device.launch

    def footprint(self, k: int, *models: Weights) -> Footprint:
        """Return the memory of decoding with target and draft, or with the target alone for K = 0."""
        return footprint(models, self.batch, self.length, self.prompt, k)

    def fits(self, k: int, *models: Weights) -> bool:
        """Return whether the device's memory holds the footprint."""
        return self.footprint(k, *models).total <= self.device.memory

    def _seconds(self, model: Weights, rows: int, k: int) -> float:
        return pass_seconds(model, self.device, self.batch, rows, slots_of(self.length, k))
