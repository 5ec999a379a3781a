# pyright: reportUnknownArgumentType=false
"""Drafters that learn from finished requests, and a controller that stops drafting when it costs time.

`Learner` trains a drafter as in Liu et al. 2023, "Online Speculative Decoding", section 3. `Retrieval` drafts from the
latest outputs. A drafter does not change during a
request, so nothing that it learns from an output can affect how that output is verified. Every output has exactly the
target's distribution, provided that no request reuses an earlier request's key. What the drafter learns from an output
depends on the noise derived from the output's key, so no later request may use that noise. (Under the "coupled" rule,
drafting causes no bias, because the output equals that of plain decoding with the same key.)
"""

import numbers
from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.transfers import explicit_transfers
from jspec.core.types import Output, PyTree, check_count
from jspec.decoding.validate_arguments import check_target
from jspec.drafters.standalone.retrieval import RetrievalDrafter
from jspec.engine.length_policy import LengthPolicy
from jspec.models.llama import Llama
from jspec.training.batches import side_by_side
from jspec.training.dataset import Row, of_answer, parts
from jspec.training.fit import Schedule, begin
from jspec.training.kinds import Trainable, check_fits, trainee_of, unpacked
from jspec.training.losses import LOSSES
from jspec.training.objective import Score

_RECENT_CALLS = 9  # recent calls whose median time estimates the cost of a draft length


class Learner:
    """A drafter together with its training state.

    `pickle` saves and restores everything, including the target and the sequences waiting for a training step.

    Attributes:
        drafter: the drafter for the next request. Every step replaces it with a new object of the same shapes.
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

    @property
    def state(self) -> PyTree:
        """The drafter's weights and the optimiser's state, as a pytree of arrays that Orbax can save.

        Assign a restored state to replace both, and `drafter`. Sequences that wait for a training step are not part of
        the state.

        Raises, when it is assigned:
            ValueError: the state does not have the structure, shapes and dtypes of this learner's.
        """
        return jax.tree.map(jnp.copy, self._state)  # every step donates its own arrays

    @state.setter
    def state(self, state: PyTree) -> None:
        if jax.tree.structure(state) != jax.tree.structure(self._state) or _shapes(state) != _shapes(self._state):
            raise ValueError("The state does not fit this Learner; use one from a Learner with the same arguments.")
        self._state = jax.tree.map(jnp.copy, state)
        self._replace_drafter()

    def learn(self, prompts: Sequence[Sequence[int]], out: Output, target: Llama | None = None) -> None:
        """Learn from finished requests.

        The target processes each sequence once, in a single forward pass, and the drafter learns from the target's
        distributions. The drafter learns nothing from a sequence in which the target's hidden states are not finite.

        Args:
            prompts: the prompt's token ids for each row of `out`, without padding.
            out: the output of `speculative_generate` for these prompts.
            target: the target with new weights, if it is being trained. The learner keeps a reference to it until the
                next call, so do not donate its arrays before then.

        Raises:
            ValueError: the numbers of prompts and outputs differ, or `target` has other shapes than before.
        """
        if target is not None:
            self._replace_target(target)
        for prompt, answer in _texts(prompts, out):
            self._waiting += parts(of_answer(prompt, answer), self._length)
        while len(self._waiting) >= self._batch:
            ready, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
            self._step(ready)

    @explicit_transfers()
    def _step(self, rows: list[Row]) -> None:
        batch = side_by_side(rows, self._batch, self._length)  # pad to full width, so that only one program compiles
        self._state, score = self._training.scored_step(self._state, self._target, batch.tokens, batch.learned, None)
        self.scores.append(jax.device_get(score))
        self._replace_drafter()

    def _replace_drafter(self) -> None:
        learned = self._trainee.drafter(self._state["weights"])
        self.drafter = jax.tree.map(lambda leaf, dtype: jnp.array(leaf, dtype), learned, self._dtypes)

    def _replace_target(self, target: Llama) -> None:
        check_target(target)
        if _shapes(target) != _shapes(self._target):
            raise ValueError("The target has other shapes or dtypes than before; create a new Learner.")
        self._target = target


class Retrieval:
    """A `jspec.RetrievalDrafter` over the latest prompts and their outputs.

    This drafter suits programs that generate many outputs of the same prompts, such as the roll-outs of reinforcement
    learning. It costs next to nothing, and it follows a target that changes.

    Attributes:
        drafter: the drafter for the next request. `learn` replaces it with a new object of the same shapes.

    Args:
        target: a `jspec.Llama`.
        size: the number of tokens to keep.
        max_ngram, min_ngram, num_matches: same as in `jspec.RetrievalDrafter`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, target: Llama, size: int = 16_384, *, max_ngram: int = 8, min_ngram: int = 2, num_matches: int = 16
    ):
        check_target(target)
        check_count("size", size)
        self._options = {
            "vocab_size": target.config.vocab_size,
            "max_ngram": max_ngram,
            "min_ngram": min_ngram,
            "num_matches": num_matches,
        }
        self._tokens = np.full(size, _separator(target), np.int32)
        self._separator = self._tokens[:1]
        self.drafter = RetrievalDrafter.from_tokens(self._tokens, **self._options)

    def learn(self, prompts: Sequence[Sequence[int]], out: Output) -> None:
        """Add finished requests to the corpus, and drop the oldest tokens.

        Args:
            prompts, out: same as in `Learner.learn`.

        Raises:
            ValueError: the numbers of prompts and outputs differ.
        """
        texts = [[*prompt, *answer] for prompt, answer in _texts(prompts, out)]
        joined = np.concatenate([self._tokens, *(part for text in texts for part in (text, self._separator))])
        tokens = joined[-self._tokens.size :].astype(np.int32)
        self.drafter = RetrievalDrafter.from_tokens(tokens, **self._options)
        self._tokens = tokens


