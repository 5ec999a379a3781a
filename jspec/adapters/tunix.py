# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
"""`JSpecRollout`: a roll-out worker for tunix that decodes with jspec."""

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jspec.acceptance import Rule
from jspec.adapters.tunix_weights import llama_from_tunix, replace_weights
from jspec.core.sampling import SamplingParams
from jspec.core.types import Output, PyTree
from jspec.drafters.base import DraftSource
from jspec.drafters.draft_length import DEFAULT, DraftLength
from jspec.generation.generate import generate, speculative_generate
from jspec.generation.scoring import logprobs
from jspec.models.llama import Llama, stored_orders
from jspec.text.chat_template import bucket, padded

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise ImportError(
        f"JSpecRollout needs google-tunix 0.1.7, which cannot be imported ({error}); install it with the commands in "
        "docs/adapters.md."
    ) from error


@runtime_checkable
class LearnedDraft(Protocol):
    """A draft that learns from every call, such as a `jspec.online.Retrieval` or a `jspec.online.Learner`."""

    @property
    def drafter(self) -> Any: ...

    def learn(self, prompts: Sequence[Sequence[int]], out: Output) -> None: ...


class JSpecRollout(BaseRollout):
    """A roll-out worker for tunix that decodes with jspec.

    Pass this class to tunix as ``ClusterConfig(rollout_engine=functools.partial(JSpecRollout, draft=...))``. tunix then
    creates the worker and passes the first four arguments.

    Attributes:
        target: the model that generates. `update_params` replaces its weights in place.
        last_output: the `jspec.Output` of the last call of `generate`, with its statistics; None before the first call.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: object = None,
        rollout_config: object = None,
        *,
        target: Llama | None = None,
        draft: DraftSource | LearnedDraft | None = None,
        num_draft_tokens: int | str | DraftLength = DEFAULT,
        accept: str | Rule = "rejection",
        keep_eos: bool = False,
    ) -> None:
        """Copy the weights of the trained model.

        Args:
            rollout_actor: the model that tunix trains: a tunix ``Llama3``, ``Qwen2`` or ``Qwen3``. If `target` is
                given, it may also be a `jspec.Llama`.
            tokenizer: the tokenizer, or tunix's adapter for it.
            mesh, rollout_config: ignored. The target stays on its own devices, and each call has its own config.
            target: the model that generates. It must compute the same function as `rollout_actor`, but it may be
                quantised or sharded. The default is `llama_from_tunix(rollout_actor)`.
            draft: same as in `jspec.speculative_generate`, or an object with a `drafter` that is replaced whenever its
                method `learn` receives the prompts and the output. None decodes without a draft.
            num_draft_tokens, accept: same as in `jspec.speculative_generate`.
            keep_eos: whether the tokens include EOS, as with tunix's vLLM worker. The vanilla worker leaves it out.

        Raises:
            ValueError: jspec does not support the model, or `target` does not have the same weights.
        """
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        self.target = llama_from_tunix(rollout_actor) if target is None else target
        self.last_output: Output | None = None
        self._draft, self._keep_eos = draft, keep_eos
        self._drafting: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "accept": accept}
        self._calls, self._lock = itertools.count(), threading.Lock()
        self._actor_orders = stored_orders(rollout_actor) if isinstance(rollout_actor, Llama) else {}
        if target is not None:
            self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs: object) -> RolloutOutput:
        """Sample one completion of each prompt.

        Every call uses new keys, even if the seed is the same. Equal prompts that follow each other are prefilled once.
        Padding tokens in a prompt are left out, because tunix's learners do not attend to them either.

        Args:
            prompts: the prompts as text.
            rollout_config: the sampling parameters. docs/adapters.md describes the fields that jspec uses.

        Returns:
            The texts, tokens and left-padded prompts. `logits` is empty. `logprobs` is None unless ``return_logprobs``
            is set. It is the log-probability after temperature, top-k and top-p, or the raw one if decoding is greedy.

        Raises:
            ValueError: an argument is out of range. See `jspec.speculative_generate`.
            TypeError: there are other keyword arguments.
        """
        if kwargs:
            raise TypeError(f"JSpecRollout.generate got {', '.join(kwargs)}; pass only prompts and rollout_config.")
        pad = self.pad_id()
        rows = [self._encode(prompt) for prompt in prompts]
        width, longest = rollout_config.max_prompt_length, max(map(len, rows))
        width = bucket(longest) if width is None or width < longest else width
        with self._lock:
            out = self._decode([[token for token in row if token != pad] for row in rows], width, rollout_config)
        return self._result(out, [[pad] * (width - len(row)) + row for row in rows], rollout_config)

    def _encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, with a single BOS, as tunix's samplers do."""
        bos = self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids([*([bos] if bos else []), *self._tokenizer.encode(prompt)])

    def _ends(self, config: RolloutConfig) -> list[int]:
        return list(config.eos_tokens or [self.eos_id()])

    def _decode(self, texts: list[list[int]], width: int, config: RolloutConfig) -> Output:
        """Decode all texts, and let the draft learn from them."""
        group = math.gcd(*(len(list(same)) for _, same in itertools.groupby(texts)))
        first = texts[::group]
        batch = padded(first, width), np.array([len(text) for text in first], np.int32)
        keys = jax.random.split(jax.random.fold_in(_key(config.seed), next(self._calls)), len(texts))
        options: dict[str, Any] = {
            "max_new_tokens": config.max_tokens_to_generate,
            "sampling": _sampling(config),
            "eos_ids": self._ends(config),
            "samples_per_prompt": group,
        }
        draft = self._draft.drafter if isinstance(self._draft, LearnedDraft) else self._draft
        if draft is None:
            out = generate(self.target, *batch, keys, **options)
        else:
            out = speculative_generate(self.target, draft, *batch, keys, **options, **self._drafting)
        if isinstance(self._draft, LearnedDraft):
            self._draft.learn(texts, out)
        self.last_output = out
        return out

    def _result(self, out: Output, prompts: list[list[int]], config: RolloutConfig) -> RolloutOutput:
        """Cut the output of all rows at their ends."""
        found = out.raw_logprobs if config.temperature == 0 else out.logprobs
        rows, lengths, found = jax.device_get((out.tokens, out.lengths, found))
        is_end = np.isin(rows, self._ends(config))
        complete = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        cut = [row[: n - ended[n - 1]] for row, n, ended in zip(rows, lengths, is_end, strict=True)]
        tokens = complete if self._keep_eos else cut
        kept = [row[: len(ids)] for row, ids in zip(found, tokens, strict=True)]
        return RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in cut],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=np.array(prompts, np.int32),
            logprobs=kept if config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: ArrayLike, completion_tokens: ArrayLike) -> Array:
        """Return the raw log-probability of each completion token, ``float32[B, C]``; 0 for padding tokens.

        Args:
            prompt_tokens: ``int32[B, P]``, padded on the left.
            completion_tokens: ``int32[B, C]``, padded on the right.
        """
        tokens = jnp.concatenate([jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens)], axis=1)
        mask = tokens != self.pad_id()
        texts = jnp.take_along_axis(tokens, jnp.argsort(~mask, axis=1, stable=True), axis=1)
        scores = logprobs(self.target, texts, mask.sum(axis=1)).raw_logprobs
        places = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        found = jnp.where(mask, jnp.take_along_axis(scores, places, axis=1), 0)
        return found[:, jnp.shape(prompt_tokens)[1] :]

    def update_params(self, params: PyTree, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replace all weights of the target in place.

        Args:
            params: the state of the trained model, with all its weights.
            filter_types: ignored.

        Raises:
            ValueError: names are missing or unknown, or a weight does not fit. See `jspec.load_weights`.
        """
        with self._lock:
            replace_weights(self.target, params, self._actor_orders)

    def pad_id(self) -> int:
        """Return the padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the EOS token."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return None, as tunix's ``RolloutEngineGroup`` does.

        tunix compares this model with the trained one, leaf by leaf, and jspec's has other leaves. None makes tunix
        call `update_params` after every step. `target` is the model.
        """
        return None


def _sampling(config: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of a config. None turns a filter off."""
    top_p = 1.0 if config.top_p is None else config.top_p
    return SamplingParams(temperature=config.temperature, top_k=max(0, config.top_k or 0), top_p=top_p)


def _key(seed: Array | int | None) -> Array:
    """Return a typed key from a seed, a typed key or a raw key."""
    if seed is None or isinstance(seed, int) or jnp.ndim(seed) == 0:
        is_key = seed is not None and jnp.issubdtype(jnp.asarray(seed).dtype, jax.dtypes.prng_key)
        return jnp.asarray(seed) if is_key else jax.random.key(seed or 0)
    return jax.random.wrap_key_data(jnp.asarray(seed))
