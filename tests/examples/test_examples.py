"""The examples: GRPO with drafts gives the run without drafts, and distillation makes a better draft."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from examples import distill, grpo

pytestmark = pytest.mark.usefixtures("quick_compile")


@dataclasses.dataclass(frozen=True)
class Indented:
    """A task for the bundled pair: write spaces."""

    prompt: str

    def reward(self, answer):
        return answer.count(" ") / max(1, len(answer))


class Never(jspec.online.DraftLengthController):
    """A controller that never drafts."""

    def __init__(self):
        super().__init__((0,))


class Always(jspec.online.DraftLengthController):
    """A controller that drafts in every step."""

    def __init__(self):
        super().__init__((2,))


@pytest.fixture(scope="module")
def pair():
    return jspec.demo_pair(packed=False)


def test_grpo_learns_and_drafts_change_nothing(pair, monkeypatch, report):
    """The rewards of a run with drafts in every step are those of a run without drafts."""
    _, policy, tokenizer = pair
    questions, rows = [Indented("def main():\n"), Indented("class Node:\n")], {}
    for controller in (Never, Always):
        monkeypatch.setattr(jspec.online, "DraftLengthController", controller)
        copy = jax.tree.map(lambda leaf: leaf.copy(), policy)
        rows[controller] = list(grpo.train(copy, tokenizer, questions, 8))
    plain, drafted = rows.values()
    rewards = np.array([[row["reward"] for row in run] for run in (plain, drafted)])
    accepted = [float(row["accepted"]) for row in drafted]
    report(rewards=f"{rewards[0, 0]:.2f} to {rewards[0, -1]:.2f}", accepted=f"{np.mean(accepted):.2f}")
    np.testing.assert_allclose(rewards[0], rewards[1], atol=1e-6)
    assert [row["answer"] for row in plain] == [row["answer"] for row in drafted]
    assert {row["k"] for row in plain} == {0} and {row["k"] for row in drafted} == {2}
    assert np.mean(accepted[2:]) > 0.01


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (" 5, 6, 7, 8, 9, 10, 11, 12\n", 1),
        (" 5, 6, 7, 8", 0.5),
        (" 5, 6, 8, 9, 10, 11, 12, 13", 0.25),
        (" 5, 6, 7, 8, 9, 10, 11, 12, 13, 14", 0.8),
        ("", 0),
        (" five", 0),
    ],
)
def test_reward_is_the_share_of_correct_numbers(answer, reward):
    assert grpo.Question(3).reward(answer) == reward


def test_distillation_makes_a_better_draft(pair, report):
    teacher, _, tokenizer = pair
    student = jspec.demo_pair(packed=False)[1]
    student = jax.tree.map(lambda leaf: leaf * 0.9, student)
    before = distill.tokens_per_round(teacher, student, tokenizer)
    trained, losses = distill.train(teacher, student, tokenizer, distill.PROMPTS[:2], 10)
    after = distill.tokens_per_round(teacher, trained, tokenizer)
    report(kl=f"{losses[0]:.2f} to {losses[-1]:.2f}", tokens_per_round=f"{before:.2f} to {after:.2f}")
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    assert after > before
