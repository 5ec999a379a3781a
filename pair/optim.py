"""Optimiser and learning-rate schedule shared by both training stages."""

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
    """Muon for the matrices inside the layers, AdamW for embeddings and norms, one shared schedule.

    At this size Muon needs clearly fewer tokens than AdamW alone, and tokens are what a CPU is short of.
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
        """Back-propagate the scalar `loss` and update; `step` counts from 0 and sets the rates."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        for optimiser, peak in self.parts:
            optimiser.param_groups[0]["lr"] = peak * self.scale * rate_factor(step, self.steps, self.decay)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        """The state of both parts."""
        return [optimiser.state_dict() for optimiser, _ in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        """Restore what `state_dict` returned."""
        for (optimiser, _), state in zip(self.parts, states, strict=True):
            optimiser.load_state_dict(state)


def rate_factor(step: int, steps: int, decay: float) -> float:
    """Share of the peak rate at `step`: linear warm-up, constant, then, for the share `decay`, linearly down to zero.

    Before the decay nothing depends on `steps`, so a resumed run may be given more or fewer of them.
    """
    rates = [1.0, (step + 1) / WARMUP_STEPS]
    return min([*rates, (steps - step) / (decay * steps)] if decay else rates)
