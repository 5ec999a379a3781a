"""The programs of an engine by key: their functions, and the shapes of their inputs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np

from jspec.acceptance.base import Rule
from jspec.core.types import PyTree
from jspec.engine import programs
from jspec.engine.constraints import constrain
from jspec.engine.program_inputs import CallLimits, RoundSpec, TextPiece
from jspec.engine.slots import Sizes, Slots, Variant, get_row

Number = np.int32
Key: TypeAlias = tuple[str, *tuple[int, ...]]  # a program's name and its static options


def function_and_inputs(
    key: Key, slot_shapes: Slots, rule: Rule, sizes: Sizes, vocab_size: int
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Return a program's function, and the shapes of the arguments that follow its models and slots."""
    number, (name, *options) = Number(0), key
    if name == "assign_slot":
        row = jax.eval_shape(get_row, slot_shapes.params, number)
        return programs.assign_slot, (number, row, number, number, number)
    if name == "prefill":
        piece = TextPiece.on_host(np.zeros((1, options[0] + 1), np.int32), 0, 0)
        if options[0] > sizes.chunks[0]:
            return programs.prefill, (number, piece)
        return functools.partial(programs.prefill, num_top=sizes.top_logprobs), (number, piece, np.bool_(False))
    if name == "prefill_batch":
        row = jax.ShapeDtypeStruct((sizes.slots,), np.int32)
        pieces = jax.ShapeDtypeStruct((sizes.slots, sizes.chunks[0] + 1), np.int32)
        return programs.prefill_batch, (pieces, row, row, row, number)
    if name == "catch_up_drafter":
        return functools.partial(programs.catch_up_drafter, chunk=sizes.chunks[0]), (number, number)
    k, variant, count = options
    spec = RoundSpec(rule, k, sizes.rounds, temperature_only=variant is Variant.TEMPERATURE_ONLY)
    if variant >= Variant.FULL:
        spec = dataclasses.replace(spec, num_top=sizes.top_logprobs)
    if variant is Variant.CONSTRAINED:
        spec = dataclasses.replace(spec, constrain=functools.partial(constrain, vocab_size=vocab_size))
    rows = np.zeros(sizes.slots, bool)
    chosen = [jax.ShapeDtypeStruct((count,), np.int32)] * (count < sizes.slots)
    return functools.partial(programs.decode_rounds, spec=spec), (CallLimits.on_host(rows, 0, rows), *chosen)
