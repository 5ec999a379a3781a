"""A comparison of trees with chains: the acceptance rate of each child rank, and the gain and cost of the best trees.

The comparison includes the simplest tree: k chains that part at the root. These chains are k drafts of the same length
that are drawn independently and verified as a batch, and the best one is kept.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.drafters import joined
from bench.play import Play, branching, chain, costs, fans, rounds_alone, whole_over_rest, with_starts
from bench.report import publish
from bench.subject import span
from bench.synthetic import Synthetic
from bench.timing import in_turns, ratio, spread
from jspec.drafters.draft_length import doubling
from jspec.tuning.tune_chain import acceptance_rates

# Rule -> the rule that accepts the same share of several candidates for one token.
RULES = {"rejection": "rejection", "traversal": "rejection", "k-seq": "k-seq", "coupled": "coupled"}
INDEPENDENT = "k-seq"  # this rule needs independently drawn children
UNKNOWN = ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A drafter of `nodes` draft tokens under a rule.

    Attributes:
        options: options for `bench.play.Play.drafted`.
        tree: the tree whose gain the acceptance rates of `rule` predict; None if they do not predict it.
    """

    rule: str
    name: str
    nodes: int
    options: dict[str, Any]
    tree: jspec.Tree | None


def run(play: Play, children: int, nodes: list[int], depth: int, repeats: int, acceptance: Sequence[float]) -> None:
    """Publish one row per rule and number of children, then one per rule and tree.

    The trees are chains and the best trees of `nodes` nodes. The best trees come from `jspec.theory.best_tree`, given
    the children's acceptance rates. Dynamic trees are found by search.

    Args:
        acceptance: synthetic acceptance rates by child rank; empty to use the models' own acceptance.
    """
    subject, rules = play.subject, judges(play, acceptance)
    accepted = {
        like: fans(play, rules[like], children, like == INDEPENDENT)
        for like in dict.fromkeys(RULES.get(rule, rule) for rule in rules)
    }
    rows = [
        _row(rule, f"{count} children", float(rate))
        for rule, found in accepted.items()
        for count, rate in enumerate(found[:children], 1)
    ]
    rates = {rule: np.diff(np.maximum.accumulate([0, *accepted[RULES.get(rule, rule)]])) for rule in rules}
    found = [one for rule in rules for one in settings(play, rule, rates[rule], nodes, depth)]
    calls = {one.name: functools.partial(play.drafted, accept=rules[one.rule], **one.options) for one in found}
    outs = {name: joined(call()()) for name, call in calls.items()}
    plain, cost = costs(play, next(iter(rules.values())), depth, max(children, *nodes))
    times = in_turns(with_starts({"plain": play.plain} | calls), repeats, warmup=1)
    texts = outs | {"plain": joined(play.plain()())}
    shares = {name: whole_over_rest(out, play.batch) for name, out in texts.items()}
    for one in found:
        speeds = ratio(times["plain"], times[one.name]), spread(rounds_alone(times, one.name, shares))
        rows.append(_measured(one, outs[one.name], rates[one.rule], plain, cost, *(speed.median for speed in speeds)))
    kind, lengths = "".join(f", {rule}" for rule in rules if acceptance), play.request[1]
    publish(
        f"trees-{subject.name}{kind}-b{play.batch}-t{play.temperature:g}-{jax.default_backend()}",
        f"{subject.name}{kind}: {len(lengths)} prompts of {span(lengths)} tokens, {play.batch} at a time,"
        f" {play.new_tokens} new tokens each, temperature {play.temperature:g}, {subject.target.dtype}",
        rows,
        plots.trees,
        notes=[
            "first token: the share of rounds that accept a draft token for their first position. predicted: tokens per"
            " round, if at every depth a child of each rank is accepted as often as if all draft tokens were for one"
            f" position. x plain: medians of {repeats} calls in turns, prompts included; rounds alone: without prompts."
            " predicted x: like rounds alone, computed from the predicted tokens and from straight lines through the"
            " times of chains and fans (jspec.tuning.tune_tree).",
            *fastest(rows),
        ],
        folder=subject.folder,
        rates={rule: rate.tolist() for rule, rate in rates.items()},
        trees={one.name: one.tree.parents for one in found if one.tree},
        seconds={"plain": plain} | dataclasses.asdict(cost),
    )


def judges(play: Play, acceptance: Sequence[float]) -> dict[str, Any]:
    """Return name -> rule for all rules that can verify the drafter, or for one of them if they are equivalent."""
    if acceptance:
        rule = Synthetic(tuple(acceptance))
        return {str(rule): rule}
    if not play.temperature:
        return {"rejection": "rejection"}
    return {rule: rule for rule in RULES if rule != INDEPENDENT or _draws(play)}


