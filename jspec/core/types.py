"""The types that all modules share, and the letters that denote their dimensions.

B rows (requests), P padded prompt length, N ``max_new_tokens``, K ``num_draft_tokens``, S tokens processed in one
forward pass, T cache slots, L slots for a text, V vocabulary size, E hidden size, H query heads, G key/value heads,
D head size, W noise block width, with ``W^2 >= V``.

In identifiers, "law" means a probability distribution over tokens. In formulas, p is the target's distribution and q
the draft's, as in Leviathan et al. 2023. In code they are ``target_probs`` and ``draft_probs``. Both are float32 and
include every sampling transform.
"""

import dataclasses
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import jax
import jax.export
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jspec.core.origins import ACCEPTED as ACCEPTED
from jspec.core.origins import BONUS as BONUS
from jspec.core.origins import CORRECTED as CORRECTED
from jspec.core.origins import NO_DRAFT as NO_DRAFT
from jspec.core.origins import PADDING as PADDING
from jspec.core.row_ops import write_rows
from jspec.core.tokenizer import Tokenizer
from jspec.core.transfers import explicit_transfers
from jspec.core.tree import DynamicTree, Tree

Class = TypeVar("Class", bound=type[Any])
# Any nesting of containers that JAX traverses, with arrays as leaves. Python's types cannot express it.
PyTree: TypeAlias = Any
# A JSON value that is only read. `float` includes int and bool.
Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | float | None


class Adapter:
    """A base class for adapters around callers' objects that do not derive from jspec's classes."""

    @property
    def original(self) -> object:
        """The object that the caller passed."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the caller's object has."""
        if name.startswith("__") or not vars(self):  # pickle and copy look for methods before there are any fields
            raise AttributeError(name)
        return getattr(self.original, name)


def passed(value: object) -> object:
    """Return the object that the caller passed: `value`, or the object that it adapts."""
    return value.original if isinstance(value, Adapter) else value


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1; got {value!r}.")


def check_counts(**values: object) -> None:
    """Raise ValueError unless all values are ints of at least 1."""
    for name, value in values.items():
        check_count(name, value)


def longer_by_padding(size: int, vocab_size: int) -> bool:
    """Return whether `size` looks like `vocab_size` padded for fast matrix products.

    Models whose vocabulary sizes differ only by padding share a tokenizer, and the padding rows are never used.
    """
    return vocab_size < size <= vocab_size + 512 and size % 64 == 0


def same_but_for_padding(size: int, other: int) -> bool:
    """Return whether two models' vocabulary sizes suggest that they share a tokenizer."""
    return size == other or longer_by_padding(size, other) or longer_by_padding(other, size)


def check_between(name: str, value: object, low: float, high: float) -> None:
    """Raise ValueError unless ``low < value <= high``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low < float(value) <= high:
        raise ValueError(f"{name} must be a number above {low} and at most {high}; got {value!r}.")


@dataclass_transform(frozen_default=True)
def pytree(cls: Class) -> Class:
    """Make `cls` a frozen dataclass and a JAX pytree whose fields are all children."""
    frozen = dataclasses.dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(frozen)]
    return jax.tree_util.register_dataclass(frozen, data_fields=names, meta_fields=[])


def exportable(cls: Class) -> Class:
    """Register a `pytree` class so that `jax.export` can serialise functions that take or return it."""
    name, nothing = f"jspec.{cls.__name__}", b""
    jax.export.register_pytree_node_serialization(
        cls, serialized_name=name, serialize_auxdata=lambda _: nothing, deserialize_auxdata=lambda _: ()
    )
    return cls


@pytree
class Draft:
    """Draft tokens, each paired with the distribution it was sampled from. Rules rely on these pairs being exact.

    Attributes:
        tokens: ``int32[B, K]``.
        probs: ``float32[B, K, V]``; ``tokens[:, k]`` was sampled from ``probs[:, k]``. A copied token has a one-hot
            distribution. An all-zero row marks a position without a draft, which is never accepted. In a tree, a node's
            distribution is conditioned on the nodes before it on its branch and on its earlier siblings. None if the
            only rule that may verify the draft needs no distributions; `valid` is then set instead.
        tree: the draft's tree of K nodes; None for a chain, in which each token follows the previous one.
        valid: ``bool[B, K]``, the positions that hold a draft token; None if `probs` marks them.
    """

    tokens: Array
    probs: Any  # an array, or None: each rule declares which of the two it needs
    tree: Tree | DynamicTree | None = None
    valid: Array | None = None

    @property
    def topology(self) -> Tree | DynamicTree:
        """The draft's `tree`; a chain is a tree with one branch."""
        return Tree.chain(self.tokens.shape[1]) if self.tree is None else self.tree

    @property
    def static_tree(self) -> Tree:
        """The draft's `topology`, for rules that verify static trees only."""
        assert isinstance(self.topology, Tree), "a dynamic tree would bias this rule; validation rejects it"
        return self.topology


