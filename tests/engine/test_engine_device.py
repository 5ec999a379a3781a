"""Texts of an engine's programs, called by hand, are those of `jspec.generate` alone."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.decoding.state import RequestParams
from jspec.drafters.base import own_tree
from jspec.engine.round_budget import Pace
from jspec.engine.runner import Device
from jspec.engine.slot_output import unpack
from jspec.engine.slots import Needs, Sizes, neutral_transforms
from jspec.engine.warmup import rehearse
from support import drafters, toys
from support.caches import copies_of_a_cache

pytestmark = pytest.mark.usefixtures("quick_compile")
LENGTHS, NEW, SLOTS, TOP = (1, 5, 40, 17, 2, 3), 20, 3, 2


@pytest.fixture(scope="module")
def models():
    target = toys.tiny_llama(0, 3)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def requests(models):
    """Prompts, keys, and what `jspec.generate` alone makes of each."""
    target, rng = models[0], np.random.default_rng(0)
    prompts = [rng.integers(target.config.vocab_size, size=n).tolist() for n in LENGTHS]
    keys = jax.random.split(jax.random.key(7), len(prompts))
    alone = [jspec.generate(target, np.array([prompt]), np.array([len(prompt)]), keys[i : i + 1], max_new_tokens=NEW)
             for i, prompt in enumerate(prompts)]  # fmt: skip
    return prompts, keys, jax.device_get(alone)


def row(prompt, key, vocab_size, coupled=True, **fields):
    """`RequestParams` of one request, temperature 1."""
    transforms = neutral_transforms(1, vocab_size)
    asked = RequestParams(key[None], np.array([len(prompt)], np.int32), np.array([NEW], np.int32),
                          np.array([[-1]], np.int32), transforms, transforms,
                          *(np.zeros(1, np.int32) for _ in range(3)), np.array([coupled]))  # fmt: skip
    return dataclasses.replace(asked, **fields)


class Host:
    """A host that admits, reads and plays as it comes, with another draft length every call."""

    def __init__(self, device, prompts, keys, vocab_size):
        self.device, self.prompts, self.keys, self.vocab_size = device, prompts, keys, vocab_size
        self.waiting, self.seated, self.read = list(range(len(prompts))), [None] * SLOTS, [0] * SLOTS
        self.texts, self.lags = [[] for _ in prompts], [0] * SLOTS
        self.accepted, self.judged, self.last = 0, 0, [0] * SLOTS

    def run(self):
        for call in range(400):
            self.admit()
            self.tick(call)
            if not self.waiting and self.seated == [None] * SLOTS:
                return
        raise AssertionError("it does not come to an end")

    def admit(self):
        for slot, tenant in enumerate(self.seated):
            if tenant is None and self.waiting:
                i = self.last[slot] = self.seated[slot] = self.waiting.pop(0)
                self.device.seat(slot, row(self.prompts[i], self.keys[i], self.vocab_size),
                                 len(self.prompts[i]))  # fmt: skip
                self.read[slot], self.lags[slot] = -1, 9

    def tick(self, call):
        reading = [slot for slot, i in enumerate(self.seated) if i is not None and not self.whole(slot)]
        if len(reading) > 1 and call % 2:
            texts = {slot: (self.prompts[self.seated[slot]], max(0, self.read[slot])) for slot in reading}
            for slot, piece in self.device.read_several(texts).items():
                self.read[slot] = piece.end
        for slot in reading[:1] * (call % 2 == 0):
            self.read[slot] = self.device.read(slot, self.prompts[self.seated[slot]], max(0, self.read[slot])).end
        for slot, lag in enumerate(self.lags):
            if self.device.lags and lag > 2 and call % 3:
                self.device.follow(slot, lag)
        lengths = self.device.sizes.num_draft_tokens
        tenants = list(self.seated)
        needs = Needs.LEAN if call % 5 < 3 else Needs(1 + call % 2)
        stop, yields, rows, k = np.zeros(SLOTS, bool), np.full(SLOTS, call % 3 == 1), None, lengths[call % len(lengths)]
        if call % 4 == 2:  # as if the others were not there, whether they move or not
            rows, k, needs = [(call // 4 + i) % SLOTS for i in range(2)], lengths[-1], Needs.FULL
        played = self.device.play(k, 1 + call % 2, stop, needs, yields, rows)
        for (slot, new), i in zip(
            unpack(played, range(SLOTS), self.device.sizes.top_logprobs if needs else 0).items(), tenants, strict=True
        ):
            if i is None or (rows and slot not in rows):
                assert not new.tokens
                continue
            self.lags[slot] = new.lag
            self.texts[i] += new.tokens
            self.accepted, self.judged = self.accepted + sum(new.accepted), self.judged + sum(new.judged)
            if new.done and self.whole(slot):
                self.seated[slot] = None

    def whole(self, slot):
        return self.read[slot] == len(self.prompts[self.seated[slot]]) - 1


def device(models, name, rule="rejection", **changes):
    drafter = drafters.make(name, *models)
    tree = own_tree(drafter)
    sizes = Sizes(SLOTS, max(LENGTHS) + NEW, 1, (4, 16), (0, 2, 4) if tree is None else (0, tree.max_depth), 2, TOP)
    return Device(models[0], drafter, RULES[rule], dataclasses.replace(sizes, **changes))


# Of each kind one: those that read by themselves, from states of the target, nothing, and several of them in a tree.
BY_DEFAULT = ("model", "ngram", "eagle", "fallback", "several")


@pytest.mark.parametrize(
    "name",
    [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
     for name in drafters.NAMES + drafters.TREE_NAMES],
)  # fmt: skip
def test_a_text_is_that_of_the_request_alone(models, requests, name):
    """Whatever is drafted, how far, by whom, in which slot, and when its draft has read what."""
    prompts, keys, alone = requests
    host = Host(device(models, name, "traversal" if name in drafters.TREE_NAMES else "rejection"), prompts, keys,
                models[0].config.vocab_size)  # fmt: skip
    host.run()
    for text, out in zip(host.texts, alone, strict=True):
        assert text == out.tokens[0].tolist()
    assert host.accepted


@pytest.mark.parametrize(
    "name",
    [name if name in ("model", "eagle", "lookahead") else pytest.param(name, marks=pytest.mark.slow)
     for name in drafters.NAMES + drafters.TREE_NAMES],
)  # fmt: skip
def test_a_text_that_begins_as_another_does(models, requests, name):
    """What a slot has read, and its drafter, are copied while it writes: nobody's text is another one for that."""
    prompts, keys, alone = requests
    prompt, shared = prompts[2], len(prompts[2]) - 7
    asked = row(prompt, keys[2], models[0].config.vocab_size)
    one = device(models, name, "traversal" if name in drafters.TREE_NAMES else "rejection")
    k, nobody = one.sizes.num_draft_tokens[-1], np.zeros(SLOTS, bool)

    def seat(slot, kept, source):
        one.seat(slot, dataclasses.replace(asked, coupled=np.array([slot == 2])), len(prompt), kept, source=source)
        while kept < len(prompt) - 1:
            kept = one.read(slot, prompt, kept).end
        for _ in range(4 * one.lags):
            one.follow(slot, len(prompt))

    texts = {}
    for source in (None, 2):  # read by itself, and copied from the other after three rounds
        one.reset()
        seat(2, 0, None)
        written = {1: [], 2: []}
        for call in range(3 + NEW):
            if call == 3:
                seat(1, 0 if source is None else shared, source)
            for slot, news in unpack(one.play(k, 1, nobody, Needs.LEAN), written).items():
                written[slot] += news.tokens
        texts[source] = written
    assert texts[2] == texts[None]
    assert texts[2][2] == alone[2].tokens[0].tolist() and len(texts[2][1]) == NEW


