"""The device side of an engine: the slots, and the compiled programs that act on them, called one at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import jax
import numpy as np

from jspec.acceptance.base import Rule
from jspec.core.transfers import explicit_transfers
from jspec.decoding.state import RequestParams
from jspec.engine import programs
from jspec.engine.constraints import Constraint, Constraints, allowed
from jspec.engine.memory_budget import give_back
from jspec.engine.slot_output import Packed, Piece, Scores
from jspec.engine.slots import Needs, Sizes, empty_slots, take
from jspec.engine.weights import check_exist, check_unchanged

Number = np.int32
_MARGIN = 1.1  # factor by which a larger piece must be cheaper
Key = tuple[Any, ...]  # a program's name and its static options


@functools.lru_cache(maxsize=8)
def _programs(structure: Any, shapes: Any, rule: Rule, sizes: Sizes) -> dict[Key, Any]:
    """Return the shared dict of compiled programs for engines with the same models, rule and sizes."""
    return {}


class Device:
    """The slots on a device. Calls are dispatched in order and return at once; only reading `play`'s output waits.

    Args:
        journal: whether to record every call.

    Attributes:
        commands: the recorded calls, in order, for `replay`. The slots are a function of the weights and these calls.
        costs: the cost of prefilling a piece, by size; all equal until measured.
        compiling: seconds spent on compiling programs at their first use.
        is_compiling: whether a program is being compiled at its first use.
        is_lazy: whether all programs are compiled at their first use, in which case few of them should be used.
        is_compiled: whether `compile` has been called.
    """

    def __init__(self, target: Any, drafter: Any, rule: Rule, sizes: Sizes, journal: bool = False):
        self.sizes, self.target, self.drafter, self.rule = sizes, target, drafter, rule
        self.lags, self.positions = programs.lags(drafter), sizes.positions(drafter)
        self.costs = dict.fromkeys(sizes.chunks, 1.0)
        self._vocab_size = target.config.vocab_size
        self.constraints = Constraints(self._vocab_size)
        self.commands: list[tuple[str, tuple[Any, ...]]] | None = [] if journal else None
        # Flat, because models are deep pytrees and every call would flatten them.
        self._weights, self._structure = jax.tree.flatten((target, drafter))
        shapes = tuple((jax.typeof(leaf), *getattr(leaf, "devices", tuple)()) for leaf in self._weights)
        self._programs = _programs(self._structure, shapes, rule, sizes)
        self._awaited: list[Key] = []
        self.compiling, self.is_compiling, self.is_lazy, self.is_compiled = 0.0, False, False, False
        self._slots: Any = None
        self.reset()
        self._shapes = jax.eval_shape(lambda slots: slots, self._slots)  # others compile while slots change

    def reset(self) -> None:
        """Empty the slots. A failed call loses the slots that were donated to it.

        Raises:
            RuntimeError: weights were deleted, so every later call would fail too.
        """
        check_exist(self._weights)
        self._do("reset")

    def check_weights(self) -> None:
        """Raise RuntimeError unless the models still hold the weights that the programs read."""
        check_unchanged(self.target, self.drafter, self._weights)

    def _models(self, weights: Any) -> tuple[Any, Any]:
        return jax.tree.unflatten(self._structure, weights)

    def constrain(self, make: Constraint | None) -> int:
        """Start following a constraint, and return its number in `constraints`; 0 for none."""
        return 0 if make is None else self._do("constrain", make)

    def release(self, number: int) -> None:
        """Release a constraint that no call queries any more."""
        self._do("release", number)

    def seat(
        self, slot: int, row: RequestParams, given: int, kept: int = 0, constraint: int = 0, source: int | None = None
    ) -> None:
        """Assign `slot` to the request `row`, a batch of one that brings `given` tokens.

        The slot already holds the first `kept` of them. If `source` is another slot, they are copied from it.
        """
        self._do("seat", slot, row, given, kept, constraint, slot if source is None else source)

    def read(self, slot: int, text: Sequence[int], start: int, scored: bool = False) -> Piece:
        """Prefill the next piece of `text`, whose first `start` tokens are already prefilled."""
        chunk = self.chunk(len(text) - start, scored)
        begin = max(0, min(start, self.positions - chunk))  # near the end some tokens are prefilled again
        piece = np.zeros((1, chunk + 1), np.int32)
        part = text[begin : begin + chunk + 1]
        piece[0, : len(part)] = part
        count = min(chunk, len(text) - 1 - begin)
        scores = self._do("read", slot, piece, begin, count, scored)
        return Piece(begin, count, scores)

    def read_several(self, texts: Mapping[int, tuple[Sequence[int], int]]) -> dict[int, Piece]:
        """Prefill pieces of the smallest size in several slots at once.

        `texts` maps each slot to its text and to the number of tokens that are already prefilled.
        """
        chunk, count = self.sizes.chunks[0], self.sizes.slots
        pieces, (starts, counts) = np.zeros((count, chunk + 1), np.int32), np.zeros((2, count), np.int32)
        found: dict[int, Piece] = {}
        for slot, (text, start) in texts.items():
            part = text[start : start + chunk + 1]
            pieces[slot, : len(part)] = part
            found[slot] = Piece(start, min(chunk, len(text) - 1 - start), None)
            starts[slot], counts[slot] = found[slot].start, found[slot].count
        which = np.resize(np.array([*texts], np.int32), count)
        self._do("read_several", pieces, starts, counts, which, len(texts))
        return found

    def tolerated(self, num_draft_tokens: int) -> int:
        """Return the number of tokens by which the drafter may lag and still draft `num_draft_tokens`."""
        return programs.tolerated_lag(self.drafter, num_draft_tokens)

    def follow(self, slot: int, lag: int) -> int:
        """Let the drafter catch up in a slot where it lags by at most `lag` tokens. Return how many tokens it reads."""
        least, most = self.sizes.chunks[0], self.sizes.chunks[-1]
        pieces = max(1, -(-min(lag - 1, most) // least))
        self._do("follow", slot, pieces)
        return pieces * least

    def chunk(self, behind: int, scored: bool = False) -> int:
        """Return the size of the next piece if `behind` tokens are unread. The last token is always unread.

        Choose the size with the lowest total cost for the remaining pieces. A larger size must be clearly cheaper.
        """
        if scored:
            return self.sizes.chunks[0]  # few requests need scores, so only one size supports them
        left = max(1, min(behind - 1, self.sizes.chunks[-1]))
        cost = {size: math.ceil(left / size) * self.costs[size] for size in self.sizes.chunks}
        least = min(cost.values())
        return next(size for size in self.sizes.chunks if cost[size] <= _MARGIN * least)

    def play(
        self, num_draft_tokens: int, rounds: int, stop: Any, needs: Needs, yields: Any = None, rows: Any = None
    ) -> Packed:
        """Run up to `rounds` rounds.

        Args:
            num_draft_tokens, rounds, stop: as for `programs.play`.
            needs: the maximum of the needs of all active rows.
            yields: as for `programs.play`; None for no row.
            rows: as for `programs.play`. Their number must be one of those in `Sizes.shapes`. None for all slots.
        """
        yields = np.zeros_like(stop) if yields is None else yields
        return self._do("play", num_draft_tokens, rounds, stop, needs, yields, rows)

    def wait(self) -> None:
        """Wait until all dispatched calls have finished."""
        jax.block_until_ready(self._slots.given)

    @explicit_transfers()
    def _do(self, name: str, *arguments: Any) -> Any:
        found = getattr(self, f"_{name}")(*arguments)
        if self.commands is not None:
            self.commands.append((name, arguments))
        return found

    def _reset(self) -> None:
        self.constraints.clear()
        self._slots = None  # free the old slots first, because there may not be room for both
        self._slots = self._program("empty")(self._weights)

    def _constrain(self, make: Constraint) -> int:
        return self.constraints.add(make)

    def _release(self, number: int) -> None:
        self.constraints.drop(number)

    def _seat(self, slot: int, row: RequestParams, given: int, kept: int, constraint: int, source: int) -> None:
        numbers = Number(given), Number(kept), Number(source)
        row = dataclasses.replace(row, constraints=np.full(1, self.constraints.in_process(constraint), np.int32))
        self._slots = self._program("seat")(self._weights, self._slots, Number(slot), row, *numbers)

    def _read(self, slot: int, piece: Any, start: int, count: int, scored: bool) -> Scores | None:
        chunk, numbers = piece.shape[1] - 1, [Number(slot), piece, Number(start), Number(count)]
        if chunk == self.sizes.chunks[0]:
            numbers.append(np.bool_(scored))
        self._slots, scores = self._program("read", chunk)(self._weights, self._slots, *numbers)
        return scores if scored else None

    def _read_several(self, pieces: Any, starts: Any, counts: Any, which: Any, number: int) -> None:
        program = self._program("read several")
        self._slots = program(self._weights, self._slots, pieces, starts, counts, which, Number(number))

    def _follow(self, slot: int, pieces: int) -> None:
        self._slots = self._program("follow")(self._weights, self._slots, Number(slot), Number(pieces))

    def _play(self, num_draft_tokens: int, rounds: int, stop: Any, needs: Needs, yields: Any, rows: Any) -> Packed:
        which = () if rows is None else (np.asarray(rows, np.int32),)
        program = self._program("play", num_draft_tokens, needs, len(stop) if rows is None else len(rows))
        self._slots, packed = program(self._weights, self._slots, stop, Number(rounds), yields, *which)
        jax.tree.map(lambda part: part.copy_to_host_async(), packed)
        return packed

    def replay(self, commands: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Packed]:
        """Replay another device's calls and return the outputs of every `play` call."""
        found: list[Packed] = []
        for name, arguments in commands:
            if name in ("release", "reset"):
                self.wait()  # for running calls that query the constraints, as the original device did
            done = self._do(name, *arguments)
            if name == "play":
                found.append(done)
        return found

    def compile(self) -> None:
        """Compile all programs except those of `later`, in parallel, because XLA compiles without Python's lock.

        Without this call, each program is compiled at its first use.
        """
        pool = ThreadPoolExecutor()
        try:
            keys = [key for key in self._keys() if key not in self._programs]
            waiting = {key: pool.submit(self._lowered(key).compile) for key in keys}
            for key, one in waiting.items():
                self._programs[key] = one.result()
        finally:
            pool.shutdown(cancel_futures=True)
        self.is_compiled = True
        if waiting:
            give_back()

    def later(self) -> list[Callable[[], Any]]:
        """Return functions that each compile one program for constrained requests, short drafts first.

        Few requests need these programs, and JAX's persistent cache stores no program that calls back to the host.
        """
        self._awaited = sorted(key for key in self._plays(Needs.CONSTRAINED) if key not in self._programs)
        return [functools.partial(self._program, *key) for key in self._awaited]

    def lengths(self, needs: Needs, count: int) -> tuple[int, ...]:
        """Return `Sizes.lengths` without those whose programs are compiled `later`, unless that would leave none.

        Return at most two if the device `is_lazy`.
        """
        needs = max(needs, Needs.FULL) if self.is_lazy else needs
        return self._lengths(needs, count) or self.sizes.lengths(needs, count)

    def _lengths(self, needs: Needs, count: int) -> tuple[int, ...]:
        keys = {k: ("play", k, needs, count) for k in self.sizes.lengths(needs, count)}
        return tuple(k for k, key in keys.items() if key in self._programs or key not in self._awaited)

    @property
    def can_constrain(self) -> bool:
        """Whether constrained requests can run without waiting for programs that are compiled `later`."""
        return all(self._lengths(needs, count) for count, needs in self.sizes.shapes if needs is Needs.CONSTRAINED)

    def _plays(self, *needs: Needs) -> list[Key]:
        return [("play", *kind) for kind in self.sizes.kinds(*needs)]

    def _keys(self) -> list[Key]:
        reads = [("read", chunk) for chunk in self.sizes.chunks]
        several = [("read several",)] if self.sizes.slots > 1 else []
        follows = [("follow",)] if self.lags else []
        return [("seat",), *reads, *several, *follows, *self._plays(Needs.LEAN, Needs.FULL)]

    def _program(self, *key: Any) -> Any:
        if key not in self._programs:
            begun, self.is_compiling = perf_counter(), True
            try:
                self._programs[key] = self._lowered(key).compile()
            finally:
                self.compiling, self.is_compiling = self.compiling + perf_counter() - begun, False
        return self._programs[key]

    def _lowered(self, key: Key) -> Any:
        """Lower a program that takes flat weights, donated slots and other arguments, or one that creates the slots."""
        if key == ("empty",):
            return jax.jit(lambda weights: empty_slots(*self._models(weights), self.sizes)).lower(self._weights)
        function, shapes = self._function(*key)

        def program(weights: Any, slots: Any, *others: Any) -> Any:
            return function(*self._models(weights), slots, *others)

        return jax.jit(program, donate_argnums=1).lower(self._weights, self._shapes, *shapes)

    def _function(self, name: str, *options: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a function that takes models, slots and other arguments, and the shapes of these other arguments."""
        one, sizes = Number(0), self.sizes
        if name == "seat":
            return programs.seat, (one, jax.eval_shape(take, self._shapes.params, one), one, one, one)
        if name == "read":
            piece = jax.ShapeDtypeStruct((1, options[0] + 1), np.int32)
            if options[0] > sizes.chunks[0]:
                return programs.read, (one, piece, one, one)
            return functools.partial(programs.read, num_top=sizes.top_logprobs), (one, piece, one, one, np.bool_(False))
        if name == "read several":
            row = jax.ShapeDtypeStruct((sizes.slots,), np.int32)
            pieces = jax.ShapeDtypeStruct((sizes.slots, sizes.chunks[0] + 1), np.int32)
            return programs.read_several, (pieces, row, row, row, one)
        if name == "follow":
            return functools.partial(programs.follow, chunk=sizes.chunks[0]), (one, one)
        k, needs, count = options
        how: dict[str, Any] = {"num_draft_tokens": k, "is_lean": needs is Needs.LEAN}
        if needs >= Needs.FULL:
            how["num_top"] = sizes.top_logprobs
        if needs is Needs.CONSTRAINED:
            how["constrain"] = functools.partial(allowed, vocab_size=self._vocab_size)
        play = functools.partial(programs.play, rule=self.rule, most=sizes.rounds, **how)
        rows = jax.ShapeDtypeStruct((sizes.slots,), bool)
        which = [jax.ShapeDtypeStruct((count,), np.int32)] * (count < sizes.slots)
        return play, (rows, one, rows, *which)