@pytree
class Verdict:
    """An acceptance rule's decision about one round.

    Attributes:
        num_accepted: ``int32[B]`` in 0..K, the length of the accepted prefix of the draft.
        next_token: ``int32[B]``, the token after that prefix: a correction, or a bonus if all K were accepted.
        distortion: ``float32[B, K + 1]`` for a lossy rule: at each position, the total variation distance between the
            token's distribution and the target's. For a tree, it is an upper bound, either on that distance averaged
            over drafts (`Lenient`), or on the distance of the whole round (`Typical`). None for an exact rule.
        path: ``int32[B, max_depth]``, the accepted nodes of a tree by depth, followed by arbitrary values; None for a
            chain.
    """

    num_accepted: Array
    next_token: Array
    distortion: Array | None = None
    path: Array | None = None


@exportable
@pytree
class Stats:
    """Per-request statistics, counted over committed tokens.

    A round verifies its draft tokens up to and including the first rejected one. Later draft tokens do not count as
    verified. Neither do draft tokens after a committed EOS or past the request's limit.

    Attributes:
        rounds: ``int32[B]``, the number of target passes after the prompt.
        drafted: ``int32[B]``, the number of draft tokens that could still be committed when they were drafted, whether
            or not they were verified.
        accepted: ``int32[B]``, the number of draft tokens committed.
        accepted_at: ``int32[B, K]``, the number of rounds in which draft token k was committed.
        judged_at: ``int32[B, K]``, the number of rounds in which draft token k was verified.
        invalid: ``bool[B]``, whether the target's logits were NaN, +inf or all -inf. The row stopped at that point.
        distortion: ``float32[B]``. For a lossy rule, the total variation distance between the distribution that each
            token was sampled from and the target's, summed over the generated tokens. For a tree, it is an upper bound
            on that sum. It is 0 for an exact rule and NaN for a lossy rule that does not report it.
    """

    rounds: Array
    drafted: Array
    accepted: Array
    accepted_at: Array
    judged_at: Array
    invalid: Array
    distortion: Array

    @property
    def judged(self) -> Array:
        """The number of draft tokens that were verified, ``int32[B]``."""
        return self.judged_at.sum(-1, dtype="int32")

    @property
    def acceptance_rate(self) -> Array:
        """The fraction of verified draft tokens that were accepted, ``float32[B]``: alpha in Leviathan et al. 2023.

        It is NaN if no draft token was verified.
        """
        return _quotient(self.accepted, self.judged)

    @property
    def acceptance_rate_at(self) -> Array:
        """The acceptance rate of draft token k, ``float32[B, K]``, or NaN if it was never verified."""
        return _quotient(self.accepted_at, self.judged_at)

    @property
    def mean_acceptance_length(self) -> Array:
        """The mean number of accepted draft tokens per round, plus one for the token after them, ``float32[B]``.

        It is NaN if there were no rounds.
        """
        return _quotient(self.accepted + self.rounds, self.rounds)


def _quotient(part: Array, whole: Array) -> Array:
    """Return ``part / whole`` in float32, or NaN if `whole` is 0, as the same kind of array (NumPy or JAX)."""
    numpy = whole.__array_namespace__()
    with jax.debug_nans(False), explicit_transfers():  # NaN is a valid result here
        return numpy.where(whole > 0, part / numpy.maximum(whole, 1), numpy.nan).astype("float32")


