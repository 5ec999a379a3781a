"""`complete`: prompts to texts in one call; and what became of each prompt."""

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jspec import theory
from jspec.core.detokenizer import pieces
from jspec.core.sampling import SamplingParams
from jspec.core.transfers import explicit_transfers
from jspec.core.types import BONUS, NO_DRAFT, Output, check_count
from jspec.decoding.validate_arguments import as_array, check_positions, check_target
from jspec.drafters import FallbackDrafter, NGramDrafter, RetrievalDrafter
from jspec.drafters.base import own_tree
from jspec.drafters.capabilities import reach_of, says_how_sure
from jspec.drafters.draft_length import DEFAULT, UpTo, WhileConfident
from jspec.drafters.standalone.model import as_drafter, positions
from jspec.generation.generate import generate, speculative_generate
from jspec.models.sampling_defaults import recommended
from jspec.text import eos_ids, request_keys
from jspec.text.chat_template import Batch, Prompt, encode, listed, room

_DRAFTED = 4  # tokens a round, unless told otherwise
_Lookup = NGramDrafter | RetrievalDrafter
_SURE = 0.6  # what pays where a row of verification costs time, on CPUs (bench/NOTES.md)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One prompt and its continuation or answer.

    Attributes:
        prompt: as it was given.
        pieces: the text each new token added.
        tokens: the new tokens; this and the next two are as in `jspec.Output`, without the padding.
        logprobs: of each, under the law it was sampled from.
        origins: where each came from.
        finish_reason: "eos"; "stop", at a string or special token of `stop`; or "length"; None where it goes on.
        stats: see `statistics`.
    """

    prompt: Any
    pieces: list[str]
    tokens: list[int]
    logprobs: list[float]
    origins: list[int]
    finish_reason: str | None
    stats: dict[str, Any]

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(self.pieces)


@dataclasses.dataclass(frozen=True)
class Task:
    """Prompts as one batch, and the strings and special tokens that end their texts; nothing is decoded yet."""

    prompts: list[Prompt]
    batch: Batch
    tokenizer: Any
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of the first prompt."""
        return tuple(self.batch.tokens[0, : self.batch.lengths[0]].tolist())

    def ends(self, target: Any) -> tuple[int, ...]:
        """The ids that end a text."""
        possible = {i for i in self.stop_ids if i < target.config.vocab_size}
        return tuple(sorted({*eos_ids(target, self.tokenizer), *possible}))

    def check_length(self, target: Any, draft: Any, max_new_tokens: int) -> None:
        """Raise ValueError if a prompt and `max_new_tokens` more are too long for a model."""
        drafter = None if draft is None else as_drafter(draft)
        check_positions(target, drafter, self.batch.lengths, max_new_tokens, np.zeros(1, np.int32))

    def decode(
        self, target: Any, draft: Any, max_new_tokens: int, sampling: SamplingParams | None, seed: int, **options: Any
    ) -> Output:
        """`jspec.speculative_generate`, or `jspec.generate` if `draft` is None; `options` are those of the function.

        Without `sampling` the parameters that the target recommends are used.
        Request i has a key of `seed` and i. Sizes are rounded up, so that another `max_new_tokens` seldom compiles.
        """
        check_target(target)
        check_count("max_new_tokens", max_new_tokens)
        size = room(max_new_tokens, self.batch, positions(target, draft))
        sampling = recommended(target) if sampling is None else sampling
        sampling = self._limited(sampling, min(max_new_tokens, 2**31 - 1))
        options |= {"max_new_tokens": size, "sampling": sampling, "eos_ids": self.ends(target)}
        with explicit_transfers():
            request = self.batch.tokens, self.batch.lengths, request_keys(seed, len(self.prompts))
            if draft is None:
                return generate(target, *request, **options)
            return speculative_generate(target, draft, *request, **options)

    def _limited(self, sampling: SamplingParams, most: int) -> SamplingParams:
        """`sampling` with limits of at most `most` tokens; what is no such thing stays, for the function to refuse."""
        wanted = as_array("max_tokens", getattr(sampling, "max_tokens", None))
        if not isinstance(sampling, SamplingParams) or np.asarray(wanted).dtype.kind not in "iuf":
            return sampling
        limits = np.where(np.equal(wanted, 0), most, np.minimum(wanted, most))
        limits = limits if limits.ndim else np.full(len(self.prompts), limits)  # one program for both
        return dataclasses.replace(sampling, max_tokens=limits)

    def completions(self, target: Any, out: Output) -> list[Completion]:
        """What `out`, decoded by `target`, says of each prompt.

        Raises:
            ValueError: the target's logits were not finite.
        """
        out = jax.device_get(out)
        if out.stats.invalid.any():
            raise ValueError("The target's logits are not finite: its weights are damaged, or too large for the dtype.")
        return [self._completion(target, out, row) for row in range(len(self.prompts))]

    def reason(self, target: Any, stopped: Any, last: int) -> str:
        """Why a text ended whose last token is `last`; `stopped` is None where no string of `stop` did it."""
        if stopped is not None:
            return "stop"
        return "eos" if last in eos_ids(target, self.tokenizer) else "stop" if last in self.stop_ids else "length"

    def _completion(self, target: Any, out: Output, row: int) -> Completion:
        new = slice(int(out.lengths[row]))
        ids, tokens = self.batch.tokens[row, : self.batch.lengths[row]].tolist(), out.tokens[row, new].tolist()
        added = pieces(self.tokenizer, ids, tokens)
        kept = until(added, self.stop)
        added, reason = added if kept is None else kept, self.reason(target, kept, tokens[-1])
        return Completion(
            prompt=self.prompts[row],
            pieces=added,
            tokens=tokens[: len(added)],
            logprobs=out.logprobs[row, : len(added)].tolist(),
            origins=out.origins[row, : len(added)].tolist(),
            finish_reason=reason,
            stats=statistics(
                int(out.stats.rounds[row]),
                int(out.stats.drafted[row]),
                int(out.stats.judged[row]),
                int(out.stats.accepted[row]),
                out.stats.accepted_at[row].tolist(),
                out.origins[row, new].tolist(),
            ),
        )


