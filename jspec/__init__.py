"""Lossless speculative decoding of Llama-family models in JAX: one jitted call, exactly the target's law."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec import lengths, online, rules, theory
    from jspec.acceptance.lossy import Lenient, Relaxed, Threshold, TopK, Typical
    from jspec.auto import tune
    from jspec.completion import Completion, complete
    from jspec.decode import generate, speculative_generate
    from jspec.draft_length import ByAcceptance, ByConfidence, Heuristic, UpTo, WhileConfident
    from jspec.drafters import (
        BigramDrafter,
        BlockwiseDrafter,
        CascadeDrafter,
        DynamicTreeDrafter,
        EagleDrafter,
        EarlyExitDrafter,
        FallbackDrafter,
        HorizontalDrafter,
        HydraDrafter,
        KangarooDrafter,
        LookaheadDrafter,
        MedusaDrafter,
        MixtureDrafter,
        ModelDrafter,
        MultiDrafter,
        NGramDrafter,
        PassDrafter,
        RetrievalDrafter,
        TokenRecyclingDrafter,
        TreeDrafter,
        UnigramDrafter,
    )
    from jspec.exit_tuning import best_exit
    from jspec.llama import Llama
    from jspec.names import pretrained
    from jspec.planning import Plan, plan
    from jspec.quantizer import quantize
    from jspec.sampling import SamplingParams
    from jspec.sharding import tensor_parallel
    from jspec.streaming import stream
    from jspec.training.train import train_drafter
    from jspec.tree import Tree
    from jspec.tuning import Tuning
    from jspec.types import Output, Stats
    from jspec.weights import demo_pair, load

__version__ = "0.1.0"

__all__ = [
    "BigramDrafter",
    "BlockwiseDrafter",
    "ByAcceptance",
    "ByConfidence",
    "CascadeDrafter",
    "Completion",
    "DynamicTreeDrafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "FallbackDrafter",
    "Heuristic",
    "HorizontalDrafter",
    "HydraDrafter",
    "KangarooDrafter",
    "Lenient",
    "Llama",
    "LookaheadDrafter",
    "MedusaDrafter",
    "MixtureDrafter",
    "ModelDrafter",
    "MultiDrafter",
    "NGramDrafter",
    "Output",
    "PassDrafter",
    "Plan",
    "Relaxed",
    "RetrievalDrafter",
    "SamplingParams",
    "Stats",
    "Threshold",
    "TokenRecyclingDrafter",
    "TopK",
    "Tree",
    "TreeDrafter",
    "Tuning",
    "Typical",
    "UnigramDrafter",
    "UpTo",
    "WhileConfident",
    "best_exit",
    "complete",
    "demo_pair",
    "generate",
    "lengths",
    "load",
    "online",
    "plan",
    "pretrained",
    "quantize",
    "rules",
    "speculative_generate",
    "stream",
    "tensor_parallel",
    "theory",
    "train_drafter",
    "tune",
]

# Names are looked up when they are first used: importing jax takes a second, which `jspec --help` should not.
_HOMES = {
    "ByAcceptance": "jspec.draft_length",
    "ByConfidence": "jspec.draft_length",
    "Heuristic": "jspec.draft_length",
    "UpTo": "jspec.draft_length",
    "WhileConfident": "jspec.draft_length",
    "Lenient": "jspec.acceptance.lossy",
    "Relaxed": "jspec.acceptance.lossy",
    "Llama": "jspec.llama",
    "BigramDrafter": "jspec.drafters",
    "BlockwiseDrafter": "jspec.drafters",
    "CascadeDrafter": "jspec.drafters",
    "DynamicTreeDrafter": "jspec.drafters",
    "EagleDrafter": "jspec.drafters",
    "EarlyExitDrafter": "jspec.drafters",
    "FallbackDrafter": "jspec.drafters",
    "HorizontalDrafter": "jspec.drafters",
    "HydraDrafter": "jspec.drafters",
    "KangarooDrafter": "jspec.drafters",
    "LookaheadDrafter": "jspec.drafters",
    "MedusaDrafter": "jspec.drafters",
    "MixtureDrafter": "jspec.drafters",
    "ModelDrafter": "jspec.drafters",
    "MultiDrafter": "jspec.drafters",
    "NGramDrafter": "jspec.drafters",
    "PassDrafter": "jspec.drafters",
    "RetrievalDrafter": "jspec.drafters",
    "TokenRecyclingDrafter": "jspec.drafters",
    "TreeDrafter": "jspec.drafters",
    "UnigramDrafter": "jspec.drafters",
    "Tree": "jspec.tree",
    "Completion": "jspec.completion",
    "complete": "jspec.completion",
    "Output": "jspec.types",
    "SamplingParams": "jspec.sampling",
    "tensor_parallel": "jspec.sharding",
    "Stats": "jspec.types",
    "Threshold": "jspec.acceptance.lossy",
    "TopK": "jspec.acceptance.lossy",
    "Tuning": "jspec.tuning",
    "Typical": "jspec.acceptance.lossy",
    "demo_pair": "jspec.weights",
    "load": "jspec.weights",
    "Plan": "jspec.planning",
    "plan": "jspec.planning",
    "pretrained": "jspec.names",
    "quantize": "jspec.quantizer",
    "generate": "jspec.decode",
    "speculative_generate": "jspec.decode",
    "stream": "jspec.streaming",
    "train_drafter": "jspec.training.train",
    "tune": "jspec.auto",
    "best_exit": "jspec.exit_tuning",
}


def __getattr__(name: str) -> Any:
    if name in ("lengths", "online", "rules", "theory"):
        return importlib.import_module(f"jspec.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
