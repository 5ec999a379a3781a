"""The strict two-way mapping between Hugging Face tensor names and ours.

Our names are flat and dotted. Weights are [out, in], as in the source. q, k and v are concatenated on axis 0, and so
are gate and up.
Size letters: V vocabulary, E hidden, F intermediate, D head size, Q query heads x D, K key-value heads x D.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

from convert.config import LlamaConfig

# Our name, the Hugging Face names of its parts with their rows, the columns, and the config flags that add a bias.
_LINEARS = (
    (
        "self_attn.qkv_proj",
        (("self_attn.q_proj", "Q"), ("self_attn.k_proj", "K"), ("self_attn.v_proj", "K")),
        "E",
        ("attention_bias", "qkv_bias"),
    ),
    ("self_attn.o_proj", (("self_attn.o_proj", "E"),), "Q", ("attention_bias",)),
    ("mlp.gate_up_proj", (("mlp.gate_proj", "F"), ("mlp.up_proj", "F")), "E", ("mlp_bias",)),
    ("mlp.down_proj", (("mlp.down_proj", "E"),), "F", ("mlp_bias",)),
)
_NORMS = (("input_layernorm", "E"), ("post_attention_layernorm", "E"))
_QK_NORMS = (("self_attn.q_norm", "D"), ("self_attn.k_norm", "D"))
# Tables saved by old exporters. They are ignored, because jspec recomputes them from the config.
_BUFFER = re.compile(r"model\.(?:layers\.(\d+)\.self_attn\.)?rotary_emb\.inv_freq")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Heads trained together with their target are in the target's files. `convert.heads.medusa_files` reads them.
MEDUSA = "medusa_head."


@dataclasses.dataclass(frozen=True)
class Part:
    """A Hugging Face tensor that fills `rows` rows of one of our arrays."""

    hf_name: str
    rows: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our arrays: its name, its shape, and the parts that are concatenated on axis 0."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def _sizes(config: LlamaConfig) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "E": config.hidden_size,
        "F": config.intermediate_size,
        "D": config.head_dim,
        "Q": config.num_attention_heads * config.head_dim,
        "K": config.num_key_value_heads * config.head_dim,
    }


def _entry(name: str, parts: tuple[tuple[str, int], ...], columns: tuple[int, ...]) -> Entry:
    return Entry(name, (sum(rows for _, rows in parts), *columns), tuple(Part(*part) for part in parts))


def _layer(config: LlamaConfig, i: int) -> Iterator[Entry]:
    sizes, prefix = _sizes(config), f"layers.{i}."
    biases = {"attention_bias": config.attention_bias, "qkv_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    for norm, size in _NORMS + (_QK_NORMS if config.qk_norm else ()):
        name = f"{prefix}{norm}.weight"
        yield _entry(name, ((f"model.{name}", sizes[size]),), ())
    for ours, theirs, columns, flags in _LINEARS:
        biased = any(biases[flag] for flag in flags)
        kinds = [("weight", (sizes[columns],))] + ([("bias", ())] if biased else [])
        for kind, width in kinds:
            parts = tuple((f"model.{prefix}{part}.{kind}", sizes[rows]) for part, rows in theirs)
            yield _entry(f"{prefix}{ours}.{kind}", parts, width)


@functools.lru_cache(maxsize=16)
def entries(config: LlamaConfig) -> tuple[Entry, ...]:
    """Return an entry for every array of a model with this config, in forward-pass order."""
    vocab, hidden = config.vocab_size, config.hidden_size
    table = [_entry("embed_tokens.weight", ((EMBEDDING, vocab),), (hidden,))]
    for i in range(config.num_hidden_layers):
        table += _layer(config, i)
    table.append(_entry("norm.weight", (("model.norm.weight", hidden),), ()))
    if not config.tie_word_embeddings:
        table.append(_entry("lm_head.weight", ((HEAD, vocab),), (hidden,)))
    return tuple(table)


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array that a checkpoint with this config must hold, keyed by our name."""
    return {entry.name: entry.shape for entry in entries(config)}


def hf_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint with this config must hold, keyed by Hugging Face name."""
    return {part.hf_name: (part.rows, *entry.shape[1:]) for entry in entries(config) for part in entry.parts}


def is_ignored(name: str, config: LlamaConfig) -> bool:
    """Return whether a tensor with this Hugging Face name is ignored if present."""
    buffer = _BUFFER.fullmatch(name)
    return buffer is not None and int(buffer[1] or 0) < config.num_hidden_layers
