# pyright: strict, reportUnknownMemberType=false
"""The nouns every file shares, and the alphabet of their shapes.

B rows (requests), P padded prompt length, N ``max_new_tokens``, K ``num_draft_tokens``, S tokens read in one forward
pass, T cache slots, L slots for a text, V vocabulary, E hidden size, H query heads, G key/value heads, D head size;
W of a block of noise, with ``W^2 >= V``.

A law is a probability distribution over tokens. In formulas p is the target's and q the draft's, as in Leviathan et
al. 2023; in code they are ``target_probs`` and ``draft_probs``. Both are taken *after* every sampling transform, in
float32.
"""

import dataclasses
import numbers
import operator
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.export
from jax import Array

from jspec.core.origins import ACCEPTED as ACCEPTED
from jspec.core.origins import BONUS as BONUS
from jspec.core.origins import CORRECTED as CORRECTED
from jspec.core.origins import NO_DRAFT as NO_DRAFT
from jspec.core.origins import PADDING as PADDING
from jspec.core.transfers import explicit_transfers
from jspec.core.tree import DynamicTree, Tree

Class = TypeVar("Class", bound=type[Any])


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1; got {value!r}.")


def longer_by_padding(size: int, vocab_size: int) -> bool:
    """Whether a model's vocabulary of `size` looks like one of `vocab_size` tokens with rows added for fast products.

    Such models share a tokenizer, and the rows behind its tokens are never meant.
    """
    return vocab_size < size <= vocab_size + 512 and size % 64 == 0


def same_but_for_padding(size: int, other: int) -> bool:
    """Whether two models, by the sizes of their vocabularies, look as if they shared a tokenizer."""
    return size == other or longer_by_padding(size, other) or longer_by_padding(other, size)


def check_between(name: str, value: Any, low: float, high: float) -> None:
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
    """Let `jax.export` serialise functions that take or return a `pytree` of this class."""
    name, nothing = f"jspec.{cls.__name__}", b""
    jax.export.register_pytree_node_serialization(
        cls, serialized_name=name, serialize_auxdata=lambda _: nothing, deserialize_auxdata=lambda _: ()
    )
    return cls


@pytree
class Draft:
    """Guessed tokens, each beside the law it was drawn from. The pairing is what makes a rule exact.

    Attributes:
        tokens: ``int32[B, K]``.
        probs: ``float32[B, K, V]``; ``tokens[:, k]`` was drawn from ``probs[:, k]``. A copied token has a one-hot law.
            An all-zero row says "no guess": it is never accepted. In a tree it is the law of a node given the nodes
            before it on its branch and its elder siblings. None, with `valid` in its place, where the only rule that
            may judge the draft asks for no law.
        tree: which token follows which, K nodes; None for a chain, where each follows the one before.
        valid: ``bool[B, K]``, which tokens are guesses; None where `probs` says so.
    """

    tokens: Array
    probs: Any
    tree: Tree | DynamicTree | None = None
    valid: Array | None = None

    @property
    def topology(self) -> Tree | DynamicTree:
        """`tree`, of a chain too."""
        return Tree.chain(self.tokens.shape[1]) if self.tree is None else self.tree

    @property
    def static_tree(self) -> Tree:
        """`topology`, for a rule that judges no other."""
        assert isinstance(self.topology, Tree), "a dynamic tree would bias this rule, which is refused beforehand"
        return self.topology


@pytree
class Verdict:
    """What an acceptance rule says of one round.

    Attributes:
        num_accepted: ``int32[B]`` in 0..K, the length of the accepted prefix of the draft.
        next_token: ``int32[B]``, the token that follows it: a correction, or a bonus when all K were accepted.
        distortion: ``float32[B, K + 1]`` of a lossy rule: the total variation distance between the law of the token
            that a position got and the target's; of a tree a bound of it, on average over drafts (`Lenient`), or of
            that of the round (`Typical`). None for an exact rule.
        path: ``int32[B, max_depth]``, the accepted nodes of a tree by their depths, then any; None for a chain.
    """

    num_accepted: Array
    next_token: Array
    distortion: Array | None = None
    path: Array | None = None


