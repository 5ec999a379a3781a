"""The bundled pair of small models of Python source code."""

from typing import Any

from jspec.bundled import PAIR
from jspec.core.sharding import Placement
from jspec.models.llama import Llama
from jspec.models.load import load
from jspec.text.tokenizer_file import transformers


def demo_pair(dtype: Any = None, sharding: Placement | None = None) -> tuple[Llama, Llama, Any]:
    """Load the bundled pair of small models of Python source code: ``(target, draft, tokenizer)``. It works offline.

    The arguments are those of `load`.
    """
    target, draft = (load(PAIR / name, dtype, sharding=sharding) for name in ("target", "draft"))
    return target, draft, transformers().AutoTokenizer.from_pretrained(PAIR / "target")
