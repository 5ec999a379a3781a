"""The models of a process, by name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from convert.hub_names import MODELS
from jspec.bundled import PAIR
from jspec.bundled.pretrained import pretrained
from jspec.core.tokenizer import Tokenizer
from jspec.drafters import NGramDrafter
from jspec.drafters.base import DraftSource
from jspec.engine import Engine
from jspec.models.llama import Llama
from jspec.models.load import load
from jspec.text import load_tokenizer

Draft: TypeAlias = str | Callable[[Llama], DraftSource] | None


@dataclasses.dataclass(frozen=True)
class ModelPair:
    """A target and a draft that every replica or worker loads itself. See `jspec.cluster.app`.

    Raises:
        TypeError: `target` is not a string, or `draft` is a model.
    """

    target: str | None
    draft: Draft
    dtype: str | None
    quantize: str | None

    def __post_init__(self) -> None:
        given: dict[str, object] = {"target": self.target, "draft": self.draft}
        for name, value in given.items():
            if isinstance(value, Llama) or not (value is None or isinstance(value, str) or callable(value)):
                raise TypeError(
                    f"{name} is of type {type(value).__name__}; pass the path or the name of a model, because every "
                    "process loads it itself."
                )

    def tokenizer(self) -> Tokenizer:
        """Return the target's tokenizer."""
        return load_tokenizer(self.target or PAIR / "target")

    def engine(self, options: Mapping[str, Any]) -> tuple[Engine, Tokenizer]:
        """Load the models, and return an engine that is not running, and the tokenizer."""
        target, drafter = self._load()
        return Engine(target, drafter, **options), self.tokenizer()

    def _load(self) -> tuple[Llama, DraftSource | None]:
        if self.draft is None and self.target in MODELS:
            target, drafter, _ = pretrained(str(self.target), self.dtype, self.quantize)
            return target, drafter
        target = load(self.target or PAIR / "target", self.dtype, self.quantize)
        draft = self.draft or ("lookup" if self.target else str(PAIR / "draft"))
        if callable(draft):
            return target, draft(target)
        if draft in ("lookup", "none"):
            return target, NGramDrafter() if draft == "lookup" else None
        return target, load(draft, self.dtype, self.quantize)
