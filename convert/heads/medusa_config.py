"""The configuration of Medusa heads: their sizes, the other fields in their files, and each program's tensor names."""

import dataclasses
import re
from collections.abc import Collection

from convert.config import check_supported
from convert.errors import CheckpointError
from convert.json_fields import Fields, flag, integer
from convert.keymap import Entry, Part
from convert.weight_files import SINGLE

OWN_FILE = "medusa_lm_head.safetensors"
FORMATS = ("medusa", "vllm")
_NUMBERED = re.compile(r"(medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """The sizes of Medusa heads: hidden size E, vocabulary size V, and H heads with L residual blocks each."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class MedusaOrigin:
    """Everything in the heads' files besides the weights, kept so that the files can be rewritten.

    Instances are hashable.

    Attributes:
        layout: "medusa", as published with the paper, or "vllm".
        file: the file that holds the tensors.
        prefix: the prefix of all tensor names.
        biased: whether the blocks have biases. Otherwise, their biases are 0.
        shared: the name of the output head that all heads share; None if each has its own.
        fields: the content of config.json.
        dtype: the dtype of the weights; None if they have several, or if the requested dtype is used instead.
    """

    layout: str
    file: str
    prefix: str = ""
    biased: bool = True
    shared: str | None = None
    fields: str = "{}"
    dtype: str | None = None


def usual_origin(layout: str) -> MedusaOrigin:
    """Return the default origin, for heads that were not read from files."""
    return MedusaOrigin(layout, OWN_FILE if layout == "medusa" else SINGLE)


def read_origin(raw: Fields, names: Collection[str], file: str) -> MedusaOrigin:
    """Return the origin that describes the files.

    Args:
        raw: the content of config.json.
        names: the names of all tensors.
        file: the file that holds the tensors.

    Raises:
        CheckpointError: the files do not hold Medusa heads, or the heads have a reduced vocabulary.
    """
    if raw.get("model_type") == "medusa" or any(re.match(r"(medusa_heads\.)?blocks\.", name) for name in names):
        return _vllm_origin(raw, names, file)
    found = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    if not found:
        raise CheckpointError(
            f"model_type {raw.get('model_type')!r} and the tensor names are not those of Medusa heads; "
            "expected the names of Medusa (0.0.linear.weight) or vLLM (blocks.0.layers.0.weight)."
        )
    return MedusaOrigin("medusa", file, found[0][1] or "")


def _vllm_origin(raw: Fields, names: Collection[str], file: str) -> MedusaOrigin:
    check_supported(raw, {"model_type": "medusa", "architectures": ["MedusaModel"], "logit_scale": 1.0})
    if "token_map" in names or raw.get("truncated_vocab_size") not in (None, raw.get("vocab_size")):
        raise CheckpointError(
            f"truncated_vocab_size is {raw.get('truncated_vocab_size')}, with the tokens in "
            "token_map; only heads for the full vocabulary are supported: choose heads without token_map."
        )
    prefix = "medusa_heads." if any(name.startswith("medusa_heads.") for name in names) else ""
    shared = None
    if flag(raw, "original_lm_head"):
        shared = "lm_head.weight" if f"{prefix}lm_head.weight" in names else "lm_heads.0.weight"
    return MedusaOrigin("vllm", file, prefix, flag(raw, "medusa_fc_bias"), shared)


def read_sizes(raw: Fields, origin: MedusaOrigin, shapes: dict[str, tuple[int, ...]]) -> MedusaConfig:
    """Return the sizes of the heads. For Medusa's own files, the sizes are read from the tensors alone.

    Medusa's published config.json files name 2 heads although there are 5. Medusa's own code accounts for this.

    Args:
        shapes: the shapes of all tensors by name.

    Raises:
        CheckpointError: config.json lacks a size or has a wrong one.
    """
    if origin.layout == "vllm":
        return MedusaConfig(
            integer(raw, "hidden_size"),
            integer(raw, "vocab_size"),
            integer(raw, "num_heads"),
            integer(raw, "num_hidden_layers", 1),
        )
    found = [match for name in shapes if (match := _NUMBERED.fullmatch(name))]
    outputs = [(int(match[3]), match[0]) for match in found if match[4] == "weight"]
    if not outputs or len(shapes[outputs[0][1]]) != 2:
        raise CheckpointError("there is no output head with two axes, such as 0.1.weight; restore the heads' own file.")
    blocks, name = outputs[0]
    said = integer(raw, "medusa_num_layers", max(blocks, 1))
    if said != blocks:
        raise CheckpointError(
            f"medusa_num_layers is {said} but {name} follows {blocks} blocks; restore the heads' own config.json."
        )
    vocab, size = shapes[name]
    return MedusaConfig(size, vocab, 1 + max(int(match[2]) for match in found), blocks)


def entries(config: MedusaConfig, origin: MedusaOrigin) -> tuple[Entry, ...]:
    """Return an entry for every tensor. Our names are those in a tuple of `jspec.drafters.heads.medusa.MedusaHead`."""
    size = config.hidden_size
    table: list[tuple[str, str, tuple[int, ...]]] = []
    for i in range(config.num_heads):
        for j in range(config.num_blocks):
            theirs = f"{i}.{j}.linear" if origin.layout == "medusa" else f"blocks.{i}.layers.{j}"
            for kind, shape in (("weight", (size, size)), *([("bias", (size,))] if origin.biased else [])):
                table.append((f"{i}.blocks.{j}.linear.{kind}", f"{theirs}.{kind}", shape))
        own = f"{i}.{config.num_blocks}.weight" if origin.layout == "medusa" else f"lm_heads.{i}.weight"
        if origin.shared is None or i == 0:
            table.append((f"{i}.lm_head.weight", origin.shared or own, (config.vocab_size, size)))
    return tuple(Entry(ours, shape, (Part(origin.prefix + theirs, shape[0]),)) for ours, theirs, shape in table)


def describe(config: MedusaConfig, origin: MedusaOrigin) -> Fields:
    """Return the content of a config.json that sets every flag."""
    if origin.layout == "medusa":
        return {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_blocks}
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": origin.biased,
        "original_lm_head": origin.shared is not None,
    }
