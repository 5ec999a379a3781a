"""An engine's programs, called by hand, give the same outputs as `jspec.generate` on each request alone."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.decoding.state import RequestParams
from jspec.drafters.base import own_tree
from jspec.drafters.standalone.model import as_drafter
from jspec.engine.round_budget import RoundBudget
from jspec.engine.runner import Runner
from jspec.engine.slot_output import unpack
from jspec.engine.slots import Sizes, Variant, neutral_transforms
from jspec.engine.warmup import warm_up
from support import drafters, toys
from support.caches import copies_of_a_cache
from support.few import by_default

pytestmark = pytest.mark.usefixtures("quick_compile")
LENGTHS, NEW, SLOTS, TOP = (1, 5, 40, 17, 2, 3), 20, 3, 2
NAMES = drafters.NAMES + drafters.TREE_NAMES


@pytest.fixture(scope="module")
def models():
    target = toys.tiny_llama(0)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def requests(models):
    """Return prompts, keys, and the output of `jspec.generate` for each prompt alone, in the width of the longest."""
    target, rng = models[0], np.random.default_rng(0)
    prompts = [rng.integers(target.config.vocab_size, size=n).tolist() for n in LENGTHS]
    keys = jax.random.split(jax.random.key(7), len(prompts))
    padded = np.array([prompt + [0] * (max(LENGTHS) - len(prompt)) for prompt in prompts])
    alone = [
        jspec.generate(target, padded[i : i + 1], np.array([n]), keys[i : i + 1], max_new_tokens=NEW)
        for i, n in enumerate(LENGTHS)
    ]
    return prompts, keys, jax.device_get(alone)


def row(prompt, key, vocab_size, coupled=True, **fields):
    """Return the `RequestParams` of one request at temperature 1."""
    transforms = neutral_transforms(1, vocab_size)
    numbers = (np.array(number, np.int32) for number in ([len(prompt)], [NEW], [[-1]]))
    zeros = (np.zeros(1, np.int32) for _ in range(3))
    asked = RequestParams(key[None], *numbers, transforms, transforms, *zeros, np.array([coupled]))
    return dataclasses.replace(asked, **fields)


class Host:
    """A host that admits, prefills and decodes in arbitrary order, with another draft length in every call."""

    def __init__(self, runner, prompts, keys, vocab_size):
        self.runner, self.prompts, self.keys, self.vocab_size = runner, prompts, keys, vocab_size
        self.waiting, self.in_slots, self.num_prefilled = list(range(len(prompts))), [None] * SLOTS, [0] * SLOTS
        self.texts, self.num_unread = [[] for _ in prompts], [0] * SLOTS
        self.accepted, self.judged, self.last = 0, 0, [0] * SLOTS

    def run(self):
        for call in range(400):
            self.admit()
            self.tick(call)
            if not self.waiting and self.in_slots == [None] * SLOTS:
                return
        raise AssertionError("it does not come to an end")

    def admit(self):
        for slot, held in enumerate(self.in_slots):
            if held is None and self.waiting:
                i = self.last[slot] = self.in_slots[slot] = self.waiting.pop(0)
                self.runner.assign_slot(slot, row(self.prompts[i], self.keys[i], self.vocab_size), len(self.prompts[i]))
                self.num_prefilled[slot], self.num_unread[slot] = -1, 9

    def tick(self, call):
        prefilling = [slot for slot, i in enumerate(self.in_slots) if i is not None and not self.whole(slot)]
        if len(prefilling) > 1 and call % 2:
            texts = {slot: (self.prompts[self.in_slots[slot]], max(0, self.num_prefilled[slot])) for slot in prefilling}
            for slot, piece in self.runner.prefill_batch(texts).items():
                self.num_prefilled[slot] = piece.end
        for slot in prefilling[:1] * (call % 2 == 0):
            text, start = self.prompts[self.in_slots[slot]], max(0, self.num_prefilled[slot])
            self.num_prefilled[slot] = self.runner.prefill(slot, text, start).end
        for slot, num_unread in enumerate(self.num_unread):
            if self.runner.reads_separately and num_unread > 2 and call % 3:
                self.runner.catch_up_drafter(slot, num_unread)
        lengths = self.runner.sizes.num_draft_tokens
        in_slots = list(self.in_slots)
        variant = Variant.TEMPERATURE_ONLY if call % 5 < 3 else Variant(1 + call % 2)
        stop, stop_when_done = np.zeros(SLOTS, bool), np.full(SLOTS, call % 3 == 1)
        rows, k = None, lengths[call % len(lengths)]
        if call % 4 == 2:  # decode two slots as if the others were absent, whether they are moving or not
            rows, k, variant = [(call // 4 + i) % SLOTS for i in range(2)], lengths[-1], Variant.FULL
        packed = self.runner.decode_rounds(k, 1 + call % 2, stop, variant, stop_when_done, rows)
        num_top = self.runner.sizes.top_logprobs if variant else 0
        for (slot, output), i in zip(unpack(packed, range(SLOTS), num_top).items(), in_slots, strict=True):
            if i is None or (rows and slot not in rows):
                assert not output.tokens
                continue
            self.num_unread[slot] = output.num_unread
            self.texts[i] += output.tokens
            self.accepted, self.judged = self.accepted + sum(output.accepted), self.judged + sum(output.judged)
            if output.done and self.whole(slot):
                self.in_slots[slot] = None

    def whole(self, slot):
        return self.num_prefilled[slot] == len(self.prompts[self.in_slots[slot]]) - 1


def runner(models, name, **changes):
    """Return a runner with the drafter called `name` and an acceptance rule for its chains or trees."""
    drafter, rule = drafters.make(name, *models), "traversal" if name in drafters.TREE_NAMES else "rejection"
    tree = own_tree(drafter)
    sizes = Sizes(SLOTS, max(LENGTHS) + NEW, 1, (4, 16), (0, 2, 4) if tree is None else (0, tree.max_depth), 2, TOP)
    return Runner(models[0], drafter, RULES[rule], dataclasses.replace(sizes, **changes))


# By default one of each kind: drafters that prefill by themselves, from the target's hidden states, or not at all;
# combined drafters; and trees.
@pytest.mark.parametrize("name", by_default(NAMES, ("model", "ngram", "eagle", "fallback", "several")))
def test_text_equals_single_request_text(models, requests, name):
    """The output is the same for any drafter, draft length and slot, and for any order of prefilling the drafter."""
    prompts, keys, alone = requests
    host = Host(runner(models, name), prompts, keys, models[0].config.vocab_size)
    host.run()
    for text, out in zip(host.texts, alone, strict=True):
        assert text == out.tokens[0].tolist()
    assert host.accepted


@pytest.mark.parametrize("name", by_default(NAMES, ("model", "eagle", "lookahead")))
def test_copied_prefix_does_not_change_texts(models, requests, name):
    """Copying a prefix and its drafter state from a slot that is still decoding changes neither output."""
    prompts, keys, alone = requests
    prompt, shared = prompts[2], len(prompts[2]) - 7
    asked = row(prompt, keys[2], models[0].config.vocab_size)
    one = runner(models, name)
    k, nobody = one.sizes.num_draft_tokens[-1], np.zeros(SLOTS, bool)

    def assign_slot(slot, kept, source):
        request = dataclasses.replace(asked, coupled=np.array([slot == 2]))
        one.assign_slot(slot, request, len(prompt), kept, source=source)
        while kept < len(prompt) - 1:
            kept = one.prefill(slot, prompt, kept).end
        for _ in range(4 * one.reads_separately):
            one.catch_up_drafter(slot, len(prompt))

    texts = {}
    for source in (None, 2):  # prefilled normally, then copied from slot 2 after three rounds
        one.reset()
        assign_slot(2, 0, None)
        written = {1: [], 2: []}
        for call in range(3 + NEW):
            if call == 3:
                assign_slot(1, 0 if source is None else shared, source)
            for slot, output in unpack(one.decode_rounds(k, 1, nobody, Variant.TEMPERATURE_ONLY), written).items():
                written[slot] += output.tokens
        texts[source] = written
    assert texts[2] == texts[None]
    assert texts[2][2] == alone[2].tokens[0].tolist() and len(texts[2][1]) == NEW


def tree_drafters(target, draft):
    """Yield trees drawn from chain drafters, and one dynamic tree."""
    tree = jspec.Tree.branching((2, 2))
    eagle = drafters.make("eagle", target, draft)
    yield "rejection", jspec.TreeDrafter(jspec.ModelDrafter(draft), tree)
    yield "traversal", jspec.TreeDrafter(eagle, tree)
    yield "coupled", jspec.DynamicTreeDrafter(eagle, 6, 2, 3)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_tree_drafters_keep_single_request_texts(models, requests, which):
    prompts, keys, alone = requests
    rule, drafter = list(tree_drafters(*models))[which]
    sizes = Sizes(SLOTS, max(LENGTHS) + NEW, 1, (4, 16), (0, drafter.tree.max_depth), 2, TOP)
    host = Host(Runner(models[0], drafter, RULES[rule], sizes), prompts, keys, models[0].config.vocab_size)
    host.run()
    assert host.texts == [out.tokens[0].tolist() for out in alone] and host.accepted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A third-party drafter that can only read a prompt as a whole."""

    model: jspec.ModelDrafter
    vocab_size = max_positions = None

    def init(self, tokens, num_slots):
        return self.model.init(tokens, num_slots), tokens.sum(1)

    def propose(self, state, context, num_draft_tokens):
        draft, cache = self.model.propose(state[0], context, num_draft_tokens)
        return draft, (cache, state[1])

    def commit(self, state, draft, verdict, hidden):
        return state


