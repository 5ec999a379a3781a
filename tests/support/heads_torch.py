"""Medusa's and Hydra's heads and Kangaroo's adapter in PyTorch, as their authors wrote them, with jspec's weights."""

import math

import numpy as np
import torch
from torch import nn

from support import heads


class ResBlock(nn.Module):
    """Hydra's block; with no condition besides its own width, it is Medusa's."""

    def __init__(self, hidden_size, num_condition=0):
        super().__init__()
        wide = hidden_size * (num_condition + 1)
        self.linear = nn.Linear(wide, hidden_size)
        self.res_connection = nn.Linear(wide, hidden_size) if num_condition else nn.Identity()
        self.act = nn.SiLU()

    def forward(self, x):
        return self.res_connection(x) + self.act(self.linear(x))


def medusa(ours, x):
    """Return the head's output for ``x[B, S, E]``."""
    blocks = [ResBlock(x.shape[-1]) for _ in ours.blocks]
    for block, own in zip(blocks, ours.blocks, strict=True):
        heads.loaded(block.linear, own.linear)
    output = nn.Linear(*ours.lm_head.weight.shape, bias=False)
    return nn.Sequential(*blocks, heads.loaded(output, ours.lm_head))(torch.tensor(x)).detach()


def hydra(ours, z, num_tokens):
    """Return the head's output for ``z[B, S, (num_tokens + 1) E]``."""
    size = z.shape[-1] // (num_tokens + 1)
    blocks = [ResBlock(size, num_tokens), *(ResBlock(size) for _ in ours.blocks)]
    heads.loaded(blocks[0].linear, ours.linear)
    heads.loaded(blocks[0].res_connection, ours.residual)
    for block, own in zip(blocks[1:], ours.blocks, strict=True):
        heads.loaded(block.linear, own.linear)
    output = nn.Linear(*ours.lm_head.weight.shape)
    weights = (torch.tensor(np.array(part)) for part in (ours.lm_head.weight[...].T, ours.bias[...]))
    output.weight.data, output.bias.data = weights
    return nn.Sequential(*blocks, output)(torch.tensor(z)).detach()


def norm(x, ours):
    """Apply LlamaRMSNorm."""
    return torch.tensor(np.array(ours.weight[...])) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ours.eps)


def rotated(x, base=10000):
    """Rotate ``[B, H, S, D]`` as apply_rotary_pos_emb does."""
    size = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[2]), base ** (-torch.arange(0, size, 2) / size))
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    return x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin


def kangaroo(adapter, x):
    """Return the output of the authors' AdapterModel for ``x[B, S, E]``."""
    config, attention, x = adapter.config, adapter.self_attn, torch.tensor(np.array(x))
    heads_, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = norm(x, adapter.input_layernorm) @ torch.tensor(np.array(attention.qkv_proj.weight[...]))
    q, k, v = (
        part.reshape(*x.shape[:2], -1, size).transpose(1, 2)
        for part in qkv.split([heads_ * size, groups * size, groups * size], -1)
    )
    k, v = (part.repeat_interleave(heads_ // groups, 1) for part in (rotated(k), v))
    scores = rotated(q) @ k.transpose(2, 3) / math.sqrt(size)
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(*x.shape[:2], -1)
    return norm(x + mixed @ torch.tensor(np.array(attention.o_proj.weight[...])), adapter.norm).numpy()