def settings(play: Play, rule: str, rates: np.ndarray, nodes: list[int], depth: int) -> list[Setting]:
    """Return the settings to compare under one rule, whose acceptance rates by child rank are `rates`."""
    draft, found, independent = play.subject.draft, [], rule == INDEPENDENT
    if isinstance(draft, jspec.TokenRecyclingDrafter):  # the drafter has its own trees
        return [
            Setting(rule, f"{rule}, tree of {one.num_nodes}", one.tree.size, {"drafter": one}, one.tree)
            for one in map(jspec.TokenRecyclingDrafter, nodes)
        ]
    if not independent:  # on a chain, that rule equals rejection
        found += [
            Setting(rule, f"{rule}, chain of {k}", k, chain(draft, k), jspec.Tree.chain(k)) for k in doubling(depth)
        ]
    if isinstance(draft, jspec.NGramDrafter) and rule in RULES:  # synthetic acceptance ignores the draft tokens
        options = chain(draft, depth) | {"num_draft_tokens": jspec.UpTo(depth)}
        found.append(Setting(rule, f"{rule}, chain of up to {depth}", depth, options, None))
    for count in nodes:
        tree = jspec.theory.best_tree(rates, count, depth)
        if tree.is_chain:
            continue  # as above
        drafter = branching(draft, tree, independent)
        found.append(Setting(rule, f"{rule}, best of {count}", tree.size, {"drafter": drafter}, tree))
    return found + _chains(play, rule, rates, nodes, depth) + _dynamic(play, rule, nodes, depth)


def _chains(play: Play, rule: str, rates: np.ndarray, nodes: list[int], depth: int) -> list[Setting]:
    """Return k chains that part at the root: independent draws or, for prompt lookup, what follows k matches."""
    looked_up = isinstance(play.subject.draft, jspec.NGramDrafter)
    if not looked_up and (rule not in ("rejection", INDEPENDENT) or not _draws(play)):
        return []
    found = []
    for k in (count // depth for count in nodes if 2 * depth <= count <= len(rates) * depth):
        tree = jspec.Tree.branching((k, *[1] * (depth - 1)))
        drafter = branching(play.subject.draft, tree, replacement=True)
        known = tree if looked_up or rule == INDEPENDENT else None  # rejection was not measured with such children
        found.append(Setting(rule, f"{rule}, {k} chains of {depth}", tree.size, {"drafter": drafter}, known))
    return found


def _dynamic(play: Play, rule: str, nodes: list[int], depth: int) -> list[Setting]:
    if rule != "coupled" or not _draws(play):  # no other rule may verify them
        return []
    return [
        Setting(
            rule,
            f"{rule}, dynamic of {count}",
            count,
            {"drafter": jspec.DynamicTreeDrafter(play.subject.draft, count, depth)},
            None,
        )
        for count in nodes
    ]


def _draws(play: Play) -> bool:
    """Return whether children are sampled. Otherwise, they are looked up, or are the most likely tokens."""
    return play.temperature > 0 and not isinstance(play.subject.draft, jspec.NGramDrafter | jspec.TokenRecyclingDrafter)


def _measured(
    setting: Setting, out: jspec.Output, rates: np.ndarray, plain: float, cost: Any, whole: float, alone: float
) -> dict[str, Any]:
    tokens, predicted, gain = float(np.sum(out.lengths) / np.sum(out.stats.rounds)), UNKNOWN, UNKNOWN
    if setting.tree:
        predicted = jspec.theory.tree_yield(setting.tree, rates)
        gain = predicted * plain / cost.of_round(setting.tree)
    first = float(acceptance_rates([out])[0])
    return _row(setting.rule, setting.name, first, setting.nodes, tokens, predicted, whole, alone, gain)


def _row(
    rule: str,
    name: str,
    first: float,
    nodes: Any = "",
    tokens: Any = "",
    predicted: Any = "",
    gain: Any = "",
    alone: Any = "",
    expected: Any = "",
) -> dict[str, Any]:
    return {
        "rule": rule,
        "tree": name,
        "first token": first,
        "nodes": nodes,
        "tokens per round": tokens,
        "predicted": predicted,
        "x plain": gain,
        "rounds alone": alone,
        "predicted x": expected,
    }


def fastest(rows: plots.Rows) -> list[str]:
    """Return a sentence about the fastest chain and tree, and one about the setting predicted to be fastest."""
    played = [row for row in rows if row["nodes"] != ""]
    kinds = {
        "chain": [row for row in played if ", chain of" in row["tree"]],
        "tree": [row for row in played if ", chain of" not in row["tree"]],
    }
    best = [f"{kind} {_said(max(mine, key=lambda row: row['rounds alone']))}" for kind, mine in kinds.items() if mine]
    known = [row for row in played if row["predicted x"] != ""]
    said = [f"Fastest rounds: {'; '.join(best)}."]
    return said + (
        [f"Predicted to be fastest: {_said(max(known, key=lambda row: row['predicted x']))}."] if known else []
    )


def _said(row: dict[str, Any]) -> str:
    expected = "" if row["predicted x"] == "" else f", predicted {row['predicted x']:.2f}"
    return f"{row['tree']}, {row['tokens per round']:.2f} tokens per round, {row['rounds alone']:.2f} x plain{expected}"
