"""Continuations of prompts, in batches with few shapes, with lm-eval's generation settings."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jspec.core.sampling import SamplingParams
from jspec.core.tokenizer import Tokenizer
from jspec.drafters.base import DraftSource
from jspec.drafters.draft_length import DraftLength
from jspec.drafters.standalone.model import positions
from jspec.generation.complete import draft_length_of
from jspec.generation.generate import generate, speculative_generate
from jspec.models.llama import Llama
from jspec.text.prompt_batches import IndexedBatch, batches

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_TOP_K = 50  # the default of transformers, for sampling only
_WITHOUT_EFFECT = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}


def sampling_of(target: Llama, options: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters that transformers would use for `options`, the arguments of its ``generate``.

    A field that is not in `options` has the value that the model's generation_config.json recommends, or else the
    default of transformers. Without ``do_sample``, decoding is greedy, but the repetition penalty applies.

    Raises:
        ValueError: an option is not supported, or ``do_sample`` is set without a temperature above 0.
    """
    known = {name: value for name, value in options.items() if _WITHOUT_EFFECT.get(name) != value}
    if unknown := sorted(known.keys() - {*_FIELDS, "do_sample"}):
        raise ValueError(
            f"The generation arguments contain {', '.join(unknown)}, which jspec does not support; use only until, "
            f"max_gen_toks, do_sample, {', '.join(_FIELDS)}."
        )
    recommended = {name: value for name, value in target.config.sampling.values().items() if name in _FIELDS}
    values = {"top_k": _TOP_K} | recommended | {name: known[name] for name in _FIELDS if name in known}
    if not known.get("do_sample"):
        return SamplingParams(temperature=0.0, repetition_penalty=values.get("repetition_penalty", 1.0))
    if not known.get("temperature"):
        raise ValueError("do_sample is true, but temperature is 0 or missing; set a temperature above 0.")
    return SamplingParams(**values)


def stop_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> set[int]:
    """Return the tokens that are exactly one of the strings in `stop`. Decoding can end there."""
    found = ((string, tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]) for string in stop)
    return {ids[0] for string, ids in found if len(ids) == 1 and tokenizer.decode(ids) == string}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target with an optional draft, and the number of prompts that it decodes at once."""

    target: Llama
    draft: DraftSource | None
    num_draft_tokens: int | str | DraftLength | None
    batch_size: int

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Array,
        max_new_tokens: int,
        sampling: SamplingParams,
        ends: set[int],
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the index of each prompt with its new tokens, in the order of decoding.

        Args:
            keys: one key per prompt.
            ends: token ids after which a row ends.

        Raises:
            ValueError: the target's logits are not finite.
        """
        vocabulary = range(self.target.config.vocab_size)
        eos_ids = sorted(i for i in {*self.target.config.eos_token_ids, *ends} if i in vocabulary)
        for batch in batches(prompts, batch_size=min(self.batch_size, len(prompts))):
            tokens, lengths = self._decode(batch, batch.take(keys), max_new_tokens, sampling, eos_ids)
            for row, prompt in enumerate(batch.indices[: batch.num_distinct].tolist()):
                yield prompt, tokens[row, : lengths[row]].tolist()

    def _decode(
        self, batch: IndexedBatch, keys: Array, max_new_tokens: int, sampling: SamplingParams, eos_ids: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens of each row, and their numbers. A draft with too few positions is not used."""
        request = batch.tokens, batch.lengths, keys
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos_ids": eos_ids}
        if self.draft is None or batch.lengths.max() + max_new_tokens > positions(self.target, self.draft):
            out = generate(self.target, *request, **options)
        else:
            out = speculative_generate(
                self.target,
                self.draft,
                *request,
                num_draft_tokens=draft_length_of(self.draft, self.num_draft_tokens),
                **options,
            )
        out = jax.device_get(out)
        if out.stats.invalid.any():
            raise ValueError("The target's logits are not finite: its weights are damaged, or too large for the dtype.")
        return out.tokens, out.lengths
