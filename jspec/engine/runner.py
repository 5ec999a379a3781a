# pyright: reportUnknownArgumentType=false
"""The device side of an engine: the slots, and the compiled programs that act on them, called one at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TypeAlias, cast

import jax
import numpy as np

from jspec.acceptance.base import Rule
from jspec.core.transfers import explicit_transfers
from jspec.core.types import PyTree
from jspec.decoding.state import RequestParams
from jspec.engine import programs
from jspec.engine.constraints import Constraint, Constraints
from jspec.engine.exported_programs import lower
from jspec.engine.memory_budget import release_freed_memory
from jspec.engine.program_inputs import CallLimits, TextPiece
from jspec.engine.program_table import Key, Number, function_and_inputs
from jspec.engine.slot_output import Packed, Piece, Scores
from jspec.engine.slots import AnyDrafter, Bools, Ints, Sizes, Slots, Variant, empty_slots
from jspec.engine.weights import Models, check_exist, check_unchanged
from jspec.models.llama import Llama

_Rows: TypeAlias = Sequence[int] | None  # the slots that a call runs; None for all
_MARGIN = 1.1  # factor by which a larger piece must be cheaper to be chosen


@functools.lru_cache(maxsize=8)
def _programs(structure: Hashable, shapes: Hashable, rule: Rule, sizes: Sizes) -> dict[Key, jax.stages.Compiled]:
    """Return the shared dict of compiled programs for engines with the same models, rule and sizes."""
    return {}


class Runner:
    """The slots on a device. Calls are dispatched in order and return at once. Only readers of the output wait.

    Args:
        journal: whether to record every call.

    Attributes:
        commands: the recorded calls, in order, for `replay`. The slots are a function of the weights and these calls.
        costs: the cost of prefilling a piece, by size; all equal until measured.
        compile_seconds: seconds spent on compiling programs at their first use.
        is_compiling: whether a program is being compiled at its first use.
        is_lazy: whether all programs are compiled at their first use, in which case few of them should be used.
        is_compiled: whether `compile` has been called.
    """

    def __init__(self, target: Llama, drafter: AnyDrafter | None, rule: Rule, sizes: Sizes, journal: bool = False):
        self.sizes, self.rule = sizes, rule
        self.reads_separately, self.positions = programs.reads_separately(drafter), sizes.positions(drafter)
        self.costs = dict.fromkeys(sizes.chunks, 1.0)
        self._vocab_size = target.config.vocab_size
        self.constraints = Constraints(self._vocab_size)
        self.commands: list[tuple[str, tuple[object, ...]]] | None = [] if journal else None
        # Keep the weights flat, because models are deep pytrees, which every call would flatten again.
        self._structure = cast(Hashable, jax.tree.structure((target, drafter)))
        self._models = Models.of(target, drafter)
        shapes = tuple((jax.typeof(x), *(x.devices() if isinstance(x, jax.Array) else ())) for x in self._weights)
        self._programs = _programs(self._structure, shapes, rule, sizes)
        self._deferred: list[Key] = []
        self.compile_seconds, self.is_compiling, self.is_lazy, self.is_compiled = 0.0, False, False, False
        self._slots = cast(Slots, None)
        self.reset()
        self._slot_shapes = jax.eval_shape(lambda slots: slots, self._slots)  # threads compile while slots change

    def reset(self) -> None:
        """Empty the slots. A failed call loses the slots that were donated to it.

        Raises:
            RuntimeError: weights were deleted, so every later call would fail too.
        """
        check_exist(self._weights)
        self._run("reset")

    @property
    def target(self) -> Llama:
        """The model that holds the target's weights."""
        return self._models.target

    @property
    def drafter(self) -> AnyDrafter | None:
        """The drafter that holds the draft's weights, or None."""
        return self._models.drafter

    @property
    def _weights(self) -> list[object]:
        return self._models.weights

    @property
    def models(self) -> Models:
        """The models, with the weights that the programs read."""
        return self._models

    def replace_weights(self, models: Models) -> None:
        """Make the programs read the weights of these models, from `Models.replacement`."""
        self._run("replace_weights", models)

    def check_weights(self) -> None:
        """Raise RuntimeError unless the models still hold the weights that the programs read."""
        check_unchanged(self._models)

    def _unflatten(self, weights: Sequence[object]) -> tuple[Llama, AnyDrafter | None]:
        return jax.tree.unflatten(self._structure, weights)

    def constrain(self, make: Constraint | None) -> int:
        """Start tracking a constraint, and return its number in `constraints`; 0 for none."""
        return 0 if make is None else cast(int, self._run("constrain", make))

    def release(self, number: int) -> None:
        """Release a constraint that no call queries any more."""
        self._run("release", number)

    def assign_slot(
        self,
        slot: int,
        row: RequestParams,
        num_prefix_tokens: int,
        num_prefilled: int = 0,
        constraint: int = 0,
        source: int | None = None,
    ) -> None:
        """Assign `slot` to the request `row`, a batch of one with `num_prefix_tokens` tokens to prefill.

        The first `num_prefilled` of these tokens are already in the slot, or are copied from `source`, another slot.
        """
        source = slot if source is None else source
        self._run("assign_slot", slot, row, num_prefix_tokens, num_prefilled, constraint, source)

    def prefill(self, slot: int, text: Sequence[int], start: int, scored: bool = False) -> Piece:
        """Prefill the next piece of `text`, whose first `start` tokens are already prefilled."""
        chunk = self.piece_size(len(text) - start, scored)
        begin = max(0, min(start, self.positions - chunk))  # near the end some tokens are prefilled again
        piece = np.zeros((1, chunk + 1), np.int32)
        part = text[begin : begin + chunk + 1]
        piece[0, : len(part)] = part
        count = min(chunk, len(text) - 1 - begin)
        scores = cast(Scores | None, self._run("prefill", slot, piece, begin, count, scored))
        return Piece(begin, count, scores)

    def prefill_batch(self, texts: Mapping[int, tuple[Sequence[int], int]]) -> dict[int, Piece]:
        """Prefill pieces of the smallest size in several slots at once.

        `texts` maps each slot to its text and to the number of tokens that are already prefilled.
        """
        chunk, count = self.sizes.chunks[0], self.sizes.slots
        pieces, (starts, counts) = np.zeros((count, chunk + 1), np.int32), np.zeros((2, count), np.int32)
        prefilled: dict[int, Piece] = {}
        for slot, (text, start) in texts.items():
            part = text[start : start + chunk + 1]
            pieces[slot, : len(part)] = part
            prefilled[slot] = Piece(start, min(chunk, len(text) - 1 - start), None)
            starts[slot], counts[slot] = prefilled[slot].start, prefilled[slot].count
        chosen = np.resize(np.array([*texts], np.int32), count)
        self._run("prefill_batch", pieces, starts, counts, chosen, len(texts))
        return prefilled

    def max_unread(self, num_draft_tokens: int, variant: Variant) -> int:
        """Return the largest number of unread tokens with which the drafter may draft `num_draft_tokens`."""
        return programs.max_unread(self.drafter, num_draft_tokens, variant is Variant.CONSTRAINED)

    def catch_up_drafter(self, slot: int, num_unread: int) -> int:
        """Let the drafter catch up in a slot with at most `num_unread` tokens to read. Return how many it reads."""
        smallest, largest = self.sizes.chunks[0], self.sizes.chunks[-1]
        num_pieces = max(1, -(-min(num_unread - 1, largest) // smallest))
        self._run("catch_up_drafter", slot, num_pieces)
        return num_pieces * smallest

    def piece_size(self, num_unread: int, scored: bool = False) -> int:
        """Return the size of the next piece if `num_unread` tokens are unread. The last token is always unread.

        Choose the size with the lowest total cost for the remaining pieces. A larger size must be clearly cheaper.
        """
        if scored:
            return self.sizes.chunks[0]  # few requests need scores, so only one size supports them
        left = max(1, min(num_unread - 1, self.sizes.chunks[-1]))
        cost = {size: math.ceil(left / size) * self.costs[size] for size in self.sizes.chunks}
        lowest = min(cost.values())
        return next(size for size in self.sizes.chunks if cost[size] <= _MARGIN * lowest)

    def decode_rounds(
        self,
        num_draft_tokens: int,
        rounds: int,
        stop: Bools,
        variant: Variant,
        stop_when_done: Bools | None = None,
        rows: _Rows = None,
    ) -> Packed:
        """Run up to `rounds` rounds.

        Args:
            num_draft_tokens, rounds, stop: same as in `RoundSpec` and `CallLimits`.
            variant: the maximum of all active rows' variants.
            stop_when_done: same as in `CallLimits`; None for no row.
            rows: same as in `programs.decode_rounds`; None for all slots. The number of rows must be a number of slots
                that `Sizes.shapes` lists.
        """
        stop_when_done = np.zeros_like(stop) if stop_when_done is None else stop_when_done
        return cast(Packed, self._run("decode_rounds", num_draft_tokens, rounds, stop, variant, stop_when_done, rows))

    def wait(self) -> None:
        """Wait until all dispatched calls have finished."""
        jax.block_until_ready(self._slots.num_prefix_tokens)

    @explicit_transfers()
    def _run(self, name: str, *arguments: object) -> object:
        result = getattr(self, f"_{name}")(*arguments)
        if self.commands is not None:
            self.commands.append((name, arguments))
        return result

    def _reset(self) -> None:
        self.constraints.clear()
        self._slots = cast(Slots, None)  # free the old slots first, because there may not be room for both
        self._slots = self._program("empty")(self._weights)

    def _replace_weights(self, models: Models) -> None:
        self._models = models

    def _constrain(self, make: Constraint) -> int:
        return self.constraints.add(make)

    def _release(self, number: int) -> None:
        self.constraints.drop(number)

    def _assign_slot(
        self, slot: int, row: RequestParams, num_prefix_tokens: int, num_prefilled: int, constraint: int, source: int
    ) -> None:
        numbers = Number(num_prefix_tokens), Number(num_prefilled), Number(source)
        row = dataclasses.replace(row, constraints=np.full(1, self.constraints.in_process(constraint), np.int32))
        self._slots = self._program("assign_slot")(self._weights, self._slots, Number(slot), row, *numbers)

    def _prefill(self, slot: int, piece: Ints, start: int, count: int, scored: bool) -> Scores | None:
        chunk, text = piece.shape[1] - 1, TextPiece.on_host(piece, start, count)
        flags = [np.bool_(scored)] if chunk == self.sizes.chunks[0] else []
        self._slots, scores = self._program("prefill", chunk)(self._weights, self._slots, Number(slot), text, *flags)
        return scores if scored else None

    def _prefill_batch(self, pieces: Ints, starts: Ints, counts: Ints, chosen: Ints, num_chosen: int) -> None:
        program = self._program("prefill_batch")
        self._slots = program(self._weights, self._slots, pieces, starts, counts, chosen, Number(num_chosen))

    def _catch_up_drafter(self, slot: int, num_pieces: int) -> None:
        self._slots = self._program("catch_up_drafter")(self._weights, self._slots, Number(slot), Number(num_pieces))

    def _decode_rounds(
        self, num_draft_tokens: int, rounds: int, stop: Bools, variant: Variant, stop_when_done: Bools, rows: _Rows
    ) -> Packed:
        chosen = () if rows is None else (np.asarray(rows, np.int32),)
        program = self._program("decode_rounds", num_draft_tokens, variant, len(stop) if rows is None else len(rows))
        limits = CallLimits.on_host(stop, rounds, stop_when_done)
        self._slots, packed = program(self._weights, self._slots, limits, *chosen)
        jax.tree.map(lambda part: part.copy_to_host_async(), packed)
        return packed

    def replay(self, commands: Sequence[tuple[str, tuple[object, ...]]]) -> list[Packed]:
        """Replay another runner's calls and return the outputs of every `decode_rounds` call."""
        outputs: list[Packed] = []
        for name, arguments in commands:
            if name in ("release", "reset"):
                self.wait()  # until no running call queries the constraints, as the original runner did
            result = self._run(name, *arguments)
            if name == "decode_rounds":
                outputs.append(cast(Packed, result))
        return outputs

    def compile(self) -> None:
        """Compile all programs except the deferred ones, in parallel, because XLA compiles without Python's lock.

        Without this call, each program is compiled at its first use.
        """
        pool = ThreadPoolExecutor()
        try:
            keys = [key for key in self._startup_keys() if key not in self._programs]
            futures = {key: pool.submit(self._lowered(key).compile) for key in keys}
            for key, future in futures.items():
                self._programs[key] = future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        self.is_compiled = True
        if futures:
            release_freed_memory()

    def deferred_compiles(self) -> list[Callable[[], jax.stages.Compiled]]:
        """Return functions that each compile one program for constrained requests, starting with short drafts.

        Few requests need these programs, and JAX's persistent cache stores no program that calls back to the host.
        """
        self._deferred = sorted(key for key in self._decode_keys(Variant.CONSTRAINED) if key not in self._programs)
        return [functools.partial(self._program, *key) for key in self._deferred]

    def lengths(self, variant: Variant, count: int) -> tuple[int, ...]:
        """Return `Sizes.lengths` without those whose programs are still deferred, unless that would leave none.

        Return at most two lengths if the runner `is_lazy`.
        """
        variant = max(variant, Variant.FULL) if self.is_lazy else variant
        return self._lengths(variant, count) or self.sizes.lengths(variant, count)

    def _lengths(self, variant: Variant, count: int) -> tuple[int, ...]:
        keys = {k: ("decode_rounds", k, variant, count) for k in self.sizes.lengths(variant, count)}
        return tuple(k for k, key in keys.items() if key in self._programs or key not in self._deferred)

    @property
    def can_constrain(self) -> bool:
        """Whether constrained requests can run without waiting for programs that are compiled later."""
        return all(
            self._lengths(variant, count) for count, variant in self.sizes.shapes if variant is Variant.CONSTRAINED
        )

    def _decode_keys(self, *variants: Variant) -> list[Key]:
        return [("decode_rounds", *kind) for kind in self.sizes.kinds(*variants)]

    def _startup_keys(self) -> list[Key]:
        prefills: list[Key] = [("prefill", chunk) for chunk in self.sizes.chunks]
        prefills += [("prefill_batch",)] if self.sizes.slots > 1 else []
        catch_up = [("catch_up_drafter",)] if self.reads_separately else []
        return [("assign_slot",), *prefills, *catch_up, *self._decode_keys(Variant.TEMPERATURE_ONLY, Variant.FULL)]

    def _program(self, *key: *Key) -> jax.stages.Compiled:
        if key not in self._programs:
            begun, self.is_compiling = perf_counter(), True
            try:
                self._programs[key] = self._lowered(key).compile()
            finally:
                self.compile_seconds, self.is_compiling = self.compile_seconds + perf_counter() - begun, False
        return self._programs[key]

    def _lowered(self, key: Key) -> jax.stages.Lowered:
        """Lower a program that takes flat weights, donated slots and other arguments, or one that creates the slots."""
        if key == ("empty",):
            return jax.jit(lambda weights: empty_slots(*self._unflatten(weights), self.sizes)).lower(self._weights)
        function, shapes = function_and_inputs(key, self._slot_shapes, self.rule, self.sizes, self._vocab_size)

        def program(weights: Sequence[object], slots: Slots, *others: PyTree) -> PyTree:
            return function(*self._unflatten(weights), slots, *others)

        arguments = self._weights, self._slot_shapes, *shapes
        if key[2:3] == (Variant.CONSTRAINED,):  # constrained programs call back to this process
            return jax.jit(program, donate_argnums=1).lower(*arguments)
        return lower(program, arguments, self._structure, self.rule, self.sizes, key)
