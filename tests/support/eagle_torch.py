"""EAGLE heads in PyTorch, written from the published descriptions; attributes are named as in the files.

The descriptions are Li et al. 2024 (generation 1, figure 6), Li et al. 2025 (generation 3, section 3.1), and the
configuration of speculators for the EAGLE-3.1 flags. Nothing is kept between passes: every step reads all pairs of
token and state again.
"""

import math

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def rotated(x, theta):
    """Rotate ``[B, H, S, D]`` by each token's position, pairing the halves of a head."""
    size, steps = x.shape[-1] // 2, torch.arange(x.shape[2])
    angles = steps[:, None] * theta ** (-torch.arange(size) / size)
    first, second = x[..., :size], x[..., size:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Attention(nn.Module):
    def __init__(self, raw, read):
        super().__init__()
        self.heads, self.groups = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.size, self.theta, both = raw["head_dim"], raw["rope_theta"], raw["attention_bias"]
        bias = both or raw.get("qkv_bias", False)
        self.q_proj = nn.Linear(read, self.heads * self.size, bias)
        self.k_proj, self.v_proj = (nn.Linear(read, self.groups * self.size, bias) for _ in range(2))
        self.o_proj = nn.Linear(self.heads * self.size, raw["hidden_size"], both)
        if raw["model_type"] == "qwen3":
            self.q_norm, self.k_norm = (RMSNorm(self.size, raw["rms_norm_eps"]) for _ in range(2))

    def forward(self, x):
        def split(y, count, norm=None):
            y = y.unflatten(-1, (count, self.size)).transpose(1, 2)
            return y if norm is None else norm(y)

        q = split(self.q_proj(x), self.heads, getattr(self, "q_norm", None))
        k = split(self.k_proj(x), self.groups, getattr(self, "k_norm", None))
        v = split(self.v_proj(x), self.groups)
        k, v = (y.repeat_interleave(self.heads // self.groups, 1) for y in (rotated(k, self.theta), v))
        scores = rotated(q, self.theta) @ k.transpose(2, 3) / math.sqrt(self.size)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, raw):
        super().__init__()
        size, inner, bias = raw["hidden_size"], raw["intermediate_size"], raw["mlp_bias"]
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer; only generation 3 has its first norm, which normalizes the token."""

    def __init__(self, raw, generation):
        super().__init__()
        size, eps = raw["hidden_size"], raw["rms_norm_eps"]
        self.self_attn, self.mlp = Attention(raw, size if generation == 1 else 2 * size), MLP(raw)
        self.post_attention_layernorm = RMSNorm(size, eps)
        if generation == 3:
            self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)

    def forward(self, read, residual):
        x = residual + self.self_attn(read)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle1(nn.Module):
    """A generation-1 head, ``layer(fc([token, state]))``: the target's states after its final norm, then its own."""

    def __init__(self, raw):
        super().__init__()
        size = raw["hidden_size"]
        self.embed_tokens = nn.Embedding(raw["vocab_size"], size)
        self.fc, self.layers = nn.Linear(2 * size, size, raw["bias"]), nn.ModuleList([Layer(raw, 1)])

    def fuse(self, features):
        return features[:, :, 0]

    def step(self, tokens, states):
        x = self.fc(torch.cat([self.embed_tokens(tokens), states], -1))
        return self.layers[0](x, x)

    def logits(self, states, head):
        return states @ head.T


class Eagle3(nn.Module):
    """A generation-3 head: several target states are fused into one, which the layer reads beside the token."""

    def __init__(self, raw):
        super().__init__()
        size, eps, width, count = (
            raw["hidden_size"],
            raw["rms_norm_eps"],
            raw["target_hidden_size"],
            raw["states"],
        )
        self.flags = dict(raw)
        self.embed_tokens = nn.Embedding(raw["vocab_size"], size)
        self.midlayer, self.norm, self.fc = (
            Layer(raw, 3),
            RMSNorm(size, eps),
            nn.Linear(count * width, size, False),
        )
        self.lm_head = nn.Linear(size, raw["draft_vocab_size"], False)
        if raw["norm_before_fc"]:
            self.input_norm = RMSNorm(count * width, eps)
        if raw["fc_norm"]:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count))

    def fuse(self, features):
        parts = list(features.unbind(2))
        if self.flags["fc_norm"]:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        x = torch.cat(parts, -1)
        return self.fc(self.input_norm(x) if self.flags["norm_before_fc"] else x)

    def step(self, tokens, states):
        normed = self.midlayer.hidden_norm(states)
        read = torch.cat([self.midlayer.input_layernorm(self.embed_tokens(tokens)), normed], -1)
        x = self.midlayer(read, normed if self.flags["norm_before_residual"] else states)
        return self.norm(x) if self.flags["norm_output"] else x

    def logits(self, states, head):
        return self.lm_head(states if self.flags["norm_output"] else self.norm(states))


def drafted(model, features, tokens, drafts, head):
    """Return the logits after each token but the first, then after ``drafts[B, K]`` from the head's own states.

    Args:
        features: the target's hidden states, ``[B, S, F, E]``.
        tokens: ``[B, S]``.
        head: the target's output head, ``[V, E]``.
    """
    states, read = model.fuse(features[:, :-1]), tokens[:, 1:]
    found = [model.step(read, states)]
    for i in range(drafts.shape[1]):
        states = torch.cat([states, found[-1][:, -1:]], 1)
        read = torch.cat([read, drafts[:, i : i + 1]], 1)
        found.append(model.step(read, states)[:, -1:])
    return model.logits(torch.cat(found, 1), head)


def drawn(model):
    """Give `model` random weights of which every one matters, and return it."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = "norm" in name and weight.ndim == 1
            weight.normal_(1.0 if norm else 0.0, 0.2 if weight.ndim == 1 else weight.shape[-1] ** -0.5)
    return model
