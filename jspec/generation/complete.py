# pyright: reportUnnecessaryIsInstance=false
"""`complete`: batched completion of prompts in one call, with a result for each prompt."""

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from jspec.acceptance import Rule
from jspec.core.detokenizer import pieces
from jspec.core.sampling import SamplingParams
from jspec.core.tokenizer import Tokenizer
from jspec.core.transfers import explicit_transfers
from jspec.core.types import Output, check_count
from jspec.decoding.validate_arguments import as_array, check_target
from jspec.decoding.validate_positions import check_positions
from jspec.drafters import FallbackDrafter, NGramDrafter, RetrievalDrafter
from jspec.drafters.base import DraftSource, own_tree
from jspec.drafters.capabilities import has_confidence, max_chain_length_of
from jspec.drafters.draft_length import DEFAULT, DraftLength, Fixed, UpTo, WhileConfident
from jspec.drafters.standalone.model import as_drafter, positions
from jspec.generation.generate import generate, speculative_generate
from jspec.generation.statistics import Statistics, statistics
from jspec.models.language_model import LanguageModel
from jspec.models.llama import Llama
from jspec.models.sampling_defaults import recommended
from jspec.text import eos_ids, request_keys
from jspec.text.chat_template import Batch, Prompt, encode, listed, room

_DRAFTED = 4  # default number of draft tokens per round
_Lookup = NGramDrafter | RetrievalDrafter
_SURE = 0.6  # confidence threshold that pays off on CPUs, where each verified row costs time (bench/NOTES.md)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A prompt and its generated continuation or reply.

    Attributes:
        prompt: the prompt as it was passed.
        pieces: the text added by each new token.
        tokens: the new tokens. `tokens`, `logprobs` and `origins` have the same values as in `jspec.Output`, without
            padding.
        logprobs: the log-probability of each new token under the distribution that it was sampled from.
        origins: the origin of each new token.
        finish_reason: "eos" after an EOS token, "stop" at a string or special token in `stop`, or "length" at the
            length limit. None if decoding continues.
        stats: the request's statistics. See `statistics`.
    """

    prompt: Prompt
    pieces: list[str]
    tokens: list[int]
    logprobs: list[float]
    origins: list[int]
    finish_reason: str | None
    stats: Statistics

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(self.pieces)


@dataclasses.dataclass(frozen=True)
class Task:
    """A batch of encoded prompts, with the strings and special tokens that end their output."""

    prompts: list[Prompt]
    batch: Batch
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    samples_per_prompt: int = 1

    @property
    def num_rows(self) -> int:
        """The number of rows of the output."""
        return len(self.prompts) * self.samples_per_prompt

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The token ids of each prompt."""
        pairs = zip(self.batch.tokens, self.batch.lengths, strict=True)
        return [tuple(tokens[:length].tolist()) for tokens, length in pairs]

    def ends(self, target: LanguageModel) -> tuple[int, ...]:
        """Return the token ids that end decoding."""
        possible = {i for i in self.stop_ids if i < target.config.vocab_size}
        return tuple(sorted({*eos_ids(target, self.tokenizer), *possible}))

    def check_length(self, target: LanguageModel, draft: DraftSource | None, max_new_tokens: int) -> None:
        """Raise ValueError if a prompt plus `max_new_tokens` tokens is too long for a model."""
        drafter = None if draft is None else as_drafter(draft)
        check_positions(target, drafter, self.batch.lengths, max_new_tokens, np.zeros(1, np.int32))

    def decode(
        self,
        target: Llama,
        draft: DraftSource | None,
        max_new_tokens: int,
        sampling: SamplingParams | None,
        seed: int,
        **options: Any,
    ) -> Output:
        """Call `jspec.speculative_generate`, or `jspec.generate` if `draft` is None, with `options`.

        If `sampling` is None, the target's recommended parameters are used. Request i's key depends on `seed` and i.
        Sizes are rounded up, so that a new `max_new_tokens` seldom causes recompilation.
        """
        check_target(target)
        check_count("max_new_tokens", max_new_tokens)
        size = room(max_new_tokens, self.batch, positions(target, draft))
        sampling = recommended(target) if sampling is None else sampling
        sampling = self._limited(sampling, min(max_new_tokens, 2**31 - 1))
        options |= {"max_new_tokens": size, "sampling": sampling, "eos_ids": self.ends(target)}
        options |= {"samples_per_prompt": self.samples_per_prompt}
        with explicit_transfers():
            request = self.batch.tokens, self.batch.lengths, request_keys(seed, self.num_rows)
            if draft is None:
                return generate(target, *request, **options)
            return speculative_generate(target, draft, *request, **options)

    def _limited(self, sampling: SamplingParams, most: int) -> SamplingParams:
        """Return `sampling` with `max_tokens` capped at `most`. Leave an invalid value for later checks to reject."""
        if not isinstance(sampling, SamplingParams):
            return sampling
        wanted = as_array("max_tokens", sampling.max_tokens)
        if np.asarray(wanted).dtype.kind not in "iuf":
            return sampling
        limits = np.where(np.equal(wanted, 0), most, np.minimum(wanted, most))
        limits = limits if limits.ndim else np.full(self.num_rows, limits)  # same program for scalars and arrays
        return dataclasses.replace(sampling, max_tokens=limits)

    def completions(self, target: LanguageModel, out: Output) -> list[Completion]:
        """Return the completion of each row of `out`, the output of `target`.

        Raises:
            ValueError: the target's logits are not finite.
        """
        out = jax.device_get(out)
        if out.stats.invalid.any():
            raise ValueError("The target's logits are not finite: its weights are damaged, or too large for the dtype.")
        return [self._completion(target, out, row) for row in range(self.num_rows)]

    def reason(self, target: LanguageModel, stopped: str | list[str] | None, last: int) -> str:
        """Return the finish reason. `last` is the last token; `stopped` is None if no string in `stop` was found."""
        if stopped is not None:
            return "stop"
        return "eos" if last in eos_ids(target, self.tokenizer) else "stop" if last in self.stop_ids else "length"

    def _completion(self, target: LanguageModel, out: Output, row: int) -> Completion:
        new, prompt = slice(int(out.lengths[row])), row // self.samples_per_prompt
        ids, tokens = self.batch.tokens[prompt, : self.batch.lengths[prompt]].tolist(), out.tokens[row, new].tolist()
        added = pieces(self.tokenizer, ids, tokens)
        kept = truncate_at_stop(added, self.stop)
        added, reason = added if kept is None else kept, self.reason(target, kept, tokens[-1])
        return Completion(
            prompt=self.prompts[prompt],
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
    target: Llama,
    draft: DraftSource | None,
    tokenizer: Tokenizer,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    num_draft_tokens: int | str | DraftLength | None = None,
    sampling: SamplingParams | None = None,
    accept: str | Rule | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    template: Mapping[str, object] | None = None,
    samples_per_prompt: int = 1,
) -> list[Completion]:
    """Complete text prompts and answer conversations in one batch.

    Decoding ends at the EOS tokens of the model and the tokenizer, including those in generation_config.json.

    Args:
        target, accept: same as in `jspec.speculative_generate`.
        draft: same as in `jspec.speculative_generate`. None decodes without a draft.
        tokenizer: the target's tokenizer, from `jspec.pretrained` or transformers.
        prompts: one prompt or a list of prompts. A prompt is a string, a list of token ids, or a conversation. A
            conversation is a list of messages such as ``{"role": "user", "content": "Hello"}``, which the chat template
            turns into one string.
        max_new_tokens: the maximum number of new tokens for each prompt.
        num_draft_tokens: same as in `jspec.speculative_generate`. The default is 4. Prompt-lookup and retrieval
            drafters draft at most this many tokens. By default, a drafter that they fall back to drafts only while it
            is confident (`jspec.WhileConfident`), because that pays off on CPUs.
        sampling: same as in `jspec.speculative_generate`. This argument replaces all of the model's defaults. If it is
            None, each field has the value that the target's generation_config.json recommends, or else that of
            `SamplingParams()`.
        seed: the random seed. The key of completion i depends on `seed` and i.
        stop: one or several stop strings. The text ends before the first match. The completion keeps tokens up to the
            one that completes the match. Decoding continues after that token, and `Completion.stats` counts the extra
            tokens. A special token, such as "<|im_end|>", ends decoding just like the model's own EOS tokens.
        template: chat template variables for every conversation, such as ``{"enable_thinking": False}``. The template
            ignores names that it does not use.
        samples_per_prompt: the number of completions of each prompt, which is prefilled only once.

    Returns:
        `samples_per_prompt` completions of each prompt (by default one), in the order of the prompts.

    Raises:
        ValueError: a prompt is empty or malformed; there is no template for a conversation, or the template rejects it;
            `template` is malformed, or was passed without a conversation; `stop` contains an empty string; a drafting
            argument was passed without a draft; or any of the reasons listed under `jspec.speculative_generate`.
        TypeError: `tokenizer` is not a tokenizer; or any of the reasons listed under `jspec.speculative_generate`.
    """
    options = {"num_draft_tokens": num_draft_tokens, "accept": accept}
    options = {name: value for name, value in options.items() if value is not None}
    if draft is None and options:
        raise ValueError(
            f"draft is None, so {', '.join(options)} cannot be used; pass a draft, or omit these arguments."
        )
    if draft is not None:
        options["num_draft_tokens"] = draft_length_of(draft, num_draft_tokens)
    check_count("samples_per_prompt", samples_per_prompt)
    task = prepare(tokenizer, listed(prompts), stop, template)
    task = dataclasses.replace(task, samples_per_prompt=samples_per_prompt)
    return task.completions(target, task.decode(target, draft, max_new_tokens, sampling, seed, **options))