def test_drafter_that_reads_whole_prompts_is_supported(models, requests):
    prompts, keys, alone = requests
    sizes = Sizes(SLOTS, max(LENGTHS) + NEW, 1, (4, 16), (2,), 2)
    one = Runner(models[0], as_drafter(Whole(jspec.ModelDrafter(models[0]))), RULES["rejection"], sizes)
    host = Host(one, prompts, keys, models[0].config.vocab_size)
    host.run()
    assert host.texts == [out.tokens[0].tolist() for out in alone]
    assert host.accepted > 0.9 * host.judged  # the drafter is the target itself
    for slot, i in enumerate(host.last):  # no trace of the slot's earlier requests
        assert int(one._slots.state.drafter[1][slot]) == sum(prompts[i])


@pytest.mark.parametrize("name", by_default(NAMES, ("medusa", "lookahead")))
def test_rounds_during_prefill_leave_no_trace(models, requests, name):
    """Rounds decoded during a prefill leave no trace; under rejection, their noise would also verify the draft."""
    prompts, keys, _ = requests
    vocab_size = models[0].config.vocab_size
    one = runner(models, name, slots=2)
    k, texts = one.sizes.num_draft_tokens[-1], {}
    for i, between in itertools.product(range(len(prompts)), (0, 1, 2)):
        one.reset()
        one.assign_slot(1, row(prompts[3], keys[3], vocab_size), len(prompts[3]))
        assert one.prefill(1, prompts[3], 0).end == 16  # slot 1 is decoding
        text, read = [], 0
        one.assign_slot(0, row(prompts[i], keys[i], vocab_size, coupled=False), len(prompts[i]))
        while True:
            for _ in range(between):
                one.decode_rounds(k, 1, np.zeros(2, bool), Variant.TEMPERATURE_ONLY)
            read = one.prefill(0, prompts[i], read).end
            if read == len(prompts[i]) - 1:
                break
        for _ in range(4 * one.reads_separately):
            one.catch_up_drafter(0, len(prompts[i]))
        while len(text) < NEW:
            text += unpack(one.decode_rounds(k, 2, np.zeros(2, bool), Variant.TEMPERATURE_ONLY), [0])[0].tokens
        texts.setdefault(i, []).append(text)
    for same in texts.values():
        assert same[0] == same[1] == same[2]


