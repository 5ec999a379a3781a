"""Block drafters in PyTorch, written from the published descriptions. Nothing is cached: all positions run each time.

The descriptions are those of DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), JetSpec (arXiv 2606.18394) and
DFlash2 (https://github.com/vllm-project/vllm/pull/52816).
Weights have the names that they have in the files.
"""

import functools
import math

import torch

from support.block_checkpoints import section


class Reference:
    """A block drafter.

    Args:
        raw: the content of config.json.
        weights: the tensors by name.
        embedding, head: the target's own, ``[V, E]``.
        final_norm: the weight of the target's final norm.
    """

    def __init__(self, raw, weights, embedding, head, final_norm):
        self.raw, self.w = section(raw), {name: torch.tensor(value) for name, value in weights.items()}
        self.embedding = self.w.get("embed_tokens.weight", torch.tensor(embedding))
        self.head = self.w.get("lm_head.weight", torch.tensor(head))
        self.final_norm = torch.tensor(final_norm)

    def norm(self, x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + self.raw["rms_norm_eps"]).sqrt()

    def linear(self, x, name):
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def rotated(self, x, positions):
        """Rotate ``[H, S, D]`` by each token's position, pairing the halves of a head."""
        size = x.shape[-1] // 2
        angles = positions[:, None] * self.raw["rope_theta"] ** (-torch.arange(size) / size)
        first, second = x[..., :size], x[..., size:]
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(turned, -1)

    def attended(self, prefix, states, rows, mask):
        """Return the attention of the block's rows to the context's states and to the block."""
        size, groups = self.raw["head_dim"], self.raw["num_key_value_heads"]

        def split(x, name):
            return self.linear(x, f"{prefix}{name}_proj").unflatten(-1, (-1, size)).transpose(0, 1)

        both = torch.cat([states, rows])
        q, k = self.norm(split(rows, "q"), self.w[f"{prefix}q_norm.weight"]), split(both, "k")
        k, v = self.norm(k, self.w[f"{prefix}k_norm.weight"]), split(both, "v")
        positions, repeats = torch.arange(len(both)), len(q) // groups
        k, v = self.rotated(k, positions).repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        q = self.rotated(q, positions[len(states) :])
        scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(~mask, -math.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{prefix}o_proj")

    def fed_forward(self, prefix, x):
        gate, up = (self.linear(x, f"{prefix}{name}_proj") for name in ("gate", "up"))
        return self.linear(torch.nn.functional.silu(gate) * up, f"{prefix}down_proj")

    def convolved(self, x, kernels, base):
        """Return ``sum_t (base[t, c] + kernels[i, t, g(c)]) x[i - t, c]`` for ``x[R, E]``, row by row."""
        rows, width = len(x), x.shape[1] // kernels.shape[2]
        found = torch.zeros_like(x)
        for i in range(rows):
            for tap in range(min(len(base), i + 1)):
                found[i] += (base[tap] + kernels[i, tap].repeat_interleave(width)) * x[i - tap]
        return found

    def around(self, name, x, sublayer):
        """Return ``sublayer(x)``, between two convolutions if the drafter has them."""
        if f"{name}.base_kernel" not in self.w:
            return sublayer(x)
        base = self.w[f"{name}.base_kernel"]
        kernels = self.linear(x, f"{name}.kernel_projection").unflatten(1, (2, len(base[0]), -1))
        return self.convolved(sublayer(self.convolved(x, kernels[:, 0], base[0])), kernels[:, 1], base[1])

    def mask(self, layer, context):
        """Return ``bool[R, S + R]``: the states before the block, and its rows, that each row attends to."""
        rows, kinds = self.raw["block_size"], self.raw.get("layer_types")
        seen = torch.ones(rows, context + rows).bool()
        query, key = context + torch.arange(rows)[:, None], torch.arange(context + rows)
        slides = kinds is not None and kinds[layer] == "sliding_attention"
        if self.raw.get("causal_head") or self.raw.get("is_causal", slides):
            seen &= key <= query
        if slides:
            seen &= (query - key).abs() < self.raw["sliding_window"]
        return seen

    def states(self, hidden_states, last):
        """Return the rows' states ``[R, E]`` after a context and the last token.

        `hidden_states` are Hugging Face's: the embeddings ``[S, E]``, then the output of each layer.
        """
        ids = self.raw.get("aux_hidden_state_layer_ids") or [i + 1 for i in self.raw["target_layer_ids"]]
        given = [*hidden_states[:-1], self.norm(hidden_states[-1], self.final_norm)]
        context = self.linear(torch.cat([given[i] for i in ids], -1), "fc")
        context = self.norm(context, self.w["hidden_norm.weight"])
        rows = self.raw["block_size"]
        x = self.embedding[torch.tensor([last] + [self.raw["mask_token_id"]] * (rows - 1))]
        x = x * self.raw.get("input_embedding_scale", 1.0)
        for i in range(self.raw["num_hidden_layers"]):
            prefix, mask = f"layers.{i}.", self.mask(i, len(context))
            attend = functools.partial(self.attended, f"{prefix}self_attn.", context, mask=mask)
            normed = self.norm(x, self.w[f"{prefix}input_layernorm.weight"])
            x = x + self.around(f"{prefix}attention_conv", normed, attend)
            normed = self.norm(x, self.w[f"{prefix}post_attention_layernorm.weight"])
            x = x + self.around(f"{prefix}mlp_conv", normed, functools.partial(self.fed_forward, f"{prefix}mlp."))
        return self.norm(x, self.w["norm.weight"])

    def corrections(self, hidden, before):
        """Return the Markov head's corrections ``[K, D]`` of rows with ``hidden[K, E]`` after the tokens `before`."""
        kind, rank = self.raw["markov_head_type"], self.raw["markov_rank"]
        state, found = torch.zeros(rank), []
        for h, token in zip(hidden, before, strict=True):
            z = self.w["markov_head.markov_w1.weight"][token]
            if kind == "gated":
                z = z * torch.sigmoid(self.linear(torch.cat([h, z]), "markov_head.gate_proj"))
            if kind == "rnn":
                gate, candidate, output = self.linear(torch.cat([state, z, h]), "markov_head.joint_proj").chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                z = torch.tanh(output)
            found.append(self.linear(z, "markov_head.markov_w2"))
        return torch.stack(found)

    def selected(self, logits, hidden, before):
        """Return the scores ``[K, V]`` of the rows' likeliest tokens after the tokens `before`, and -inf elsewhere."""
        logits = logits * self.raw.get("output_multiplier", 1.0)
        if cap := self.raw.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        first, second = (self.w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        found = torch.full_like(logits, -math.inf)
        for row, (h, token) in enumerate(zip(hidden, before, strict=True)):
            vector = first[token] * self.linear(h, "candidate_selector.hidden_projection")
            for candidate in logits[row].topk(self.raw["selector_top_k"]).indices:
                found[row, candidate] = logits[row, candidate] + vector @ second[candidate]
        return found

    def hidden(self, hidden_states, last):
        """Return the states ``[K, E]`` of the rows that predict the draft tokens."""
        first = self.raw.get("sample_from_anchor", "dflash_config" not in self.raw)
        return self.states(hidden_states, last)[0 if first else 1 :]

    def acceptance(self, hidden_states, tokens):
        """Return the confidence head's estimates ``[K]`` for the draft tokens after ``tokens[0]``."""
        read = self.hidden(hidden_states, tokens[0])
        if self.raw["confidence_head_with_markov"]:
            read = torch.cat([read, self.w["markov_head.markov_w1.weight"][torch.tensor(tokens)]], -1)
        return self.linear(read, "confidence_head.proj")[:, 0].sigmoid()

    def logits(self, hidden_states, tokens):
        """Return the logits ``[K, D]`` of the draft tokens after the last token ``tokens[0]``, given ``tokens[1:]``."""
        hidden = self.hidden(hidden_states, tokens[0])
        found = hidden @ self.head.T
        if "selector_top_k" in self.raw:
            return self.selected(found, hidden, tokens[: len(hidden)])
        return found + self.corrections(hidden, tokens[: len(hidden)]) if self.raw.get("markov_rank") else found
