"""The record of every round, compared with a replay by hand, and the picture drawn from it."""

import types

import jax
import numpy as np
import pytest

import jspec
from jspec.core.origins import ACCEPTED, BONUS, COLOURS, CORRECTED, KEPT, NO_DRAFT, NO_GUESS, REFUSED
from jspec.core.round_display import picture
from jspec.core.tree import Tree
from support import toys

pytestmark = pytest.mark.usefixtures("quick_compile")
LETTERS = types.SimpleNamespace(decode=lambda ids, **_: "".join("ab\ncdefg"[i] for i in ids))
DRAFTS = {
    "chain": (lambda draft: jspec.ModelDrafter(draft), {"num_draft_tokens": 3}),
    "lookup": (lambda draft: jspec.NGramDrafter(), {"num_draft_tokens": jspec.UpTo(3)}),
    "tree": (lambda draft: jspec.TreeDrafter(jspec.ModelDrafter(draft), Tree.branching((2, 2))), {}),
    "traversal": (
        lambda draft: jspec.TreeDrafter(jspec.ModelDrafter(draft), Tree.branching((3, 1))),
        {"accept": "traversal"},
    ),
    "search": (lambda draft: jspec.DynamicTreeDrafter(jspec.ModelDrafter(draft), 5, 3, 2), {"accept": "coupled"}),
}


def decoded(name, seed=0, **more):
    target, draft = toys.markov_pair(seed)
    make, options = DRAFTS[name]
    tokens = np.random.default_rng(seed).integers(0, 8, (5, 4))
    request = tokens, np.array([4, 1, 3, 2, 4]), jax.random.split(jax.random.key(seed), 5)
    options = options | {
        "max_new_tokens": 17,
        "eos_ids": 5,
        "sampling": jspec.SamplingParams(max_tokens=np.array([17, 9, 1, 2, 0])),
    }
    return jax.device_get(jspec.speculative_generate(target, make(draft), *request, **options | more))


@pytest.mark.parametrize("name", DRAFTS)
def test_recorded_rounds_match_output(name):
    """Accepted draft tokens form a path that is in the output, one token follows it, and counts match the rounds."""
    out = decoded(name, record=True)
    kept = guessed = 0
    for row in range(5):
        tokens, parents, fates, counts = (leaf[row] for leaf in vars(out.record).values())
        text, at = out.tokens[row, : out.lengths[row]], 0
        assert counts.sum() == out.lengths[row] and (counts > 0).sum() == out.stats.rounds[row]
        assert not fates[counts == 0].any()
        for guesses, above, fate, count in zip(tokens, parents, fates, counts, strict=True):
            path = np.flatnonzero(fate == KEPT) + 1
            assert [0, *path[:-1]] == above[path - 1].tolist() if len(path) else True
            assert guesses[path - 1].tolist() == text[at : at + len(path)].tolist()
            assert len(path) <= count <= len(path) + 1
            assert (out.origins[row, at : at + len(path)] == ACCEPTED).all()
            assert all(parent == 0 or fate[parent - 1] for parent, own in zip(above, fate, strict=True) if own)
            at, kept, guessed = at + count, kept + len(path), guessed + (fate > 0).sum()
    assert kept == out.stats.accepted.sum() and guessed >= out.stats.drafted.sum() > kept > 0


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_recording_does_not_change_output(name):
    recorded, plain = decoded(name, record=True), decoded(name)
    assert plain.record is None
    jax.tree.map(np.testing.assert_array_equal, recorded.stats, plain.stats)
    np.testing.assert_array_equal(recorded.tokens, plain.tokens)


def styled(text):
    """Return the pieces of text and their styles, without the margin."""
    plain = text.plain
    return [(plain[span.start : span.end], str(span.style)) for span in text.spans if str(span.style) != "dim"]


def test_picture_without_record_has_line_per_round():
    """A picture has one line per round; tokens 0 to 6 are a, b, a new line, c, d, e, f."""
    drawn = picture(LETTERS, [0, 1, 2, 3, 4], [ACCEPTED, CORRECTED, BONUS, NO_DRAFT, ACCEPTED])
    assert drawn.plain == "1 │ ab\n2 │ ⏎\n3 │ c\n4 │ d\n"
    assert styled(drawn) == [
        ("a", COLOURS[ACCEPTED]),
        ("b", COLOURS[CORRECTED]),
        ("⏎", COLOURS[BONUS]),
        ("c", COLOURS[NO_DRAFT]),
        ("d", COLOURS[ACCEPTED]),
    ]
    assert picture(LETTERS, [], []).plain == ""


def record(*rounds):
    """Return a record of rounds, each given as (draft tokens, parents, fates, count)."""
    tokens, parents, fates, counts = (np.array(part) for part in zip(*rounds, strict=True))
    return types.SimpleNamespace(tokens=tokens, parents=parents, fates=fates, counts=counts)


def test_rejected_chain_tokens_are_drawn_inline():
    rounds = record(
        ([0, 3, 4], [0, 1, 2], [KEPT, REFUSED, REFUSED], 2), ([3, 1, 7], [0, 1, 2], [KEPT, KEPT, NO_GUESS], 3)
    )
    drawn = picture(LETTERS, [0, 1, 3, 1, 6], [ACCEPTED, CORRECTED, ACCEPTED, ACCEPTED, BONUS], rounds)
    assert drawn.plain == "1 │ acdb\n2 │ cbf\n"
    assert [piece for piece, style in styled(drawn) if "strike" in style] == ["cd"]


def test_rejected_tree_branches_are_drawn_below():
    """The kept tokens a and c are in the first line, with the rejected child e of c before its replacement.

    Below stand d, the sibling of a, and both children of d, the first of them in d's line.
    """
    rounds = record(([0, 4, 3, 6, 7, 5], [0, 0, 1, 2, 2, 3], [KEPT, REFUSED, KEPT, REFUSED, REFUSED, REFUSED], 3))
    drawn = picture(LETTERS, [0, 3, 1], [ACCEPTED, ACCEPTED, CORRECTED], rounds)
    assert drawn.plain == "1 │ aceb\n  │ df\n  │ ·g\n"


def test_show_prints_picture_of_one_row(capsys):
    out = decoded("tree", record=True)
    out.show(LETTERS, row=1)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "accepted corrected bonus no draft rejected"
    assert sum(line[:3].strip(" │").isdecimal() for line in shown[1:]) == out.stats.rounds[1]
    with pytest.raises(IndexError, match="row=5 is out of range for 5 requests; count from 0"):
        out.show(LETTERS, row=5)
