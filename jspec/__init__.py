"""Lossless speculative decoding for Llama-family models in JAX.

Generation is one jitted call, and its output follows the target's distribution exactly.
"""

import importlib
from typing import TYPE_CHECKING

from convert import moved

if TYPE_CHECKING:
    from jspec import lengths, online, rules, theory
    from jspec.acceptance.lossy import Lenient, Relaxed, Threshold, TopK, Typical
    from jspec.bundled.demo_pair import demo_pair
    from jspec.bundled.pretrained import pretrained
    from jspec.core.sampling import SamplingParams
    from jspec.core.sharding import tensor_parallel
    from jspec.core.tree import Tree
    from jspec.core.types import Output, Stats
    from jspec.drafters import (
        BigramDrafter,
        BlockDrafter,
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
    from jspec.drafters.draft_length import (
        ByAcceptance,
        ByConfidence,
        ByEstimatedAcceptance,
        Heuristic,
        UpTo,
        WhileConfident,
    )
    from jspec.generation.complete import Completion, complete
    from jspec.generation.generate import generate, speculative_generate
    from jspec.generation.rollout import Rollout
    from jspec.generation.scoring import Scores, logprobs
    from jspec.generation.stream import stream
    from jspec.models.live_weights import load_weights
    from jspec.models.llama import Llama
    from jspec.models.load import load
    from jspec.models.lora import merge_lora
    from jspec.models.quantize import quantize
    from jspec.planning.plan import Plan, plan
    from jspec.text.prompt_batches import Batches, batches
    from jspec.training.train import train_drafter
    from jspec.tuning.tune import tune
    from jspec.tuning.tune_chain import Tuning
    from jspec.tuning.tune_exit import best_exit

__version__ = "0.1.0"

__all__ = [
    "Batches",
    "BigramDrafter",
    "BlockDrafter",
    "BlockwiseDrafter",
    "ByAcceptance",
    "ByConfidence",
    "ByEstimatedAcceptance",
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
    "Rollout",
    "SamplingParams",
    "Scores",
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
    "batches",
    "best_exit",
    "complete",
    "demo_pair",
    "generate",
    "lengths",
    "load",
    "load_weights",
    "logprobs",
    "merge_lora",
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

# Names are resolved on first use, because importing JAX takes a second and `jspec --help` should be fast.
_HOMES = {
    "ByAcceptance": "jspec.drafters.draft_length",
    "ByConfidence": "jspec.drafters.draft_length",
    "ByEstimatedAcceptance": "jspec.drafters.draft_length",
    "Heuristic": "jspec.drafters.draft_length",
    "UpTo": "jspec.drafters.draft_length",
    "WhileConfident": "jspec.drafters.draft_length",
    "Lenient": "jspec.acceptance.lossy",
    "Relaxed": "jspec.acceptance.lossy",
    "Llama": "jspec.models.llama",
    "BigramDrafter": "jspec.drafters",
    "BlockDrafter": "jspec.drafters",
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
    "Tree": "jspec.core.tree",
    "Completion": "jspec.generation.complete",
    "complete": "jspec.generation.complete",
    "Output": "jspec.core.types",
    "SamplingParams": "jspec.core.sampling",
    "tensor_parallel": "jspec.core.sharding",
    "Stats": "jspec.core.types",
    "Threshold": "jspec.acceptance.lossy",
    "TopK": "jspec.acceptance.lossy",
    "Tuning": "jspec.tuning.tune_chain",
    "Typical": "jspec.acceptance.lossy",
    "Batches": "jspec.text.prompt_batches",
    "batches": "jspec.text.prompt_batches",
    "demo_pair": "jspec.bundled.demo_pair",
    "load": "jspec.models.load",
    "load_weights": "jspec.models.live_weights",
    "merge_lora": "jspec.models.lora",
    "Plan": "jspec.planning.plan",
    "plan": "jspec.planning.plan",
    "pretrained": "jspec.bundled.pretrained",
    "quantize": "jspec.models.quantize",
    "generate": "jspec.generation.generate",
    "Rollout": "jspec.generation.rollout",
    "Scores": "jspec.generation.scoring",
    "logprobs": "jspec.generation.scoring",
    "speculative_generate": "jspec.generation.generate",
    "stream": "jspec.generation.stream",
    "train_drafter": "jspec.training.train",
    "tune": "jspec.tuning.tune",
    "best_exit": "jspec.tuning.tune_exit",
}

moved.install()


def __getattr__(name: str) -> object:
    if name in ("cluster", "lengths", "online", "rules", "theory"):
        return importlib.import_module(f"jspec.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
