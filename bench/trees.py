"""Trees against chains: how often a child of each rank is accepted, what the best trees bring, and what they cost.

Beside them stands the simplest of all, k drafts of the same length that are drawn independently and verified as a
batch, the best of which is kept: the tree of k chains that part at the root.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import WIDTH, Subject, span
from bench.timing import in_turns, ratio

# Rule -> that whose acceptance of several guesses for one token it shares.
RULES = {"rejection": "rejection", "traversal": "rejection", "coupled": "coupled"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A drafter of `nodes` guesses under a rule; `predicted` tokens a round."""

    rule: str
    name: str
    nodes: int
    drafter: Any
    predicted: float | str


def run(
    subject: Subject, batch: int, children: int, nodes: list[int], depth: int, new_tokens: int, temperature: float,
    repeats: int,
) -> None:  # fmt: skip
    """Publish one row a rule and number of children, then one a rule and tree: chains, and the best of `nodes` nodes.

    The best are those of `jspec.theory.best_tree`, from the acceptance of children; dynamic trees are searched for.
    """
    request = subject.request(batch, WIDTH)
    options = {"max_new_tokens": new_tokens, "sampling": jspec.SamplingParams(temperature=temperature)}

    def call(drafter: Any, rule: str) -> Callable[[], jspec.Output]:
        return functools.partial(jspec.speculative_generate, subject.target, drafter, *request, accept=rule, **options)

    accepted = {
        rule: fans(subject.draft, functools.partial(call, rule=rule), children)
        for rule in dict.fromkeys(RULES.values())
    }
    rows = [_row(rule, f"{count} children", rate) for rule, rates in accepted.items()
            for count, rate in enumerate(rates, 1)]  # fmt: skip
    rates = {rule: np.diff(np.maximum.accumulate([0, *accepted[rule]])) for rule in accepted}
    settings = [
        one for rule, like in RULES.items() for one in _settings(subject.draft, rule, rates[like], nodes, depth)
    ]
    calls: dict[str, Callable[[], jspec.Output]] = {one.name: call(one.drafter, one.rule) for one in settings}
    outs = {name: jax.device_get(call()) for name, call in calls.items()}
    plain = functools.partial(jspec.generate, subject.target, *request, **options)
    times = in_turns({"plain": plain} | calls, repeats, warmup=1)
    rows += [_measured(one, outs[one.name], ratio(times["plain"], times[one.name]).median) for one in settings]
    lengths = request[1]
    publish(
        f"trees-{subject.name}-b{batch}-t{temperature:g}-{jax.default_backend()}",
        f"{subject.name}: {len(lengths)} prompts of {span(lengths)} tokens, {new_tokens} new tokens each, temperature"
        f" {temperature:g}, {subject.target.dtype}",
        rows,
        plots.trees,
        notes=["first token: how often a guess for it is accepted. predicted: tokens a round, if at every depth a child"
               " of a rank is accepted as often as where all guesses are for one token. x plain: medians of"
               f" {repeats} calls in turns, prompts included."],
        folder=subject.folder,
        rates={rule: rate.tolist() for rule, rate in rates.items()},
        trees={one.name: one.drafter.tree.parents for one in settings if one.predicted != ""},
    )  # fmt: skip


def fans(draft: Any, call: Callable[[Any], Callable[[], jspec.Output]], children: int) -> list[float]:
    """How often one of 1, 2, ... `children` guesses for one token is accepted."""
    outs = [call(jspec.TreeDrafter(draft, jspec.Tree.branching((count,))))() for count in range(1, children + 1)]
    return [float(out.stats.accepted.sum() / out.stats.judged.sum()) for out in outs]


def _settings(draft: Any, rule: str, rates: np.ndarray, nodes: list[int], depth: int) -> list[Setting]:
    trees = {f"chain of {depth}": jspec.Tree.chain(depth)}
    trees |= {f"best of {count}": jspec.theory.best_tree(rates, count, depth) for count in nodes}
    found = [Setting(rule, f"{rule}, {name}", tree.size, jspec.TreeDrafter(draft, tree),
                     jspec.theory.tree_yield(tree, rates)) for name, tree in trees.items()]  # fmt: skip
    if rule == "rejection":
        found += [Setting(rule, f"{rule}, {count // depth} chains of {depth}", count // depth * depth,
                          jspec.TreeDrafter(draft, _chains(count // depth, depth), replacement=True), "")
                  for count in nodes if count >= 2 * depth]  # fmt: skip
    if rule == "coupled":  # no other may judge them
        found += [Setting(rule, f"{rule}, dynamic of {count}", count, jspec.DynamicTreeDrafter(draft, count, depth), "")
                  for count in nodes]  # fmt: skip
    return found


def _chains(count: int, depth: int) -> jspec.Tree:
    """`count` chains of `depth` nodes each, from the last token on."""
    return jspec.Tree.branching((count, *[1] * (depth - 1)))


def _measured(setting: Setting, out: jspec.Output, gain: float) -> dict[str, Any]:
    first = out.stats.accepted_at[:, 0].sum() / out.stats.judged_at[:, 0].sum()
    tokens = float(out.lengths.sum() / out.stats.rounds.sum())
    return _row(setting.rule, setting.name, float(first), setting.nodes, tokens, setting.predicted, gain)


def _row(
    rule: str, name: str, first: float, nodes: Any = "", tokens: Any = "", predicted: Any = "", gain: Any = ""
) -> dict[str, Any]:
    return {"rule": rule, "tree": name, "first token": first, "nodes": nodes, "tokens a round": tokens,
            "predicted": predicted, "x plain": gain}  # fmt: skip
