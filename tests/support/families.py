"""Helpers for the model-family tests and others."""

import numpy as np
import pytest

from convert import parse_config
from support.checkpoints import hf_shapes, raw_config, write


def checkpoint(folder, **changes):
    """Write a checkpoint whose every weight matters: norms about 1, large biases."""
    raw = raw_config(**changes)
    rng = np.random.default_rng(3)
    shapes = hf_shapes(raw | {"head_dim": parse_config(raw).head_dim})
    weights = {name: rng.normal(name.endswith("norm.weight"), 0.2, shape) for name, shape in shapes.items()}
    return write(folder, raw, {name: array.astype(np.float32) for name, array in weights.items()})


def twin(folder):
    """Return the checkpoint as a transformers model, which reads config.json by itself."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()


def hf_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
