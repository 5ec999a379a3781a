"""A device for an engine's host that is a few lines of Python."""

import jax
import numpy as np

from jspec.engine.constraints import Constraints
from jspec.engine.scheduler import Tenant
from jspec.engine.slot_output import Packed, Piece
from jspec.engine.slots import Sizes

SIZES = Sizes(slots=3, length=64, eos_ids=1, chunks=(2, 8), num_draft_tokens=(0, 2), rounds=2, fewer=(1, 2))
KEY = jax.random.key(0)


def tenant_of(request, listen=print):
    return Tenant(request, request.row(SIZES.eos_ids, 4), listen)


NUMBERS = 6  # of each row and round, behind tokens and origins


class Failed:
    @property
    def integers(self):
        raise RuntimeError("planted")


class FakeDevice:
    """Every slot writes tokens ``1000 n + i``: i counts those of the request whose text begins with token n."""

    lags, constraints, compiling = True, Constraints(4), 0.0

    def __init__(self):
        self.sizes, self.fails = SIZES, False
        self.reset()

    def reset(self):
        self.texts, self.given, self.limits = [[] for _ in range(3)], [0] * 3, [0] * 3
        self.moves, self.prompts = [False] * 3, [0] * 3

    def seat(self, slot, row, given, kept, constraint, source=None):
        held = self.texts[slot if source is None else source]
        assert kept == 0 or (kept <= len(held) and kept < given), "what is kept has been read"
        assert not self.moves[slot] or source is None, "nobody who writes is seated anew"
        self.texts[slot], self.given[slot], self.moves[slot] = held[:kept], given, False
        self.prompts[slot], self.limits[slot] = int(row.prompt_lengths[0]), int(row.limits[0])

    def constrain(self, make):
        return 0

    def tolerated(self, num_draft_tokens):
        return 2

    def chunk(self, behind, scored=False):  # as where a token costs the same, however it is read
        left = max(1, min(behind - 1, SIZES.chunks[-1]))
        return min(SIZES.chunks, key=lambda size: -(-left // size) * size)

    def read(self, slot, text, start, scored):
        assert not self.moves[slot] and list(text[:start]) == self.texts[slot][:start]
        count = min(self.chunk(len(text) - start), len(text) - 1 - start)
        self.texts[slot] = list(text[: start + count + 1])
        self.moves[slot] = len(self.texts[slot]) == self.given[slot] == len(text)
        return Piece(start, count, None)

    def read_several(self, texts):
        return {slot: self.read(slot, text, start, False) for slot, (text, start) in texts.items()}

    def wait(self):
        pass

    def follow(self, slot, lag):
        assert self.moves[slot] or lag > 2
        return self.chunk(lag)

    def lengths(self, needs, count):
        return self.sizes.lengths(needs, count)

    def play(self, num_draft_tokens, rounds, stop, needs, yields, rows):
        if self.fails:  # seen, as of a device, by whoever looks at what comes of it
            self.fails = False
            return Failed()
        width = num_draft_tokens + 1
        integers = np.zeros((SIZES.rounds + 1, 3, 2 * width + NUMBERS), np.int32)
        rows = range(3) if rows is None else rows
        assert len(rows) == len(set(rows)) and (len(rows), needs) in self.sizes.shapes
        for slot in rows:
            self.moves[slot] = self.moves[slot] and not stop[slot]
        for i in range(rounds):
            if i and any(yields[slot] and not self.moves[slot] for slot in rows):
                break
            for slot in filter(self.moves.__getitem__, rows):
                written = len(self.texts[slot]) - self.prompts[slot]
                count = min(1 + (written + slot) % width, self.limits[slot] - written)
                new = [1000 * self.texts[slot][0] + written + j for j in range(count)]
                integers[i, slot, : len(new)] = new
                integers[i, slot, 2 * width] = len(new)
                self.texts[slot] += new
                self.moves[slot] = len(self.texts[slot]) - self.prompts[slot] < self.limits[slot]
        for slot in rows:
            integers[-1, slot, :2] = not self.moves[slot], 1
        return Packed(integers, np.zeros((SIZES.rounds, 3, 2 * width + 1), np.float32))
