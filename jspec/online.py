# pyright: reportUnknownArgumentType=false
"""Online learning: between requests, a drafter trains on the output of finished ones.

The method follows Liu et al. 2023, "Online Speculative Decoding", section 3. The drafter does not change during a
request, so nothing that it learns from an output can affect how that output is verified. Every output has exactly the
target's distribution, provided that no request reuses an earlier request's key. What the drafter learns from an output
depends on the noise derived from the output's key, so no later request may use that noise.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspec.core.transfers import explicit_transfers
from jspec.core.types import Output, check_count
from jspec.decoding.validate_arguments import check_target
from jspec.models.llama import Llama
from jspec.training.batches import side_by_side
from jspec.training.dataset import Row, of_answer, parts
from jspec.training.fit import Schedule, begin
from jspec.training.kinds import Trainable, check_fits, trainee_of, unpacked
from jspec.training.losses import LOSSES
from jspec.training.objective import Score


class Learner:
    """A drafter together with its training state.

    `pickle` saves and restores everything, including the target and the sequences waiting for a training step.

    Attributes:
        drafter: the drafter for the next request. Every step replaces it with a new object.
        scores: the drafter's `Score` on each batch, measured before the drafter learned from that batch.

    Args:
        target: a `jspec.Llama`.
        drafter: a trainable drafter (`jspec.train_drafter`). The learner does not modify it.
        rate: learning rate.
        depth: the number of consecutive tokens that the drafter learns to draft.
        loss: the name of a loss in `jspec.training.losses.LOSSES`.
        batch: the number of sequences per training step. A step runs as soon as this many are waiting.
        length: the maximum sequence length, in tokens. Longer sequences are split.

    Raises:
        TypeError: the drafter is not trainable.
        ValueError: an argument is out of range, or the drafter does not fit the target.
    """

    def __init__(
        self,
        target: Llama,
        drafter: Trainable,
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
        drafter = unpacked(drafter)
        self.drafter, self.scores = drafter, list[Score]()
        self._target, self._schedule = target, Schedule(None, depth, loss, rate)
        self._prepare()
        check_fits(drafter, target, depth)
        self._state = jax.tree.map(jnp.copy, self._training.state)
        self._batch, self._length, self._waiting = batch, length, list[Row]()

    def _prepare(self) -> None:
        """Create the training functions, which are not pickled."""
        self._trainee = trainee_of(self.drafter)
        self._dtypes = jax.tree.map(lambda leaf: leaf.dtype, self.drafter)
        self._training = begin(self._trainee, self._schedule)

    def __getstate__(self) -> dict[str, object]:
        made = ("_trainee", "_dtypes", "_training")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._prepare()

    def learn(self, prompts: Sequence[Sequence[int]], out: Output) -> None:
        """Learn from finished requests.

        The target processes each sequence once, in a single forward pass, and the drafter learns from the target's
        distributions. The drafter learns nothing from a sequence in which the target's hidden states are not finite.

        Args:
            prompts: the prompt's token ids for each row of `out`, without padding.
            out: the output of `speculative_generate` for these prompts.
        """
        tokens, lengths = jax.device_get((out.tokens, out.lengths))
        if len(prompts) != len(tokens):
            raise ValueError(
                f"There are {len(prompts)} prompts but {len(tokens)} outputs; pass one prompt for each output."
            )
        for prompt, row, size in zip(prompts, tokens, lengths, strict=True):
            self._waiting += parts(of_answer(prompt, row[:size].tolist()), self._length)
        while len(self._waiting) >= self._batch:
            ready, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
            self._step(ready)

    @explicit_transfers()
    def _step(self, rows: list[Row]) -> None:
        batch = side_by_side(rows, self._batch, self._length)  # pad to full width, so that only one program compiles
        self._state, score = self._training.scored_step(self._state, self._target, batch.tokens, batch.learned, None)
        self.scores.append(jax.device_get(score))
        learned = self._trainee.drafter(self._state["weights"])
        self.drafter = jax.tree.map(lambda leaf, dtype: jnp.array(leaf, dtype), learned, self._dtypes)