def tree_drafters(target, draft):
    """Trees that are drawn from a drafter of chains, and one that grows."""
    tree = jspec.Tree.branching((2, 2))
    eagle = drafters.make("eagle", target, draft)
    yield "rejection", jspec.TreeDrafter(jspec.ModelDrafter(draft), tree)
    yield "traversal", jspec.TreeDrafter(eagle, tree)
    yield "coupled", jspec.DynamicTreeDrafter(eagle, 6, 2, 3)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_trees_of_drafters(models, requests, which):
    prompts, keys, alone = requests
    rule, drafter = list(tree_drafters(*models))[which]
    sizes = Sizes(SLOTS, max(LENGTHS) + NEW, 1, (4, 16), (0, drafter.tree.max_depth), 2, TOP)
    host = Host(Device(models[0], drafter, RULES[rule], sizes), prompts, keys, models[0].config.vocab_size)
    host.run()
    assert host.texts == [out.tokens[0].tolist() for out in alone] and host.accepted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A drafter from elsewhere, that can only read a prompt as a whole."""

    model: jspec.ModelDrafter
    vocab_size = max_positions = None

    def init(self, tokens, num_slots):
        return self.model.init(tokens, num_slots), tokens.sum(1)

    def propose(self, state, context, num_draft_tokens):
        draft, cache = self.model.propose(state[0], context, num_draft_tokens)
        return draft, (cache, state[1])

    def commit(self, state, draft, verdict, hidden):
        return state


def test_a_drafter_that_reads_texts_as_a_whole(models, requests):
    prompts, keys, alone = requests
    sizes = Sizes(SLOTS, max(LENGTHS) + NEW, 1, (4, 16), (2,), 2)
    one = Device(models[0], Whole(jspec.ModelDrafter(models[0])), RULES["rejection"], sizes)
    host = Host(one, prompts, keys, models[0].config.vocab_size)
    host.run()
    assert host.texts == [out.tokens[0].tolist() for out in alone]
    assert host.accepted > 0.9 * host.judged  # it is the target itself
    for slot, i in enumerate(host.last):  # nothing of whom it had before
        assert int(one._slots.state.drafter[1][slot]) == sum(prompts[i])


@pytest.mark.parametrize(
    "name",
    [name if name in ("medusa", "lookahead") else pytest.param(name, marks=pytest.mark.slow)
     for name in drafters.NAMES + drafters.TREE_NAMES],
)  # fmt: skip
def test_rounds_played_while_a_text_is_read_leave_nothing_behind(models, requests, name):
    """Under rejection a guess that knew of such a round would be judged by the noise that has made it."""
    prompts, keys, _ = requests
    vocab_size = models[0].config.vocab_size
    one = device(models, name, "traversal" if name in drafters.TREE_NAMES else "rejection", slots=2)
    k, texts = one.sizes.num_draft_tokens[-1], {}
    for i, between in itertools.product(range(len(prompts)), (0, 1, 2)):
        one.reset()
        one.seat(1, row(prompts[3], keys[3], vocab_size), len(prompts[3]))
        assert one.read(1, prompts[3], 0).end == 16  # it writes
        text, read = [], 0
        one.seat(0, row(prompts[i], keys[i], vocab_size, coupled=False), len(prompts[i]))
        while True:
            for _ in range(between):
                one.play(k, 1, np.zeros(2, bool), Needs.LEAN)
            read = one.read(0, prompts[i], read).end
            if read == len(prompts[i]) - 1:
                break
        for _ in range(4 * one.lags):
            one.follow(0, len(prompts[i]))
        while len(text) < NEW:
            text += unpack(one.play(k, 2, np.zeros(2, bool), Needs.LEAN), [0])[0].tokens
        texts.setdefault(i, []).append(text)
    for same in texts.values():
        assert same[0] == same[1] == same[2]


def test_a_text_is_read_by_the_pieces_that_cost_least(models):
    device = Device(models[0], None, RULES["rejection"], Sizes(SLOTS, 64, 1, (4, 16), (0,), 2))
    unread = (1, 2, 5, 6, 9, 10, 13, 14, 17, 18, 100)
    assert [device.chunk(n) for n in unread] == [4, 4, 4, *[16] * 8]  # as few as there may be, where all cost alike
    device.costs = {4: 1.0, 16: 2.5}
    assert [device.chunk(n) for n in unread] == [4, 4, 4, 4, 4, *[16] * 6]
    device.costs = {4: 1.0, 16: 9.0}
    assert {device.chunk(n) for n in unread} == {4}
    device.costs = {4: 1.0, 16: 0.95}
    assert device.chunk(5) == 4 and device.chunk(6) == 16  # measured, so no better unless clearly
    device.costs = {4: 1.0, 16: 0.5}
    assert {device.chunk(n) for n in unread} == {16} and device.chunk(100, scored=True) == 4


def test_a_rehearsal_tells_what_pieces_cost(models):
    device = Device(models[0], None, RULES["rejection"], Sizes(SLOTS, 64, 1, (4, 16), (0,), 2))
    rehearse(device, Pace(2, 1.0))
    assert set(device.costs) == {4, 16} and all(0 < seconds != 1 for seconds in device.costs.values())
    assert not np.asarray(device._slots.read).any(), "of nobody is anything read"


def test_a_rehearsal_tells_what_rounds_cost(models):
    """Of every kind of call; not of a program's first one, where what it takes to get going counts."""
    one, pace, played = device(models, "model", length=64, fewer=(1, 2)), Pace(2, 1.0), []
    play = one.play
    one.play = lambda *its, rows: (played.append((its[0], its[3], SLOTS if rows is None else len(rows))),
                                   play(*its, rows=rows))[1]  # fmt: skip
    rehearse(one, pace)
    kinds = {*itertools.product((0, 4), Needs, (1, 2, SLOTS)), (2, Needs.LEAN, SLOTS)}
    kinds = {kind for kind in kinds if kind[1] is not Needs.CONSTRAINED}
    assert set(pace.costs) == kinds and all(map(pace.knows, kinds)) and min(pace.costs.values()) > 0
    assert {len(found) for found in pace._readings.values()} == {played.count((4, Needs.FULL, SLOTS)) - 1}