def test_prompt_is_prefilled_in_cheapest_pieces(models):
    runner = Runner(models[0], None, RULES["rejection"], Sizes(SLOTS, 64, 1, (4, 16), (0,), 2))
    unread = (1, 2, 5, 6, 9, 10, 13, 14, 17, 18, 100)
    # With equal costs, use as few pieces as possible.
    assert [runner.piece_size(n) for n in unread] == [4, 4, 4, *[16] * 8]
    runner.costs = {4: 1.0, 16: 2.5}
    assert [runner.piece_size(n) for n in unread] == [4, 4, 4, 4, 4, *[16] * 6]
    runner.costs = {4: 1.0, 16: 9.0}
    assert {runner.piece_size(n) for n in unread} == {4}
    runner.costs = {4: 1.0, 16: 0.95}
    assert runner.piece_size(5) == 4 and runner.piece_size(6) == 16  # measured costs must clearly favour a larger piece
    runner.costs = {4: 1.0, 16: 0.5}
    assert {runner.piece_size(n) for n in unread} == {16} and runner.piece_size(100, scored=True) == 4


def test_warm_up_measures_prefill_costs(models):
    runner = Runner(models[0], None, RULES["rejection"], Sizes(SLOTS, 64, 1, (4, 16), (0,), 2))
    warm_up(runner, RoundBudget(2, 1.0))
    assert set(runner.costs) == {4, 16} and all(0 < seconds != 1 for seconds in runner.costs.values())
    assert not np.asarray(runner._slots.num_drafter_read).any(), "of nobody is anything read"


