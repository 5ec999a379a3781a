"""The mapping between our tensor names and those in a block drafter's files.

Our names are those of `jspec.drafters.heads.block_module.Block`. Weights are [out, in], as in the files.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from convert import keymap
from convert.heads.block.config import BlockConfig
from convert.keymap import Entry, Part

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_CONFIDENCE, _SELECTOR = "confidence_head.", "candidate_selector."


def entries(config: BlockConfig) -> tuple[Entry, ...]:
    """Return an entry for every array of a block drafter, except its two vocabulary tables."""
    return (*_layers(config), *_convolutions(config), *_others(config))


def _layers(config: BlockConfig) -> Iterator[Entry]:
    for entry in keymap.entries(config.body):
        if entry.name.startswith("layers."):
            parts = [dataclasses.replace(part, hf_name=part.hf_name.removeprefix("model.")) for part in entry.parts]
            yield Entry(entry.name, entry.shape, tuple(parts))


def _convolutions(config: BlockConfig) -> Iterator[Entry]:
    if config.dflash2 is None:
        return
    taps, size = config.dflash2.num_taps, config.body.hidden_size
    projected = 2 * taps * (size // config.dflash2.group_size)
    shapes = {"base_kernel": (2, taps, size), "kernel_projection.weight": (projected, size)}
    for i, around in itertools.product(range(config.body.num_hidden_layers), ("attention_conv", "mlp_conv")):
        for name, shape in shapes.items():
            whole = f"layers.{i}.{around}.{name}"
            yield Entry(whole, shape, (Part(whole, shape[0]),))


def _others(config: BlockConfig) -> Iterator[Entry]:
    size, vocab = config.body.hidden_size, config.body.vocab_size
    drafted = config.draft_vocab_size or vocab
    arrays = {
        "fc.weight": (size, len(config.features) * config.target_hidden_size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    if config.own_embedding:
        arrays[EMBEDDING] = (vocab, size)
    if config.own_head:
        arrays[HEAD] = (drafted, size)
    if config.markov is not None:
        rank = config.markov.rank
        markov = {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (drafted, rank)}
        if config.markov.kind == "gated":
            markov |= {"gate_proj.weight": (rank, size + rank), "gate_proj.bias": (rank,)}
        if config.markov.kind == "rnn":
            markov |= {"joint_proj.weight": (3 * rank, size + 2 * rank), "joint_proj.bias": (3 * rank,)}
        arrays |= {f"markov_head.{name}": shape for name, shape in markov.items()}
    if config.confidence is not None:
        rank = config.markov.rank if config.markov is not None and config.confidence == "state and token" else 0
        arrays |= {f"{_CONFIDENCE}weight": (1, size + rank), f"{_CONFIDENCE}bias": (1,)}
    if config.dflash2 is not None:
        rank = config.dflash2.rank
        arrays |= {f"{_SELECTOR}{name}_codebook.weight": (vocab, rank) for name in ("predecessor", "successor")}
        arrays[f"{_SELECTOR}hidden_projection.weight"] = (rank, size)
    for ours, shape in arrays.items():
        theirs = ours.replace(_CONFIDENCE, f"{_CONFIDENCE}proj.").replace("_codebook.weight", "_codebook")
        yield Entry(ours, shape, (Part(theirs, shape[0]),))


def shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor except the two tables, keyed by its name in the files."""
    return {part.hf_name: (part.rows, *entry.shape[1:]) for entry in entries(config) for part in entry.parts}