@exportable
@pytree
class Stats:
    """What happened, per request; counted over tokens that were committed.

    Of the drafts of a round those up to and including the first that is refused are judged; what comes after that is
    not, nor what comes after a committed end of text or past the request's limit.

    Attributes:
        rounds: ``int32[B]``, passes of the target after the prompt.
        drafted: ``int32[B]``, draft tokens that could still be committed when they were drafted, judged or not.
        accepted: ``int32[B]``, draft tokens committed.
        accepted_at: ``int32[B, K]``, rounds in which draft k was committed.
        judged_at: ``int32[B, K]``, rounds in which draft k was judged.
        invalid: ``bool[B]``, the target's logits were NaN, +inf or all -inf; the row stopped there.
        distortion: ``float32[B]``, the receipt of a lossy rule: the total variation distance between the law each token
            was drawn from and the target's, summed over the text; with a tree a bound of it. 0 for an exact rule, NaN
            for a lossy one that does not report it.
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
        """``int32[B]``, draft tokens that were judged."""
        return self.judged_at.sum(-1, dtype="int32")

    @property
    def acceptance_rate(self) -> Array:
        """``float32[B]``, accepted over judged drafts: alpha of Leviathan et al. 2023. NaN where none was judged."""
        return _quotient(self.accepted, self.judged)

    @property
    def acceptance_rate_at(self) -> Array:
        """``float32[B, K]``, how often draft k was accepted when it was judged. NaN where it never was."""
        return _quotient(self.accepted_at, self.judged_at)

    @property
    def mean_acceptance_length(self) -> Array:
        """``float32[B]``, accepted drafts a round, and one for the token that follows them. NaN without a round."""
        return _quotient(self.accepted + self.rounds, self.rounds)


def _quotient(part: Any, whole: Any) -> Any:
    """Return ``part / whole`` in float32, NaN where `whole` is 0; NumPy of NumPy, JAX of JAX."""
    numpy = whole.__array_namespace__()
    with jax.debug_nans(False), explicit_transfers():  # here NaN is an answer
        return numpy.where(whole > 0, part / numpy.maximum(whole, 1), numpy.nan).astype("float32")


@exportable
@pytree
class Record:
    """What was guessed in each of R rounds, N guesses a round, and what became of it; shapes are those of all rounds.

    Attributes:
        tokens: ``int32[B, R, N]``.
        parents: ``int32[B, R, N]``, which guess each follows, as in `jspec.Tree`; 0 is the token before the round.
        fates: ``int8[B, R, N]``, 0 no guess, 1 refused or not judged, 2 kept: it is in the text.
        counts: ``int32[B, R]``, how many tokens the round has written; 0 behind the last round.
    """

    tokens: Array
    parents: Array
    fates: Array
    counts: Array


@exportable
@pytree
class Output:
    """What `generate` and `speculative_generate` return.

    Attributes:
        tokens: ``int32[B, N]``, the new tokens, ``pad_id`` after the end.
        lengths: ``int32[B]``, how many of them there are (the end-of-text token counts).
        logprobs: ``float32[B, N]``, natural log of the target's probability of each token under the law it was
            sampled from (after temperature, top-k, ...); 0 after the end.
        raw_logprobs: ``float32[B, N]``, log-softmax of the target's own logits at each token, before any transform; 0
            after the end.
        origins: ``int8[B, N]``, 0 padding, 1 accepted draft, 2 correction of a refused one, 3 bonus after a draft that
            was kept whole (so is every token of plain decoding, whose drafts are empty), 4 no draft: one was asked for
            and there was no guess.
        stats: counts, see `Stats`.
        record: all guesses, with ``record=True``; else None.
    """

    tokens: Array
    lengths: Array
    logprobs: Array
    raw_logprobs: Array
    origins: Array
    stats: Stats
    record: Record | None = None

    def show(self, tokenizer: Any, row: int = 0) -> None:
        """Print one request's rounds, in colours that say where every token came from; in a notebook as HTML.

        Of a generation with ``record=True`` with the guesses that were refused, too: Figure 1 of Leviathan et al. 2023.

        Args:
            tokenizer: a tokenizer of transformers.
            row: which request.

        Raises:
            IndexError: there is no such row.
        """
        from rich.console import Console  # whoever decodes only need not wait for it

        from jspec.core.round_display import legend, picture

        if not 0 <= row < len(self.lengths):
            raise IndexError(f"row={row} is none of the {len(self.lengths)} requests; count from 0.")
        mine: Output = jax.device_get(jax.tree.map(operator.itemgetter(row), self))
        tokens, origins = (part[: mine.lengths].tolist() for part in (mine.tokens, mine.origins))
        screen = Console(highlight=False)
        screen.print(legend(self.record is not None), picture(tokenizer, tokens, origins, mine.record), sep="\n")