def complete(
    target: Any,
    draft: Any,
    tokenizer: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 128,
    num_draft_tokens: Any = None,
    sampling: SamplingParams | None = None,
    accept: Any = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    template: Mapping[str, Any] | None = None,
) -> list[Completion]:
    """Continue texts, and answer conversations, all as one batch.

    Texts end with the end-of-text tokens of the model and the tokenizer, those of generation_config.json included.

    Args:
        target, accept: as for `jspec.speculative_generate`.
        draft: as there; None decodes without one.
        tokenizer: of the target, as `jspec.pretrained` or transformers give it.
        prompts: one, or a list of them: texts, lists of token ids, or conversations, lists of messages such as
            ``{"role": "user", "content": "Hello"}``, which the tokenizer's chat template makes one text of.
        max_new_tokens: limit for each prompt.
        num_draft_tokens: as there; by default 4. By lookup and retrieval at most so many; and behind them, by default,
            while a drafter is sure (`jspec.WhileConfident`), which is what pays on CPUs.
        sampling: as there; it replaces all defaults of the model. By default the parameters that the target recommends
            in its generation_config.json, and those of `SamplingParams()` for fields that it does not name.
        seed: request i has a key of `seed` and i.
        stop: one or several strings before which a text ends. Tokens up to the one that completes a string are kept,
            and decoding goes on behind it, which `Completion.stats` counts. One that is a special token, such as
            "<|im_end|>", ends decoding as the model's own do.
        template: variables of the chat template for every conversation, such as ``{"enable_thinking": False}``. The
            template ignores names that it does not use.

    Returns:
        For each prompt, its `Completion`.

    Raises:
        ValueError: a prompt is empty or malformed, or a conversation without a template or one that the template
            refuses; `template` is malformed, or no prompt is a conversation; `stop` has an empty string; an argument
            of drafting without a draft; or as `jspec.speculative_generate`.
        TypeError: `tokenizer` is none; or as `jspec.speculative_generate`.
    """
    options = {"num_draft_tokens": num_draft_tokens, "accept": accept}
    options = {name: value for name, value in options.items() if value is not None}
    if draft is None and options:
        raise ValueError(f"{', '.join(options)} is for drafting, and draft is None; leave it out.")
    if draft is not None:
        options["num_draft_tokens"] = how_far(draft, num_draft_tokens)
    task = prepare(tokenizer, listed(prompts), stop, template)
    return task.completions(target, task.decode(target, draft, max_new_tokens, sampling, seed, **options))