@exportable
@pytree
class Record:
    """The draft tokens of R rounds, N per round, with the outcome of each.

    Attributes:
        tokens: ``int32[B, R, N]``.
        parents: ``int32[B, R, N]``, the node that each token follows, as in `jspec.Tree`; 0 is the token before the
            round.
        fates: ``int8[B, R, N]``: 0 no draft, 1 rejected or not verified, 2 accepted and therefore in the output.
        counts: ``int32[B, R]``, the number of tokens that the round committed; 0 after the last round.
    """

    tokens: Array
    parents: Array
    fates: Array
    counts: Array


@exportable
@pytree
class Output:
    """The result of `generate` and `speculative_generate`.

    Attributes:
        tokens: ``int32[B, N]``, the new tokens, followed by ``pad_id``.
        lengths: ``int32[B]``, the number of new tokens, including EOS.
        logprobs: ``float32[B, N]``, the natural log of each token's probability under the target's distribution after
            all transforms (temperature, top-k, ...); 0 after the end.
        raw_logprobs: ``float32[B, N]``, the log-softmax of the target's logits at each token, before any transform; 0
            after the end.
        origins: ``int8[B, N]``: 0 padding, 1 accepted draft token, 2 correction of a rejected draft token, 3 bonus
            after a fully accepted draft (or any token of plain decoding, whose drafts are empty), 4 no draft (one
            was requested, but the drafter had none).
        stats: per-request statistics. See `Stats`.
        record: all draft tokens if ``record=True`` was passed, else None.
        top_ids: ``int32[B, N, n]``, the n most likely tokens at the position of each new token, highest first;
            0 after the end. None unless ``top_logprobs=n`` was passed.
        top_logprobs: ``float32[B, N, n]``, their log-probabilities before any transform, as in `raw_logprobs`; 0 after
            the end. None unless ``top_logprobs=n`` was passed.
    """

    tokens: Array
    lengths: Array
    logprobs: Array
    raw_logprobs: Array
    origins: Array
    stats: Stats
    record: Record | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None

    def with_prompts(self, tokens: ArrayLike, lengths: ArrayLike) -> tuple[Array, Array]:
        """Return each row's prompt followed by its new tokens, and the total lengths, for `jspec.logprobs`.

        Args:
            tokens, lengths: the prompts, as passed to the call that returned this output. Do not repeat them for
                `samples_per_prompt`.

        Returns:
            The texts, ``int32[B, P + N]``, and their lengths, ``int32[B]``; one row for each row of this output.

        Raises:
            ValueError: the number of rows is not a multiple of the number of prompts.
        """
        rows, count = self.tokens.shape[0], jnp.shape(tokens)[0]
        if rows % count or jnp.shape(lengths) != (count,):
            raise ValueError(
                f"The output has {rows} rows, but there are {count} prompts and lengths of shape {jnp.shape(lengths)}; "
                "pass the prompts of the call that returned this output."
            )
        prompts, starts = (
            jnp.repeat(jnp.asarray(part).astype(self.tokens.dtype), rows // count, axis=0) for part in (tokens, lengths)
        )
        texts = write_rows(jnp.pad(prompts, ((0, 0), (0, self.tokens.shape[1]))), self.tokens, starts)
        return texts, starts + self.lengths

    def show(self, tokenizer: Tokenizer, row: int = 0) -> None:
        """Print one request's rounds, with each token coloured by its origin. In a notebook, the output is HTML.

        If ``record=True`` was passed, rejected draft tokens are also shown, as in Figure 1 of Leviathan et al. 2023.

        Args:
            tokenizer: a transformers tokenizer.
            row: the index of the request.

        Raises:
            IndexError: there is no such row.
        """
        from rich.console import Console  # imported here, so that decoding does not load it

        from jspec.core.round_display import legend, picture

        if not 0 <= row < len(self.lengths):
            raise IndexError(f"row={row} is out of range for {len(self.lengths)} requests; count from 0.")
        mine: Output = jax.device_get(jax.tree.map(operator.itemgetter(row), self))
        tokens, origins = (part[: mine.lengths].tolist() for part in (mine.tokens, mine.origins))
        screen = Console(highlight=False)
        screen.print(legend(self.record is not None), picture(tokenizer, tokens, origins, mine.record), sep="\n")
