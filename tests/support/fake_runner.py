"""A runner for an engine's host, in a few lines of Python."""

import jax
import numpy as np

from jspec.engine.constraints import Constraints
from jspec.engine.scheduler import ActiveRequest
from jspec.engine.slot_output import Packed, Piece
from jspec.engine.slots import Sizes

SIZES = Sizes(slots=3, length=64, eos_ids=1, chunks=(2, 8), num_draft_tokens=(0, 2), rounds=2, small_batch_sizes=(1, 2))
KEY = jax.random.key(0)


def make_active(request, listen=print):
    return ActiveRequest(request, request.row(SIZES.eos_ids, 4), listen)


NUMBERS = 6  # per row and round, after tokens and origins


class InFlight(Packed):
    is_ready = False


class Finished(Packed):
    is_ready = True


class Failed:
    is_ready = False

    @property
    def integers(self):
        raise RuntimeError("planted")


class FakeRunner:
    """A runner whose slots decode ``1000 n + i``: the i-th token of the request whose text begins with token n.

    If it `waits`, calls have finished when their dispatch returns.
    """

    reads_separately, constraints, compile_seconds = True, Constraints(4), 0.0

    def __init__(self):
        self.sizes, self.fails, self.waits = SIZES, False, False
        self.reset()

    def reset(self):
        self.texts, self.num_prefix_tokens, self.limits = [[] for _ in range(3)], [0] * 3, [0] * 3
        self.moves, self.prompts = [False] * 3, [0] * 3

    def assign_slot(self, slot, row, num_prefix_tokens, num_prefilled, constraint, source=None):
        held = self.texts[slot if source is None else source]
        assert num_prefilled == 0 or (num_prefilled <= len(held) and num_prefilled < num_prefix_tokens)
        assert not self.moves[slot] or source is None, "nobody who decodes gets a slot anew"
        self.texts[slot], self.num_prefix_tokens[slot], self.moves[slot] = (
            held[:num_prefilled],
            num_prefix_tokens,
            False,
        )
        self.prompts[slot], self.limits[slot] = int(row.prompt_lengths[0]), int(row.limits[0])

    def constrain(self, make):
        return 0

    def max_unread(self, num_draft_tokens, variant):
        return 2

    def piece_size(self, num_unread, scored=False):  # a token costs the same however it is read
        left = max(1, min(num_unread - 1, SIZES.chunks[-1]))
        return min(SIZES.chunks, key=lambda size: -(-left // size) * size)

    def prefill(self, slot, text, start, scored):
        assert not self.moves[slot] and list(text[:start]) == self.texts[slot][:start]
        count = min(self.piece_size(len(text) - start), len(text) - 1 - start)
        self.texts[slot] = list(text[: start + count + 1])
        self.moves[slot] = len(self.texts[slot]) == self.num_prefix_tokens[slot] == len(text)
        return Piece(start, count, None)

    def prefill_batch(self, texts):
        return {slot: self.prefill(slot, text, start, False) for slot, (text, start) in texts.items()}

    def wait(self):
        pass

    def catch_up_drafter(self, slot, num_unread):
        assert self.moves[slot] or num_unread > 2
        return self.piece_size(num_unread)

    def lengths(self, variant, count):
        return self.sizes.lengths(variant, count)

    def decode_rounds(self, num_draft_tokens, rounds, stop, variant, stop_when_done, rows):
        if self.fails:  # as on a device, only readers of the result see it
            self.fails = False
            return Failed()
        width = num_draft_tokens + 1
        integers = np.zeros((SIZES.rounds + 1, 3, 2 * width + NUMBERS), np.int32)
        rows = range(3) if rows is None else rows
        assert len(rows) == len(set(rows)) and (len(rows), variant) in self.sizes.shapes
        for slot in rows:
            self.moves[slot] = self.moves[slot] and not stop[slot]
        for i in range(rounds):
            if i and any(stop_when_done[slot] and not self.moves[slot] for slot in rows):
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
        kind = Finished if self.waits else InFlight
        return kind(integers, np.zeros((SIZES.rounds, 3, 2 * width + 1), np.float32))
