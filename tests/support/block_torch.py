"""Block drafters in PyTorch, written from the published descriptions. Nothing is cached: all positions run each time.

The descriptions are those of DFlash (arXiv 2602.06036, section 4), DSpark (arXiv 2607.05147, section 3) and JetSpec
(arXiv 2606.18394, section 3).
"""

import math

import torch


def tensor(leaf):
    return torch.tensor(leaf[...].__array__().copy())


def norm(x, ours):
    return tensor(ours.weight) * x / (x.square().mean(-1, keepdim=True) + ours.eps).sqrt()


def linear(x, ours):
    y = x @ tensor(ours.weight)
    return y if ours.bias is None else y + tensor(ours.bias)


def rotated(x, positions, theta):
    """Rotate ``[H, S, D]`` by each token's position, pairing the halves of a head."""
    size = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(size) / size)
    first, second = x[..., :size], x[..., size:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attended(layer, body, states, rows, mask):
    """Return the attention of the block's rows to the context's states and to the block."""
    attention, heads, groups, size = layer.self_attn, *layer.self_attn.sizes

    def split(x, part):
        y = linear(x, attention.qkv_proj)[:, part]
        return y.unflatten(-1, (-1, size)).transpose(0, 1)

    queries, keys = slice(0, heads * size), slice(heads * size, (heads + groups) * size)
    values = slice((heads + groups) * size, None)
    both = torch.cat([states, rows])
    q, k, v = split(rows, queries), split(both, keys), split(both, values)
    if attention.q_norm is not None:
        q, k = norm(q, attention.q_norm), norm(k, attention.k_norm)
    positions = torch.arange(len(both))
    k = rotated(k, positions, body.rope.theta).repeat_interleave(heads // groups, 0)
    q, v = rotated(q, positions[len(states) :], body.rope.theta), v.repeat_interleave(heads // groups, 0)
    scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(~mask, -math.inf)
    return linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), attention.o_proj)


def states(block, target, features, last):
    """Return the states ``[R, E]`` of a block's rows after the context's ``features[S, F, E']`` and the last token."""
    config = block.config
    parts = [
        norm(features[:, i], target.norm) if index == target.config.num_hidden_layers else features[:, i]
        for i, index in enumerate(config.features)
    ]
    context = norm(linear(torch.cat(parts, -1), block.fc), block.hidden_norm)
    tokens = torch.tensor([last] + [config.mask_id] * (config.block_size - 1))
    x = tensor((block.embed_tokens or target.embed_tokens).weight).T[tokens]
    rows = len(tokens)
    own = torch.ones(rows, rows).bool()
    mask = torch.cat([torch.ones(rows, len(context)).bool(), own.tril() if config.causal else own], 1)
    for layer in block.layers:
        x = x + attended(layer, config.body, context, norm(x, layer.input_layernorm), mask)
        gate, up = linear(norm(x, layer.post_attention_layernorm), layer.mlp.gate_up_proj).chunk(2, -1)
        x = x + linear(torch.nn.functional.silu(gate) * up, layer.mlp.down_proj)
    return norm(x, block.norm)


def corrections(head, hidden, before):
    """Return the Markov head's corrections ``[K, D]`` of rows with states ``hidden[K, E]`` after tokens `before`."""
    state, found = torch.zeros(head.config.rank), []
    for h, token in zip(hidden, before, strict=True):
        z = tensor(head.markov_w1.weight)[:, token]
        if head.config.kind == "gated":
            z = z * torch.sigmoid(linear(torch.cat([h, z]), head.gate_proj))
        if head.config.kind == "rnn":
            gate, candidate, output = linear(torch.cat([state, z, h]), head.joint_proj).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            z = torch.tanh(output)
        found.append(z @ tensor(head.markov_w2.weight))
    return torch.stack(found)


def logits(block, target, features, tokens):
    """Return the logits ``[K, D]`` of the draft tokens after the last token ``tokens[0]``, given ``tokens[1:]``."""
    hidden = states(block, target, features, tokens[0])[0 if block.config.drafts_from_first else 1 :]
    found = hidden @ tensor((block.lm_head or target.head).weight)
    if block.markov_head is not None:
        found = found + corrections(block.markov_head, hidden, tokens[: len(hidden)])
    return found
