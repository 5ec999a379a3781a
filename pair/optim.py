"""The optimiser and learning-rate schedule that both training stages share."""

import torch
from torch import nn
from transformers import LlamaForCausalLM

MUON_RATE = 0.02
MUON_DECAY = 0.01
ADAM_RATE = 3e-3
WARMUP_STEPS = 20
DECAY = 0.4
CLIP_NORM = 1.0


class Optimiser:
    """An optimiser with Muon for the matrices inside the layers, AdamW for embeddings and norms, and one schedule.

    At this size Muon needs clearly fewer tokens than AdamW alone, and tokens are the scarce resource on a CPU.
    """

    def __init__(self, model: LlamaForCausalLM, steps: int, scale: float = 1.0, decay: float = DECAY):
        self.parameters = list(model.parameters())
        inside = {p for p in model.model.layers.parameters() if p.ndim == 2}
        matrices = [p for p in self.parameters if p in inside]
        others = [p for p in self.parameters if p not in inside]
        adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
        muon = torch.optim.Muon(matrices, weight_decay=MUON_DECAY)
        self.parts = [(muon, MUON_RATE), (adam, ADAM_RATE)]
        self.steps, self.scale, self.decay = steps, scale, decay

    def step(self, loss: torch.Tensor, step: int) -> None:
        """Back-propagate the scalar `loss` and update the weights. `step` counts from 0 and sets the rates."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        for optimiser, peak in self.parts:
            optimiser.param_groups[0]["lr"] = peak * self.scale * rate_factor(step, self.steps, self.decay)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        """Return the state of both optimisers."""
        return [optimiser.state_dict() for optimiser, _ in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restore what `state_dict` returned."""
        for (optimiser, _), state in zip(self.parts, states, strict=True):
            optimiser.load_state_dict(state)


def rate_factor(step: int, steps: int, decay: float) -> float:
    """Return the learning rate at `step`, as a share of the peak rate.

    The rate warms up linearly, stays constant, and falls linearly to zero over the last `decay` share of the steps.
    Before the decay nothing depends on `steps`, so a resumed run may use a different number of steps.
    """
    rates = [1.0, (step + 1) / WARMUP_STEPS]
    return min([*rates, (steps - step) / (decay * steps)] if decay else rates)
