# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUntypedBaseClass=false
"""`JSpecLM`: a model for lm-eval (lm-evaluation-harness) that runs jspec in the same process."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jinja2 import TemplateError

from jspec.core.tokenizer import Tokenizer
from jspec.core.types import check_count
from jspec.drafters import NGramDrafter
from jspec.drafters.base import DraftSource
from jspec.drafters.draft_length import DraftLength
from jspec.evaluation.continuations import Decoder, sampling_of, stop_ids
from jspec.evaluation.likelihoods import Pair, Score, log_likelihoods
from jspec.models.llama import Llama
from jspec.models.load import load
from jspec.text import load_tokenizer, request_keys

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f'JSpecLM needs lm-eval 0.4.13, which cannot be imported ({error}); run pip install "jspec[eval]".'
    ) from error

_LOG = logging.getLogger("jspec")
_BATCH = 8


class Request(Protocol):
    """The part of lm-eval's ``Instance`` that a model reads."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class JSpecLM(TemplateLM):
    """A model for lm-eval that scores and generates with jspec, with the semantics of lm-eval's ``hf`` model.

    Contexts and continuations are encoded, truncated and stopped as in lm-eval 0.4.13. Log-likelihoods are those of the
    target; a draft speeds up generation only.
    """

    def __init__(
        self,
        target: Llama | str,
        tokenizer: Tokenizer | str | None = None,
        draft: DraftSource | str | None = None,
        *,
        batch_size: int | str = _BATCH,
        max_length: int | None = None,
        num_draft_tokens: int | str | DraftLength | None = None,
        seed: int = 0,
        dtype: str | None = None,
        quantize: str | None = None,
        packed: bool | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        template: Mapping[str, object] | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Load the models that are given by name.

        Args:
            target: a model, or a source for `jspec.load`.
            tokenizer: the target's tokenizer, or a source for `jspec.text.load_tokenizer`. The default is the source
                of `target`.
            draft: same as in `jspec.speculative_generate`, a source for `jspec.load`, or "lookup" for prompt lookup.
                None decodes without a draft.
            batch_size: the number of texts that are scored or generated at once. "auto" means `max_batch_size`, or 8 if
                that is None.
            max_length: the maximum number of tokens that the model reads. The default is the target's number of
                positions.
            num_draft_tokens: same as in `jspec.complete`.
            seed: the seed of sampled texts. The key of a request depends on the seed and on the index of the request.
            dtype, quantize, packed: same as in `jspec.load`, for models given by name.
            add_bos_token: whether texts start with the tokenizer's special tokens. By default, the tokenizer decides.
            prefix_token_id: the token before texts without a context. The default is BOS, or else EOS.
            think_end_token: the string that ends the model's reasoning, which is cut off.
            template: chat-template variables, such as ``{"enable_thinking": False}``.
            device: "cpu", "cuda" or "tpu", for lm-eval's option of that name. It must be the device that JAX uses.
            max_batch_size: the batch size if `batch_size` is "auto".

        Raises:
            ValueError: `target` is a model, but no tokenizer was passed; `batch_size` is neither a positive number nor
                "auto"; or `device` is not the device that JAX uses.
        """
        super().__init__()
        _check_device(device)
        size = (max_batch_size or _BATCH) if batch_size == "auto" else batch_size
        size = int(size) if isinstance(size, str) and size.isdigit() else size  # lm-eval's command passes a string
        check_count("batch_size", size)
        self.tokenizer: Tokenizer = _tokenizer(target, tokenizer)
        model = load(target, dtype, quantize, packed=packed) if isinstance(target, str) else target
        if isinstance(draft, str):
            draft = NGramDrafter() if draft == "lookup" else load(draft, dtype, quantize, packed=packed)
        self._decoder = Decoder(model, draft, num_draft_tokens, int(size))
        self._max_length, self._seed, self._think_end_token = max_length, seed, think_end_token
        self._add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        self._template = dict(template or {})

    @property
    def eot_token_id(self) -> int | None:
        """The id of the EOS token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id of the token before texts without a context.

        Raises:
            ValueError: the tokenizer has neither BOS nor EOS, and no token was passed.
        """
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError("The tokenizer has neither BOS nor EOS; pass prefix_token_id.")

    @property
    def max_length(self) -> int:
        """The maximum number of tokens that the model reads."""
        return self._max_length or self._decoder.target.config.max_position_embeddings

    @property
    def max_gen_toks(self) -> int:
        """The maximum number of new tokens, unless a task sets its own."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """A name that identifies the vocabulary. lm-eval uses it in the keys of its request cache."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return f"jspec-{hashlib.sha256(vocabulary.encode()).hexdigest()[:16]}"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation as text. If the template rejects it, try again without system messages."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        options |= {"tokenize": False, **self._template}
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except TemplateError:
            _LOG.warning("The chat template rejected a conversation; retrying without system messages.")
            others = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(others, **options)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: object,
    ) -> list[int]:
        """Return the ids of a text, or the last `left_truncate_len` of them.

        By default, a text that starts with the prefix token gets no second one.
        """
        if add_special_tokens is None:
            has_prefix = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = not has_prefix and self._add_bos_token is not False
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[Score]:
        """Return the score of each continuation. A text that is too long loses its first tokens."""
        found: list[Score] = [(0.0, False)] * len(requests)
        pairs = [_fitted(context, continuation, self.max_length) for _, context, continuation in requests]
        scores = log_likelihoods(self._decoder.target, pairs, self._decoder.batch_size)
        for i, score in tqdm(scores, "Scoring", len(requests), disable=disable_tqdm):
            found[i] = score
            if requests[i][0] is not None:  # windows of a rolling text have no key
                self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. Every token is scored once, in windows of `max_length` tokens."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the first of its stop strings."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=repr), []).append(i)
        with tqdm(total=len(requests), desc="Generating", disable=disable_tqdm) as bar:
            for members in groups.values():
                for i, text in self._generate(requests, members):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update()
        return texts

    def _generate(self, requests: Sequence[Request], members: list[int]) -> Iterator[tuple[int, str]]:
        """Yield the indices and texts of requests that have the same generation arguments."""
        options = dict(normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        stop, limit = handle_stop_sequences(options.pop("until"), eos), options.pop("max_gen_toks")
        if limit >= self.max_length:
            raise ValueError(
                f"max_gen_toks is {limit}, but max_length is {self.max_length}; pass a smaller max_gen_toks."
            )
        prompts = [self._prompt(requests[i].args[0], self.max_length - limit) for i in members]
        keys = request_keys(self._seed, len(requests))[np.array(members)]
        sampling, ends = sampling_of(self._decoder.target, options), stop_ids(self.tokenizer, stop)
        for place, tokens in self._decoder.continuations(prompts, keys, limit, sampling, ends):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            yield members[place], postprocess_generated_text(text, stop, self._think_end_token)

    def _prompt(self, context: str, max_length: int) -> list[int]:
        ids = self.tok_encode(context) or [self.prefix_token_id]
        if len(ids) > max_length:
            _LOG.warning("A context exceeds %d tokens; its first %d are left out.", max_length, len(ids) - max_length)
        return ids[-max_length:]


register_model("jspec")(JSpecLM)


def _fitted(context: list[int], continuation: list[int], max_length: int) -> Pair:
    """Return the pair without the first tokens of the context, if the model cannot read them all.

    The model never reads the last token of the continuation.

    Raises:
        ValueError: the continuation is empty or too long.
    """
    if not 1 <= len(continuation) <= max_length:
        raise ValueError(
            f"A continuation has {len(continuation)} tokens; expected from 1 to {max_length} (max_length); shorten it."
        )
    room = max_length + 1 - len(continuation)
    if len(context) > room:
        _LOG.warning("A text exceeds %d positions; its first %d tokens are left out.", max_length, len(context) - room)
    return context[-room:], continuation


def _tokenizer(target: Llama | str, tokenizer: Tokenizer | str | None) -> Tokenizer:
    """Return the tokenizer, or that of the source of `target`."""
    if tokenizer is None:
        if not isinstance(target, str):
            raise ValueError("target is a model, but tokenizer is None; pass the model's tokenizer.")
        return load_tokenizer(target)
    return load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer


def _check_device(device: str | None) -> None:
    """Raise ValueError if `device` is not the kind of device that JAX uses."""
    kind = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if device is not None and device.split(":")[0] != kind:
        raise ValueError(f"device is {device!r}, but JAX uses {kind}; leave out device, or set JAX_PLATFORMS.")
