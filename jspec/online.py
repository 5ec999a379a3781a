"""Drafters that learn while they serve: the texts of finished requests train the drafter for the next ones.

The method is that of Liu et al. 2023, "Online Speculative Decoding", section 3. The drafter does not change within a
request, so nothing that it learned from a text can decide how that text is verified. Every text has exactly the
target's distribution, if no text reuses the key of an earlier one. The lesson of a text depends on the noise of the
text's key, and must not meet that noise again.
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

    `pickle` saves and restores all of it, including the target and the texts that wait for a step.

    Attributes:
        drafter: the drafter for the next request; a new object after every step.
        scores: the `Score` of the drafter on every batch of texts, before it learned from that batch.

    Args:
        target: a `jspec.Llama`.
        drafter: a trainable drafter (`jspec.train_drafter`). The learner does not modify it.
        rate: learning rate.
        depth: how many consecutive tokens the drafter learns to draft.
        loss: a name of `jspec.training.losses.LOSSES`.
        batch: how many texts one step takes. A step runs as soon as this many texts wait.
        length: the longest text, in tokens. Longer texts are split into parts.

    Raises:
        TypeError: the drafter has nothing to learn.
        ValueError: an argument is out of range, or the drafter is for another target.
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
        """Create the training functions, which a pickle omits."""
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
        """Learn from finished requests.

        The target reads each text once, in one pass, and the drafter learns from the target's distributions. It learns
        nothing from a text in which the target's states are not finite.

        Args:
            prompts: the prompt's token ids for every row of `out`, without padding.
            out: the output of `speculative_generate` for these prompts.
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
        batch = side_by_side(rows, self._batch, self._length)  # of maximum width, so that there is one program
        self._state, score = self._training.scored_step(self._state, self._target, batch.tokens, batch.learned, None)
        self.scores.append(jax.device_get(score))
        learned = self._trainee.drafter(self._state["weights"])
        self.drafter = jax.tree.map(lambda leaf, dtype: jnp.array(leaf, dtype), learned, self._dtypes)
