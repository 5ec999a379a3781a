# pyright: reportIncompatibleMethodOverride=false
"""Kangaroo: the target's first layers, and a small trained attention layer in place of the remaining layers."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from convert import config_json as llama_json
from convert.config import LlamaConfig
from convert.json_fields import Fields
from jspec.acceptance.path import at_path
from jspec.core.tree import Branches, Level, Tree
from jspec.core.types import Draft, Verdict, check_count, pytree
from jspec.drafters.base import Context
from jspec.drafters.heads.base import check_hidden_size
from jspec.drafters.heads.own_files import InOwnFiles
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.drafters.standalone.early_exit import check_layers, run_layers
from jspec.models.attention import Attention, AttentionContext
from jspec.models.kv_cache import KVCache, empty_cache, insert_prefix
from jspec.models.layers import RMSNorm, add_and_norm
from jspec.models.llama import Llama
from jspec.models.rope import rope_tables

_ATTENTION = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "attention_bias", "rope_theta", "rope_scaling"),
)


class Adapter(nnx.Module):
    """A decoder layer without an MLP, followed by a norm: ``norm(x + attention(norm(x)))``.

    Args:
        config: a configuration with the target's hidden size. Its attention heads and rope may differ from the
            target's.
    """

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype, rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of weights, activations and cache."""
        return self.norm.weight[...].dtype

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """Return an empty cache with `slots` positions for each of `batch` rows."""
        return empty_cache(1, (batch, self.config.num_key_value_heads, slots, self.config.head_dim), self.dtype)

    def __call__(
        self, x: Array, cache: KVCache, start: Array, branches: Branches | None = None
    ) -> tuple[Array, KVCache]:
        """Return normalised states ``[B, S, E]`` for the target's output head, and the updated cache.

        Args:
            x: ``[B, S, E]``, the output of the exit layer.
            cache, start, branches: same as in `jspec.Llama.forward`.
        """
        x = x.astype(self.dtype)
        slots, positions = Branches.places(start, x.shape[1], branches)
        tables = rope_tables(positions, self.config.rope, self.config.head_dim)
        attend, normed = self.self_attn, self.input_layernorm(x)
        context = AttentionContext(cache.keys[0], cache.values[0], slots, tables, None, branches, cache.rows)
        mixed, keys, values = attend(normed, context)
        return add_and_norm(x, mixed, attend.o_proj, self.norm)[1], KVCache((keys,), (values,), cache.rows)


@pytree
class _Read:
    """The adapter's cache of the sequence except its last token, and the start of the last draft, ``int32[B]``."""

    cache: KVCache
    start: Array


@pytree
class _Drafting:
    """The state within a draft.

    Attributes:
        cache: the adapter's cache.
        own: the first layers' cache of the last token and the draft.
        start: ``int32[B]``, the position of the first slot of `own`.
    """

    cache: KVCache
    own: KVCache
    start: Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["adapter"], meta_fields=["num_layers"])
@dataclasses.dataclass(frozen=True)
class KangarooDrafter(AutoregressiveDrafter[_Read, _Drafting], InOwnFiles):
    """A drafter with the target's first layers, a trained adapter and the target's output head.

    See Liu et al. 2024, "Kangaroo", section 3. The adapter consists of one attention layer and two norms. It maps a
    shallow layer's output to an approximation of the final norm's output. The first layers read the target's cache of
    the sequence. The adapter's own cache is computed from the target's states at that layer, as soon as the target has
    read a token. Verification runs the first layers again, as part of the target's pass. For the paper's second exit,
    at a token that the draft is unsure of, use `jspec.WhileConfident`.

    Attributes:
        adapter: an `Adapter`.
        num_layers: the number of target layers before the adapter.
    """

    adapter: Adapter
    num_layers: int
    vocab_size = None
    KIND = "kangaroo"
    SIZES: ClassVar[dict[str, type]] = {"num_layers": int}

    def __post_init__(self) -> None:
        check_count("num_layers", self.num_layers)

    @classmethod
    def untrained(cls, target: Llama, num_layers: int, *, rngs: nnx.Rngs) -> "KangarooDrafter":
        """Return a drafter with a random adapter, to train for `target` or to fill with weights."""
        return cls(Adapter(target.config, target.dtype, rngs), num_layers)

    def described(self) -> Fields:
        """Return the drafter's sizes. The adapter's attention has the target's heads, norms and rope."""
        fields = llama_json.fields(self.adapter.config)
        return {"num_layers": self.num_layers} | {name: fields[name] for name in _ATTENTION}

    @property
    def features(self) -> tuple[int, ...]:
        return (self.num_layers,)

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _Read:
        """Prefill the adapter with the target's states over the prompts."""
        features, target = signals.states()
        check_layers(target, type(self).__name__)
        check_hidden_size(type(self).__name__, self.adapter.config.hidden_size, target)
        batch, width = tokens.shape
        start = jnp.zeros(batch, jnp.int32)
        _, read = self.adapter(features[:, :, 0], self.adapter.new_cache(batch, width), start)
        return _Read(insert_prefix(self.adapter.new_cache(batch, num_slots), read), start)

    def read(self, state: _Read, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> _Read:
        """Prefill the next piece of the sequence. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        return _Read(self.adapter(signals.states()[0][:, :, 0], state.cache, start)[1], state.start)

    def begin(self, state: _Read, context: Context, tree: Tree) -> tuple[Array, _Drafting]:
        """Read the last token, which the target has not read yet."""
        start = context.lengths - 1
        last = jnp.take_along_axis(context.tokens, start[:, None], axis=1)
        own = context.target.model.new_cache(start.size, tree.size)
        logits, carry = self._read(last, _Drafting(state.cache, own, start), start, None, context)
        return logits[:, 0], carry

    def extend(self, carry: _Drafting, tokens: Array, level: Level, context: Context) -> tuple[Array, _Drafting]:
        return self._read(tokens, carry, level.start(context.lengths), level.branches, context)

    def end(self, carry: _Drafting) -> _Read:
        return _Read(carry.cache, carry.start)

    def commit(self, state: _Read, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _Read:
        """Read the target's states at the accepted tokens with the adapter.

        Other slots are overwritten before they are read. The accepted tokens' slots change only by rounding, with three
        exceptions: a chain's last token, which the adapter has not read; tokens that had another slot in a tree; and
        tokens that another drafter proposed.
        """
        read = at_path(signals.states()[0], verdict)[:, :, 0]
        _, cache = self.adapter(read, state.cache, state.start)
        return dataclasses.replace(state, cache=cache)

    def _read(
        self, tokens: Array, carry: _Drafting, at: Array, branches: Branches | None, context: Context
    ) -> tuple[Array, _Drafting]:
        """Return the logits after ``tokens[B, S]``, which start at position ``at[B]`` (`jspec.Llama.forward`)."""
        model = context.target.model
        x, own = run_layers(range(self.num_layers), tokens, carry.own, at, carry.start, context, branches)
        x, cache = self.adapter(x, carry.cache, at, branches)
        return model.head.logits(x.astype(model.dtype)), _Drafting(cache, own, carry.start)
