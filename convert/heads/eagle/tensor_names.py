"""The mapping between our tensor names and those in an EAGLE head's files, for each layout.

Our names are those of `jspec.drafters.heads.eagle_module.Eagle`. Weights are [out, in], as in the files. q, k and v are
concatenated on axis 0, and so are gate and up.
"""

import dataclasses
from collections.abc import Iterator

from convert import keymap
from convert.heads.eagle.config import EagleConfig
from convert.keymap import Entry, Part

EMBEDDING, HEAD, FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The names that a program gives to the tensors.

    Attributes:
        generation: the generation of the heads in this layout.
        prefix: the layer's tensor-name prefix.
        fc: this layout's name for our `fc`.
    """

    generation: int
    prefix: str
    fc: str = "fc"


FUSION = "speculators, generation 1"
LAYOUTS = {
    "eagle": Layout(1, "layers.0."),
    "sglang": Layout(3, "midlayer."),
    "speculators": Layout(3, "layers.0."),
    # Read-only, because speculators itself has dropped generation 1.
    FUSION: Layout(1, "transformer.", "fusion_fc"),
}


def entries(config: EagleConfig, layout: str, prefix: str | None = None) -> tuple[Entry, ...]:
    """Return an entry for every array of a head, except its two vocabulary tables.

    Args:
        prefix: the layer's tensor-name prefix, if it differs from the layout's.
    """
    names = LAYOUTS[layout]
    start = names.prefix if prefix is None else prefix
    return (*_layer(config, start), *_others(config, start, names.fc))


def _layer(config: EagleConfig, prefix: str) -> Iterator[Entry]:
    """Yield the entries of a Llama layer. Generation 3 has inputs of double width. Generation 1 has no input norm."""
    for entry in keymap.entries(config.layer):
        if not entry.name.startswith("layers.0."):
            continue
        ours, width = entry.name.removeprefix("layers.0."), entry.shape[1:]
        if config.generation == 1 and ours == "input_layernorm.weight":
            continue
        if config.generation == 3 and ours == "self_attn.qkv_proj.weight":
            width = (2 * width[0],)
        parts = tuple(Part(prefix + part.hf_name.removeprefix("model.layers.0."), part.rows) for part in entry.parts)
        yield Entry(ours, (entry.shape[0], *width), parts)


def _others(config: EagleConfig, prefix: str, fc: str) -> Iterator[Entry]:
    size, target_size, vocab = config.layer.hidden_size, config.target_hidden_size, config.layer.vocab_size
    third, count = config.generation == 3, len(config.features)
    read = count * target_size if third else 2 * size
    shapes = {
        "fc.weight": (size, read),
        FC_BIAS: (size,) if config.fc_bias else None,
        "hidden_norm.weight": (size,) if third else None,
        "norm.weight": (size,) if third else None,
        "input_norm.weight": (read,) if config.norm_before_fc else None,
        **{f"fc_norm.{i}.weight": (target_size,) for i in range(count) if config.fc_norm},
        EMBEDDING: (vocab, size) if config.own_embedding else None,
        HEAD: (config.draft_vocab_size or vocab, size) if config.own_head else None,
    }
    for ours, shape in shapes.items():
        if shape is not None:
            theirs = f"{prefix}{ours}" if ours == "hidden_norm.weight" else ours.replace("fc.", f"{fc}.", 1)
            yield Entry(ours, shape, (Part(theirs, shape[0]),))


def shapes(config: EagleConfig, layout: str, prefix: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor except the two tables, keyed by its name in the files."""
    table = entries(config, layout, prefix)
    return {part.hf_name: (part.rows, *entry.shape[1:]) for entry in table for part in entry.parts}