def test_warm_up_measures_round_costs(models):
    """Measure every kind of call, but not a program's first call, which includes start-up time."""
    one, round_budget, played = runner(models, "model", length=64, small_batch_sizes=(1, 2)), RoundBudget(2, 1.0), []
    decode_rounds = one.decode_rounds

    def noted(k, rounds, stop, variant, rows):
        played.append((k, variant, SLOTS if rows is None else len(rows)))
        return decode_rounds(k, rounds, stop, variant, rows=rows)

    one.decode_rounds = noted
    warm_up(one, round_budget)
    kinds = {*itertools.product((0, 4), Variant, (1, 2, SLOTS)), (2, Variant.TEMPERATURE_ONLY, SLOTS)}
    kinds = {kind for kind in kinds if kind[1] is not Variant.CONSTRAINED}
    assert set(round_budget.costs) == kinds and all(map(round_budget.is_measured, kinds))
    assert min(round_budget.costs.values()) > 0
    assert {len(found) for found in round_budget._measurements.values()} == {played.count((4, Variant.FULL, SLOTS)) - 1}


def test_call_stops_when_a_row_finishes_while_requests_wait(models, requests):
    """The next call, launched before the end was known, stops after one round; neither stops if no request waits."""
    prompts, keys, alone = requests
    vocab_size, found = models[0].config.vocab_size, {}
    one = runner(models, "model", slots=2, rounds=8)
    for stop_when_done in (True, False):
        one.reset()
        for slot, (i, limit) in enumerate([(0, 3), (4, NEW)]):
            asked = row(prompts[i], keys[i], vocab_size, limits=np.array([limit], np.int32))
            one.assign_slot(slot, asked, len(prompts[i]))
            one.prefill(slot, prompts[i], 0)
        rows = np.array([stop_when_done, stop_when_done])
        calls = [
            unpack(one.decode_rounds(0, 8, np.zeros(2, bool), Variant.TEMPERATURE_ONLY, rows), range(2))
            for _ in range(3)
        ]
        found[stop_when_done] = [[len(outputs[slot].tokens) for slot in range(2)] for outputs in calls]
        text = [token for outputs in calls for token in outputs[1].tokens]
        assert text == alone[4].tokens[0, : len(text)].tolist()
    assert found == {True: [[3, 3], [0, 1], [0, 1]], False: [[3, 8], [0, 8], [0, 4]]}


@pytest.mark.parametrize(
    "key",
    [
        ("assign_slot",),
        ("prefill", 16),
        ("prefill", 4),
        ("prefill_batch",),
        ("catch_up_drafter",),
        ("decode_rounds", 0, Variant.TEMPERATURE_ONLY, 3),
        ("decode_rounds", 4, Variant.FULL, 3),
        ("decode_rounds", 4, Variant.CONSTRAINED, 3),
        ("decode_rounds", 0, Variant.TEMPERATURE_ONLY, 1),
        ("decode_rounds", 4, Variant.FULL, 2),
    ],
    ids=str,
)
def test_no_engine_program_copies_a_cache(models, as_shipped, key, report):
    """Slots are donated, and their contents stay in place."""
    one = runner(models, "model", length=400)  # long enough that attention chooses how much of the cache to read
    program = one._lowered(key).compile(as_shipped).as_text()
    of_cache, copies = copies_of_a_cache(program, models[0].config, SLOTS * one.positions)
    report(cache_sized=of_cache, copies=len(copies), positions=one.positions)
    assert of_cache and not copies
