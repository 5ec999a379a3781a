"""Drafters that learn while they serve: what requests turned out to say is what the next ones are guessed from.

Liu et al. 2023, "Online Speculative Decoding", section 3. Within a request the drafter stays as it is, so that nothing
it has learned from a text can decide how that text is judged: every text has exactly the target's law, if no text has a
key of an earlier one. What was learned from a text depends on the noise of its key, and must not meet that noise again.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.transfers import explicit_transfers
from jspec.core.types import Output, check_count
from jspec.decoding.validate_arguments import check_target
from jspec.training.batches import side_by_side
from jspec.training.dataset import Row, of_answer, parts
from jspec.training.fit import Schedule, begin
from jspec.training.kinds import check_fits, trainee_of
from jspec.training.losses import LOSSES
from jspec.training.objective import Score


class Learner:
    """A drafter and what it has learned so far.

    `pickle` saves and restores all of it, the target and the texts that wait for a step included.

    Attributes:
        drafter: for the next request; a new object after every step.
        scores: the `Score` of every batch of texts by the drafter as it was before it learned from them.

    Args:
        target: a `jspec.Llama`.
        drafter: one that can be trained (`jspec.train_drafter`); it stays as it is.
        rate: learning rate.
        depth: tokens in a row that it learns to draft.
        loss: a name of `jspec.training.losses.LOSSES`.
        batch: texts of one step; a step is made as soon as so many have been told.
        length: the longest text, in tokens; longer ones are learned from in parts.

    Raises:
        TypeError: the drafter has nothing to learn.
        ValueError: an argument is out of range, or the drafter is one for another target.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any,
        *,
        rate: float = 1e-3,
        depth: int = 4,
        loss: str = "lk",
        batch: int = 8,
        length: int = 512,
    ):
        check_target(target)
        for name, value in (("depth", depth), ("batch", batch), ("length", length)):
            check_count(name, value)
        if loss not in LOSSES:
            raise ValueError(f"loss is {loss!r}; expected one of {', '.join(LOSSES)}.")
        self.drafter, self.scores = drafter, list[Score]()
        self._target, self._schedule = target, Schedule(None, depth, loss, rate)
        self._prepare()
        check_fits(drafter, target, depth)
        self._state = jax.tree.map(jnp.copy, self._training.state)
        self._batch, self._length, self._waiting = batch, length, list[Row]()

    def _prepare(self) -> None:
        """Make the functions that train, which a pickle leaves out."""
        self._trainee = trainee_of(self.drafter)
        self._dtypes = jax.tree.map(lambda leaf: leaf.dtype, self.drafter)
        self._training = begin(self._trainee, self._schedule)

    def __getstate__(self) -> dict[str, Any]:
        made = ("_trainee", "_dtypes", "_training")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def learn(self, prompts: Sequence[Sequence[int]], out: Output) -> None:
        """Learn from finished requests: the target reads each text once, in one pass, and its laws are the lesson.

        From a text in which the target's states are not finite nothing is learned.

        Args:
            prompts: token ids of every row of `out`, without padding.
            out: what `speculative_generate` returned for them.
        """
        tokens, lengths = jax.device_get((out.tokens, out.lengths))
        if len(prompts) != len(tokens):
            raise ValueError(f"There are {len(prompts)} prompts and {len(tokens)} texts; give the prompt of each.")
        for prompt, row, size in zip(prompts, tokens, lengths, strict=True):
            self._waiting += parts(of_answer(prompt, row[:size].tolist()), self._length)
        while len(self._waiting) >= self._batch:
            ready, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
            self._step(ready)

    @explicit_transfers()
    def _step(self, rows: list[Row]) -> None:
        batch = side_by_side(rows, self._batch, self._length)  # as wide as texts may be: one program
        self._state, score = self._training.scored_step(self._state, self._target, batch.tokens, batch.learned, None)
        self.scores.append(jax.device_get(score))
        learned = self._trainee.drafter(self._state["weights"])
        self.drafter = jax.tree.map(lambda leaf, dtype: jnp.array(leaf, dtype), learned, self._dtypes)