def test_a_call_that_yields_ends_when_a_row_does(models, requests):
    """And the next one, which was called for before anybody knew, after a round; not where nobody waits."""
    prompts, keys, alone = requests
    vocab_size, found = models[0].config.vocab_size, {}
    one = device(models, "model", slots=2, rounds=8)
    for yields in (True, False):
        one.reset()
        for slot, (i, limit) in enumerate([(0, 3), (4, NEW)]):
            asked = row(prompts[i], keys[i], vocab_size, limits=np.array([limit], np.int32))
            one.seat(slot, asked, len(prompts[i]))
            one.read(slot, prompts[i], 0)
        rows = np.array([yields, yields])
        calls = [unpack(one.play(0, 8, np.zeros(2, bool), Needs.LEAN, rows), range(2)) for _ in range(3)]
        found[yields] = [[len(news[slot].tokens) for slot in range(2)] for news in calls]
        text = [token for news in calls for token in news[1].tokens]
        assert text == alone[4].tokens[0, : len(text)].tolist()
    assert found == {True: [[3, 3], [0, 1], [0, 1]], False: [[3, 8], [0, 8], [0, 4]]}


@pytest.mark.parametrize(
    "key",
    [
        ("seat",),
        ("read", 16),
        ("read", 4),
        ("read several",),
        ("follow",),
        ("play", 0, Needs.LEAN, 3),
        ("play", 4, Needs.FULL, 3),
        ("play", 4, Needs.CONSTRAINED, 3),
        ("play", 0, Needs.LEAN, 1),
        ("play", 4, Needs.FULL, 2),
    ],
    ids=str,
)
def test_no_program_copies_a_cache(models, as_shipped, key, report):
    """Slots are donated, and what they hold stays where it is."""
    one = device(models, "model", length=400)  # attention chooses how much it reads
    program = one._lowered(key).compile(as_shipped).as_text()
    of_cache, copies = copies_of_a_cache(program, models[0].config, SLOTS * one.positions)
    report(cache_sized=of_cache, copies=len(copies), positions=one.positions)
    assert of_cache and not copies
