"""The bundled target and draft: two small models trained on Python source code."""

from typing import Any

from jax.typing import DTypeLike

from jspec.bundled import PAIR
from jspec.core.sharding import Placement
from jspec.models.llama import Llama
from jspec.models.load import load
from jspec.text.tokenizer_file import transformers


def demo_pair(
    dtype: DTypeLike | None = None, sharding: Placement | None = None, packed: bool | None = None
) -> tuple[Llama, Llama, Any]:
    """Load ``(target, draft, tokenizer)``, the bundled pair of small Python source-code models. This works offline.

    The arguments are the same as those of `load`.
    """
    target, draft = (load(PAIR / name, dtype, sharding=sharding, packed=packed) for name in ("target", "draft"))
    # The tokenizer is typed as Any, because transformers' type hints reject JAX arrays, although it can decode them.
    return target, draft, transformers().AutoTokenizer.from_pretrained(PAIR / "target")