def prepare(
    tokenizer: Any, prompts: list[Prompt], stop: str | Sequence[str] = (), template: Mapping[str, Any] | None = None
) -> Task:
    """Everything about texts that can be wrong, without a model; arguments as for `complete`."""
    if not callable(tokenizer):
        raise TypeError(f"tokenizer is of type {type(tokenizer).__name__}; pass that of jspec.pretrained, "
                        "jspec.text.load_tokenizer or transformers.")  # fmt: skip
    several = list(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else [stop]
    if not all(isinstance(one, str) and one for one in several):
        raise ValueError(f"stop is {stop!r}; expected strings that are not empty, for they end a text.")
    special = {one: i for one in several if (i := _special(tokenizer, one)) is not None}
    strings = tuple(one for one in several if one not in special)
    return Task(prompts, encode(tokenizer, prompts, template), tokenizer, strings, tuple(special.values()))


def how_far(draft: Any, num_draft_tokens: Any) -> Any:
    """`num_draft_tokens`, or the default; drafters that look up guess so many at most, and none without a match.

    By default what drafts behind one that looks up does so while it is sure, if it can say.
    """
    wanted = usual(draft) if num_draft_tokens is None else num_draft_tokens
    if isinstance(draft, _Lookup) and isinstance(wanted, numbers.Integral):
        check_count("num_draft_tokens", wanted)
        return UpTo(int(wanted))
    return WhileConfident(wanted, _SURE, _SURE) if num_draft_tokens is None and _is_behind_lookup(draft) else wanted


def of_engine(draft: Any) -> Any:
    """The default of an engine, which drafts numbers of tokens: what pays, where two drafters guess differently far."""
    return "auto" if _is_behind_lookup(draft) else usual(draft)


def _is_behind_lookup(draft: Any) -> bool:
    """Whether something that says how sure it is drafts where lookup has no guess."""
    return isinstance(draft, FallbackDrafter) and isinstance(draft.first, _Lookup) and says_how_sure(draft.second)


def usual(draft: Any) -> Any:
    """How far to draft unless told otherwise: four tokens, or as far as a drafter can; of one with a tree, that."""
    return DEFAULT if own_tree(draft) is not None else int(min(_DRAFTED, reach_of(draft)))


def until(pieces: Sequence[str], stop: Sequence[str]) -> list[str] | None:
    """The pieces up to that which completes the first of `stop`, without that string; None if there is none.

    So a decoder that stops does it: of strings that one piece completes, the one that begins first counts.
    """
    text = ""
    for count, piece in enumerate(pieces, 1):
        known, text = len(text), text + piece
        starts = [start for one in stop if (start := text.find(one, max(0, known - len(one) + 1))) >= 0]
        if starts:
            ends = itertools.accumulate(len(one) for one in pieces[:count])
            return [one[: max(0, min(starts) - end + len(one))] for one, end in zip(pieces, ends, strict=False)]
    return None


def statistics(
    rounds: int, drafted: int, judged: int, accepted: int, accepted_at: list[int], origins: Sequence[int]
) -> dict[str, Any]:
    """The counts of one request, as in `jspec.Stats`, and what the theory makes of its acceptance rate.

    ``acceptance_rate`` is that of the drafts that were judged: those after a rejection never are.
    ``predicted_tokens_per_round`` is equation 1 of Leviathan et al. 2023 at that rate, None where a round had fewer
    guesses than it supposes. The measured number is lower where the end of the text cuts the last round off, and
    differs where acceptance comes in streaks.
    """
    rate = accepted / judged if judged else None
    # A draft that was kept whole is followed by a bonus.
    whole = origins.count(BONUS) <= sum(accepted_at[-1:]) and NO_DRAFT not in origins
    predicted = float(theory.expected_tokens(rate, len(accepted_at))) if rate is not None and whole else None
    return {
        "tokens": len(origins),
        "rounds": rounds,
        "drafted": drafted,
        "judged": judged,
        "accepted": accepted,
        "accepted_at": accepted_at,
        "acceptance_rate": rate,
        "tokens_per_round": len(origins) / rounds,
        "predicted_tokens_per_round": predicted,
    }


def _special(tokenizer: Any, string: str) -> int | None:
    """The id of a special token, which texts never show; ValueError where it is only a part of `string`."""
    ids = tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
    shown, whole = (
        tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in (True, False)
    )
    if shown == whole:
        return None
    if len(ids) > 1:
        raise ValueError(f"stop has {string!r}, of which texts show only {shown!r}; give the special token alone.")
    return ids[0]
