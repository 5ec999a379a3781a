"""Error messages for directories that hold another format instead of supported safetensors weights."""

import re
from pathlib import Path

from convert.errors import listing

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
# Pickles that training runs leave beside the weights.
_TRAINING_STATE = ("optimizer.pt", "scheduler.pt", "scaler.pt", "training_args.bin", "rng_state*.pth")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
_HUB = "download the model's Hugging Face files (config.json, *.safetensors)"
# Patterns of files that other programs read -> the name of their format.
_FORMATS = {
    ("weights.npz", "weights.*.npz", "*.npz"): "MLX or NumPy",
    ("*.msgpack",): "Flax",
    ("*.h5",): "Keras",
    ("*.onnx",): "ONNX",
    ("openvino*.bin", "openvino*.xml"): "OpenVINO",
    ("*.ot",): "Rust (rust-bert)",
    ("*.distcp",): "PyTorch distributed checkpoint",
    ("*.nemo",): "NeMo",
    ("*.mlpackage",): "Core ML",
    ("*.tflite",): "TensorFlow Lite",
    ("*.engine",): "TensorRT",
}
# Files that old programs write beside config.json, the method that each describes, and its fields (if config.json has
# another name for a field, that name too).
_OLD_QUANTISED = (
    ("quantize_config.json", "GPTQ", "bits, group_size"),
    ("quant_config.json", "AWQ", "w_bit as bits, q_group_size as group_size, zero_point, version"),
)


def explain(directory: Path, single: str, index: str) -> str:
    """Return one sentence that says what `directory` holds, what was expected, and what to do.

    Args:
        single: the file that was expected.
        index: the index that may be there instead.
    """
    for describe in (_quantised, _adapter, _gguf, _saved_pickles, _own_layout, _other_program, _pickles):
        if sentence := describe(directory):
            return sentence
    if found := _names(directory, "*.safetensors"):
        alone = len(found) == 1 and not _SHARD.search(found[0])
        advice = (
            f"rename the file to {single} if it holds all weights"
            if alone
            else "download the index that belongs to these files"
        )
        return f"{directory} holds {listing(found)} without {index}; expected that index, or {single}: {advice}."
    models = sorted(file.parent.name for file in directory.glob("*/config.json"))
    advice = (
        f"name the folder of one model, such as {directory / models[0]}"
        if models
        else (
            "download the weights too; if the repository has none, download a GGUF file and name it, or save its "
            "pickles as safetensors with transformers"
        )
    )
    return f"{directory} holds no *.safetensors file; expected {single}, or shards with {index}: {advice}."


def _names(directory: Path, *patterns: str) -> list[str]:
    return sorted({file.name for pattern in patterns for file in directory.glob(pattern)})


def _own_layout(directory: Path) -> str | None:
    """Return the message for downloads that Meta and Mistral publish in their own layouts."""
    if found := _names(directory, "consolidated*.pth"):
        author = "Meta"
    elif (found := _names(directory, "consolidated*.safetensors")) and found == _names(directory, "*.safetensors"):
        author = "Mistral"
    else:
        return None
    parent = directory.resolve().parent
    advice = f"name the folder above, {parent}" if any(parent.glob("model*.safetensors")) else f"{_HUB} instead"
    return f"{directory} holds {listing(found)}, the weights in {author}'s own layout, which is not read; {advice}."


def _quantised(directory: Path) -> str | None:
    """Return the message for quantised weights whose method is described in a file beside config.json."""
    for name, method, fields in _OLD_QUANTISED:
        if not (directory / name).exists():
            continue
        found = _names(directory, "*.safetensors")
        advice = (
            "rename the file to model.safetensors, and add a quantization_config to config.json with quant_method "
            f"{method.lower()!r} and the fields of {name} ({fields})"
            if len(found) == 1
            else "choose a checkpoint whose config.json has a quantization_config"
        )
        held = listing(found) or "no *.safetensors file"
        return f"{directory} holds weights quantised with {method} in an old layout ({held}); {advice}."
    return None


def _adapter(directory: Path) -> str | None:
    found = _names(directory, "adapter_model.*")
    if not found or set(_names(directory, "*.safetensors", "pytorch_model*.bin")) - set(found):
        return None
    return (
        f"{directory} holds {listing(found)}, an adapter without the model that it changes; merge them with PEFT's "
        "`merge_and_unload` and save the result with `save_pretrained`."
    )


def _gguf(directory: Path) -> str | None:
    found = [] if _names(directory, "*.safetensors") else _names(directory, "*.gguf")
    if not found:
        return None
    whole = [name for name in found if not _PART.search(name)]
    if not whole:
        return (
            f"{directory} holds a GGUF file in parts ({listing(found)}) and no *.safetensors file; join them with "
            f"`llama-gguf-split --merge {directory / found[0]} OUT.gguf` and pass that file."
        )
    return (
        f"{directory} holds {listing(found)} and no *.safetensors file; name the GGUF file itself, as in "
        f"{directory / whole[0]}."
    )


def _other_program(directory: Path) -> str | None:
    if _names(directory, "*.safetensors"):
        return None
    for patterns, name in _FORMATS.items():
        if found := _names(directory, *patterns):
            return f"{directory} holds {listing(found)}, in the format of {name}, which is not read; {_HUB} instead."
    return None


def _saved_pickles(directory: Path) -> str | None:
    """Return the message for pickles that transformers can convert, regardless of other formats beside them."""
    return _pickles(directory) if _can_convert(directory) else None


def _can_convert(directory: Path) -> bool:
    return (directory / "config.json").exists() and bool(_names(directory, "pytorch_model*.bin"))


def _pickles(directory: Path) -> str | None:
    state = _names(directory, *_TRAINING_STATE)
    found = [name for name in _names(directory, *PICKLES) if name not in state]
    if not found or _names(directory, "*.safetensors"):
        return None
    program = (
        "transformers and PyTorch, `AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)`"
        if _can_convert(directory)
        else "the program that wrote them"
    )
    return (
        f"{directory} holds only pickle files ({listing(found)}), which can run code when read and are never opened "
        f"here; convert them to safetensors with {program}."
    )
