"""Programs for every drafter, rule, draft length, draft dtype and batch size: all, or a few that cover every pair."""

import dataclasses
import functools
import itertools

import jax

import jspec
from bench import abstract
from conftest import TOY
from jspec.acceptance import RULES
from jspec.drafters.base import own_tree
from support import drafters

RULE_OBJECTS = (
    *(RULES[name] for name in ("rejection", "block", "coupled")),
    jspec.Lenient(0.5),
    jspec.Typical(0.3, 0.6),
)
LENGTHS = (
    3,
    jspec.UpTo(3),
    jspec.WhileConfident(3),
    jspec.Heuristic(3),
    jspec.ByAcceptance(3),
    jspec.ByConfidence(3),
    jspec.ByEstimatedAcceptance(3),
)
QUANTIZED = {("tree", "model"): "int8", ("search", "model"): "int4"}
# Branching drafters, each with one or two rules.
TREES = [
    (f"{kind} of {name}", RULES[rule], 2, QUANTIZED.get((kind, name)), (1, 8)[i % 2])
    for i, (kind, name, rule) in enumerate(
        (
            ("tree", "model", "rejection"),
            ("tree", "early exit", "coupled"),
            ("tree", "retrieval", "traversal"),
            ("tree", "bigram", "k-seq"),
            ("search", "model", "coupled"),
            ("search", "early exit", "coupled"),
            ("search", "retrieval", "coupled"),
        )
    )
] + [
    ("lookup tree", RULES["rejection"], 2, None, 8),
    ("recycling", RULES["traversal"], 2, None, 1),
    ("lookahead", RULES["rejection"], 2, None, 8),
    ("several", RULES["coupled"], 2, "int4", 8),
    ("vectors", RULES["traversal"], 2, None, 1),
]
CHOICES = (drafters.NAMES, RULE_OBJECTS, LENGTHS, (None, "int8", "int4"), (1, 8))


def every():
    """Return all combinations."""
    return list(itertools.product(*CHOICES))


def pairwise():
    """Return a few combinations that contain any two choices; each one adds the most pairs not yet covered."""
    left = {pair for one in every() for pair in _pairs(one)}
    found = []
    while left:
        found.append(max(every(), key=lambda one: len(_pairs(one) & left)))
        left -= _pairs(found[-1])
    return found


def _pairs(one):
    return set(itertools.combinations(enumerate(map(str, one)), 2))


def name(one):
    """Return the id of a test."""
    drafter, rule, length, quantized, batch = one
    names = (drafter, type(rule).__name__, length if isinstance(length, int) else type(length).__name__)
    return ", ".join(map(str, names)) + f"{f', {quantized}' if quantized else ''}, batch {batch}"


def program(one, dtype="bfloat16", **sizes):
    """Return the target, drafter and `Setting` of a toy program; the models consist of shapes only."""
    drafter, rule, length, quantized, batch = one
    config = dataclasses.replace(TOY, num_hidden_layers=2, **sizes)
    target, draft = abstract.model(config, dtype), abstract.model(config, dtype, quantized)
    sampling = drafters.every_parameter(batch, config.vocab_size)["sampling"]
    kind, of, branching = drafter.partition(" of ")
    base = branching if kind in ("tree", "search") and of else drafter
    make = functools.partial(drafters.make, base, target)
    made = jax.eval_shape(make, draft) if base == "few tokens" else make(draft)  # copies rows of draft's head
    if kind == "tree":
        made = jspec.TreeDrafter(made, jspec.Tree.branching((2, 2)), replacement=rule.independent)
    elif kind == "search":
        made = jspec.DynamicTreeDrafter(made, num_nodes=6, max_depth=2, width=3)
    length = length if own_tree(made) is None else own_tree(made).max_depth
    setting = abstract.Setting(batch, width=5, new_tokens=9, draft_length=length, rule=rule, sampling=sampling)
    return target, made, setting