def prepare(
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    stop: str | Sequence[str] = (),
    template: Mapping[str, object] | None = None,
) -> Task:
    """Validate and encode the prompts without a model. The arguments are the same as in `complete`."""
    if not callable(tokenizer):
        raise TypeError(
            f"tokenizer is of type {type(tokenizer).__name__}; pass one from jspec.pretrained, "
            "jspec.text.load_tokenizer or transformers."
        )
    several = stop_strings(stop)
    special = {one: i for one in several if (i := _special(tokenizer, one)) is not None}
    strings = tuple(one for one in several if one not in special)
    return Task(prompts, encode(tokenizer, prompts, template), tokenizer, strings, tuple(special.values()))


def stop_strings(stop: str | Sequence[str]) -> list[str]:
    """Return the stop strings.

    Raises:
        ValueError: `stop` is neither a string nor a sequence of strings, or a string is empty.
    """
    several = list(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else [stop]
    if not all(isinstance(one, str) and one for one in several):
        raise ValueError(f"stop is {stop!r}; expected non-empty strings, because each string ends the output.")
    return several


def draft_length_of(draft: DraftSource, num_draft_tokens: int | str | DraftLength | None) -> int | str | DraftLength:
    """Return `num_draft_tokens`, or the default.

    A lookup drafter drafts up to that many tokens, and no tokens if it finds no match. By default, the fallback of a
    lookup drafter stops drafting when it becomes unsure, if it reports its confidence.
    """
    wanted = default_draft_length(draft) if num_draft_tokens is None else num_draft_tokens
    if isinstance(draft, _Lookup) and isinstance(wanted, numbers.Integral):
        check_count("num_draft_tokens", wanted)
        return UpTo(int(wanted))
    return (
        WhileConfident(cast(int, wanted), _SURE, _SURE)
        if num_draft_tokens is None and _has_lookup_first(draft)
        else wanted
    )


def engine_draft_length(draft: DraftSource | None) -> int | str | Fixed:
    """Return an engine's default number of draft tokens. An engine does not accept `DraftLength` objects.

    The default is "auto" for a lookup drafter with a fallback, because the two draft different numbers of tokens.
    """
    return "auto" if _has_lookup_first(draft) else default_draft_length(draft)


def _has_lookup_first(draft: DraftSource | None) -> bool:
    """Return whether `draft` tries prompt lookup first and then a drafter that reports its confidence."""
    return isinstance(draft, FallbackDrafter) and isinstance(draft.first, _Lookup) and has_confidence(draft.second)


def default_draft_length(draft: DraftSource | None) -> int | Fixed:
    """Return the default number of draft tokens: four, or the drafter's maximum if lower. A tree has `DEFAULT`."""
    drafter = as_drafter(draft)
    return DEFAULT if own_tree(drafter) is not None else int(min(_DRAFTED, max_chain_length_of(drafter)))


def truncate_at_stop(pieces: Sequence[str], stop: Sequence[str]) -> list[str] | None:
    """Return the pieces before the first match of `stop`, excluding the matched string. Return None without a match.

    A decoder that stops at the match gives the same result. If one piece completes several strings, the match that
    starts earliest counts.
    """
    text = ""
    for count, piece in enumerate(pieces, 1):
        known, text = len(text), text + piece
        starts = [start for one in stop if (start := text.find(one, max(0, known - len(one) + 1))) >= 0]
        if starts:
            ends = itertools.accumulate(len(one) for one in pieces[:count])
            return [one[: max(0, min(starts) - end + len(one))] for one, end in zip(pieces, ends, strict=False)]
    return None


def _special(tokenizer: Tokenizer, string: str) -> int | None:
    """Return the id of a special token, which decoded text never shows. Return None if `string` is ordinary text.

    Raises:
        ValueError: `string` contains a special token and other text.
    """
    ids = tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
    shown, whole = (
        tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in (True, False)
    )
    if shown == whole:
        return None
    if len(ids) > 1:
        raise ValueError(
            f"stop contains {string!r}, of which decoded text shows only {shown!r}; pass the special token alone."
        )
    return ids[0]