class DraftLengthController:
    """A controller that chooses the draft length of each call, and stops drafting when it costs time.

    It suits many similar calls. It measures the seconds per round of every length, and how often each draft position is
    accepted. Old measurements decay, so the choice follows a target and a drafter that change. Occasionally, it tries a
    neighbouring length for a few calls. Its choices depend on past calls only, so the output distribution stays the
    same.

    Attributes:
        num_draft_tokens: the draft length of the next call. 0 stands for plain decoding: call `jspec.generate`.

    Args:
        lengths: the draft lengths to choose from. 0 stands for plain decoding. Each length needs a program of its own.

    Raises:
        ValueError: `lengths` is empty, or holds a value that is not an int of at least 0.
    """

    def __init__(self, lengths: Sequence[int] = (0, 2, 4)):
        wrong = [k for k in lengths if isinstance(k, bool) or not isinstance(k, numbers.Integral) or k < 0]
        if wrong or not lengths:
            raise ValueError(f"lengths must contain at least one int, each at least 0; got {lengths!r}.")
        self._lengths = sorted(set(lengths))
        self._policy = LengthPolicy(max(1, *self._lengths))
        self._seconds = {k: deque[float](maxlen=_RECENT_CALLS) for k in self._lengths}
        self._compiled = set[int]()
        self.num_draft_tokens = self._lengths[0]

    def record(self, out: Output, seconds: float) -> None:
        """Record a call with `num_draft_tokens`, and choose the length of the next call.

        Args:
            out: the output of `jspec.speculative_generate` with `num_draft_tokens`, or that of `jspec.generate` if this
                number is 0.
            seconds: the time that the call took until its result was ready. For each length, the time of the first call
                does not count, because it includes compilation.

        Raises:
            ValueError: the output has another number of draft tokens.
        """
        k, stats = self.num_draft_tokens, jax.device_get(out.stats)
        if stats.judged_at.shape[1] != k:
            raise ValueError(
                f"The output has {stats.judged_at.shape[1]} draft tokens per round, but num_draft_tokens is {k}; "
                "record each call before the next one."
            )
        reached, accepted = (
            np.pad(part.sum(0), (0, self._policy.max_draft_tokens - k)) for part in (stats.judged_at, stats.accepted_at)
        )
        self._policy.record_counts(reached, accepted)
        if k in self._compiled:
            self._seconds[k].append(seconds / max(1, int(stats.rounds.max())))
        self._compiled.add(k)
        costs = {k: float(np.median(taken)) for k, taken in self._seconds.items() if taken}
        self.num_draft_tokens = self._policy.next(self._lengths, costs, ())


def _texts(prompts: Sequence[Sequence[int]], out: Output) -> list[tuple[list[int], list[int]]]:
    """Return each row's prompt and new tokens.

    Raises:
        ValueError: the numbers of prompts and outputs differ.
    """
    tokens, lengths = jax.device_get((out.tokens, out.lengths))
    if len(prompts) != len(tokens):
        raise ValueError(
            f"There are {len(prompts)} prompts but {len(tokens)} outputs; pass one prompt for each output."
        )
    return [(list(prompt), row[:size].tolist()) for prompt, row, size in zip(prompts, tokens, lengths, strict=True)]


def _shapes(tree: PyTree) -> list[tuple[tuple[int, ...], object]]:
    """Return the shape and dtype of every array in `tree`."""
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


def _separator(target: Llama) -> int:
    """Return a token to put between documents: the target's EOS id, or 0."""
    return next(iter(target.config.eos_token_ids or ()), 0)
