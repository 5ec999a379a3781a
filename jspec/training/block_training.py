"""Training of block drafters, on many blocks of each text at once (DSpark, DFlash)."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.generation_config import SamplingDefaults
from convert.heads.block.config import BlockConfig, MarkovConfig
from jspec.drafters.draft_vocabulary import draft_ids_of
from jspec.drafters.heads.block_module import Block
from jspec.models.groups import GROUP
from jspec.models.layers import add_and_norm
from jspec.models.llama import Llama
from jspec.models.products import einsum
from jspec.models.rope import rope_tables, rotate
from jspec.training.eagle_training import features
from jspec.training.objective import Judge, Score, by_depth, score_one
from jspec.training.target_states import TargetStates

_MOST_BLOCKS = 512  # per text, as in DSpark
_LAYERS = 20  # layers of the target for each layer of a new block
_RANK = 24  # the target's hidden size over the rank of the Markov head, before rounding


def new_block(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> Block:
    """Return a float32 block for `target` that drafts `depth` tokens, with a Markov head and a confidence head.

    The output head has only the columns of the target's head for `draft_ids`. Training does not change it.

    Args:
        draft_ids: the tokens that the block can draft, in ascending order; None for all.
        seed: the seed for the initial weights.
    """
    sizes = target.config
    plain = dict.fromkeys(("tie_word_embeddings", "qkv_bias", "attention_bias", "mlp_bias"), False)
    layers = max(1, sizes.num_hidden_layers // _LAYERS)
    body = dataclasses.replace(sizes, num_hidden_layers=layers, sampling=SamplingDefaults(), qk_norm=True, **plain)
    config = BlockConfig(
        body,
        sizes.hidden_size,
        features(sizes.num_hidden_layers),
        block_size=depth,
        mask_id=sizes.vocab_size - 1,
        drafts_from_first=True,
        # A rank that is a multiple of GROUP can be quantised.
        markov=MarkovConfig("vanilla", max(GROUP, sizes.hidden_size // _RANK // GROUP * GROUP)),
        confidence="state and token",
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        own_head=draft_ids is not None,
    )
    block = Block(config, jnp.float32, rngs=nnx.Rngs(seed))
    assert block.markov_head is not None
    # Start with a Markov head that corrects nothing.
    block.markov_head.markov_w2.weight.set_value(jnp.zeros_like(block.markov_head.markov_w2.weight[...]))
    if block.lm_head is not None and block.draft_ids is not None and draft_ids is not None:
        block.draft_ids.set_value(draft_ids_of(draft_ids, sizes.vocab_size))
        block.lm_head.weight.set_value(target.head.wide(draft_ids))
    return block


def score(
    block: Block, target: Llama, tokens: Array, target_states: TargetStates, judge: Judge, depth: int, loss: str
) -> Score:
    """Return the score of the first `depth` draft tokens of many blocks, each predicted from the text before it.

    Args:
        tokens: ``int32[B, S]``.
        target_states: the states of `block.config.features`.
        loss: a key of `jspec.training.losses.LOSSES`.
    """
    starts, drafts = choose_blocks(tokens, judge.learned)
    hidden = run(block, target, tokens, target_states.states, starts)
    markov = None if block.markov_head is None else block.markov_head.initial(len(tokens))
    found = list[Score]()
    for k in range(depth):
        place = jnp.minimum(starts + k, tokens.shape[1] - 2)
        drafts &= (starts + k == place) & _take(judge.learned, place + 1)
        logits, confidence, markov = _predict(block, target, hidden[:, :, k], _take(tokens, place), markov)
        judged = Judge(*(_take(part, place) for part in judge))._replace(learned=drafts)
        found.append(score_one(logits, judged, loss, confidence))
    return by_depth(found)


def choose_blocks(tokens: Array, learned: Array) -> tuple[Array, Array]:
    """Return the positions ``int32[B, A]`` of the blocks' first rows, and whether to train each block, ``bool[B, A]``.

    Blocks start at random positions whose next token is to be learned. Their number is at most 512 per text, and at
    most half of the text's positions. The choice depends only on the batch, so a resumed run makes the same one.
    """
    batch, size = tokens.shape
    wanted = jnp.pad(learned[:, 1:], ((0, 0), (0, 1))) & (jnp.arange(size) > 0)
    lots = jax.random.uniform(jax.random.key(tokens.sum().astype(jnp.uint32)), (batch, size))
    lots, starts = jax.lax.top_k(jnp.where(wanted, lots, -1), min(_MOST_BLOCKS, -(-size // 2)))
    return starts, lots >= 0


def run(block: Block, target: Llama, tokens: Array, states: Array, starts: Array) -> Array:
    """Return the final states ``[B, A, K, E]`` of the rows that predict each block's draft tokens.

    `Block.forward` returns the same for a batch of ``B A`` blocks, but would copy the keys and values of the text for
    each of them.

    Args:
        tokens: ``int32[B, S]``.
        states: ``[B, S, F, E]``, the target's states.
        starts: ``int32[B, A]``, the position of each block's first row.
    """
    config, (batch, count), size = block.config, starts.shape, tokens.shape[1]
    masks = jnp.full((batch, count, config.block_size - 1), config.mask_id)
    rows = jnp.concatenate([_take(tokens, starts)[..., None], masks], axis=2).reshape(batch, -1)
    positions = (starts[..., None] + jnp.arange(config.block_size)).reshape(batch, -1)
    tables, context_tables = (
        rope_tables(at, config.body.rope, config.body.head_dim) for at in (positions, jnp.arange(size)[None])
    )
    context = block.fuse(states, target)
    x = (block.embed_tokens or target.embed_tokens)(rows).astype(context.dtype)
    normed, layers = block.layers[0].input_layernorm(x), [*block.layers]
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        attention = layer.self_attn
        q, k, v = attention.split(attention.qkv_proj(normed))
        context_k, context_v = attention.keys_and_values(context)
        past = rotate(context_k, context_tables), context_v
        mixed = _attend(rotate(q, tables), (rotate(k, tables), v), past, starts, config.causal)
        x, normed = add_and_norm(x, mixed, attention.o_proj, layer.post_attention_layernorm)
        norm = block.norm if following is None else following.input_layernorm
        x, normed = add_and_norm(x, layer.mlp(normed), layer.mlp.down_proj, norm)
    first = 0 if config.drafts_from_first else 1
    return normed.reshape(batch, count, config.block_size, -1)[:, :, first:]


def _attend(q: Array, own: tuple[Array, Array], past: tuple[Array, Array], starts: Array, is_causal: bool) -> Array:
    """Let each block's rows attend to the text before the block, and to each other.

    Args:
        q: ``[B, H, A R, D]``.
        own: the rows' keys and values ``[B, G, A R, D]``.
        past: the text's keys and values ``[B, G, S, D]``.
        starts: ``int32[B, A]``.

    Returns:
        ``[B, A R, H D]``.
    """
    (batch, heads, total, width), groups, count = q.shape, past[0].shape[1], starts.shape[1]
    rows, size = total // count, past[0].shape[2]
    q = q.reshape(batch, groups, heads // groups, count, rows, width)
    keys, values = (part.reshape(batch, groups, count, rows, width) for part in own)
    before = jnp.arange(size) < starts[..., None]
    among = np.tril(np.ones((rows, rows), bool)) if is_causal else np.ones((rows, rows), bool)
    scores = [
        jnp.where(before[:, None, None, :, None], einsum("bghard,bgtd->bghart", q, past[0], jnp.float32), -jnp.inf),
        jnp.where(among, einsum("bghard,bgatd->bghart", q, keys, jnp.float32), -jnp.inf),
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) / math.sqrt(width), axis=-1).astype(q.dtype)
    mixed = einsum("bghart,bgtd->bghard", weights[..., :size], past[1], jnp.float32)
    # XLA's CPU backend rejects this bfloat16 product for large batches, so compute it in float32.
    own_weights, values = (part.astype(jnp.float32) for part in (weights[..., size:], values))
    mixed += einsum("bghart,bgatd->bghard", own_weights, values)
    return jnp.moveaxis(mixed.astype(q.dtype).reshape(batch, heads, total, width), 1, 2).reshape(batch, total, -1)


def _predict(
    block: Block, target: Llama, hidden: Array, before: Array, markov: Array | None
) -> tuple[Array, Array | None, Array | None]:
    """Return the logits ``[B, A, D]`` and the confidence ``[B, A]`` of the rows with states ``hidden[B, A, E]``.

    Args:
        before: ``int32[B, A]``, the tokens before those to predict.
        markov: the Markov head's states before these tokens. Those after them are returned, too.
    """
    logits, head = block.logits(hidden, target), block.markov_head
    if head is not None and markov is not None:
        markov = jnp.broadcast_to(markov, (*before.shape, markov.shape[-1]))
        correction, markov = head(markov, before, hidden)
        logits += correction
    return logits, block.confidence(hidden, before), markov


def _take(rows: Array, places: Array) -> Array:
    """Return ``rows[b, places[b, a]]`` for ``rows[B, S, ...]`` and ``places[B, A]``."""
    return jax.vmap(functools.partial(jnp.take, axis=0))(rows, places)
