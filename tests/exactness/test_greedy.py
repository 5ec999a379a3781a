"""Greedy output: plain decoding = speculative decoding = transformers, token for token, in float32.

If the two most likely tokens are closer than rounding errors, programs of other shapes may legitimately differ. Such
near ties are counted separately and reported; none is expected.
"""

import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest

import jspec
from jspec.bundled import PAIR
from support.few import by_default

PROMPTS, NEW = 200, 128
GREEDY = jspec.SamplingParams(temperature=0.0)
ROUNDING = 1e-5


def _first_difference(ours, theirs):
    """Return the column of each row's first differing token, or the row's length."""
    differs = ours != theirs
    return np.where(differs.any(1), differs.argmax(1), ours.shape[1])


def _gaps(model, tokens, lengths, new):
    """Return the lead of the most likely token over the second, ``[B, N]``, at every position of the output ``new``."""
    width = tokens.shape[1]
    text = np.zeros((len(lengths), width + new.shape[1]), np.int32)
    for row, (length, prompt, more) in enumerate(zip(lengths, tokens, new, strict=True)):
        text[row, : length + len(more)] = np.concatenate([prompt[:length], more])
    top_two = jax.jit(lambda model, text: jax.lax.top_k(model(text), 2)[0])(model, text)
    gaps = np.asarray(top_two[..., 0] - top_two[..., 1])
    return np.stack([row[n - 1 : n - 1 + new.shape[1]] for row, n in zip(gaps, lengths, strict=True)])


def _check_same(report, ours, theirs, gaps, **figures):
    first = _first_difference(ours, theirs)
    wrong = first < ours.shape[1]
    tied = np.array([gaps[row, column] < ROUNDING for row, column in enumerate(first * wrong)]) & wrong
    report(
        **figures,
        texts=len(ours),
        tokens=ours.size,
        identical=f"{1 - wrong.mean():.1%}",
        near_ties=tied.sum(),
        unexplained=(wrong & ~tied).sum(),
    )
    assert not (wrong & ~tied).any()
    assert tied.sum() <= 1


@pytest.fixture(scope="module")
def case(toy, prompts):
    """Return a toy target, prompts of 1 to 60 tokens, its greedy output, and the lead of each output token."""
    target = toy(3, num_key_value_heads=4)
    tokens, lengths, keys = prompts(np.random.default_rng(0).integers(1, 61, PROMPTS), seed=4)
    plain = jspec.generate(target, tokens, lengths, keys, max_new_tokens=NEW, sampling=GREEDY)
    plain = np.asarray(plain.tokens)
    return target, (tokens, lengths, keys), plain, _gaps(target, tokens, lengths, plain)


def test_toy_text_is_varied(case, report):
    _, _, plain, gaps = case
    report(
        distinct_texts=len(np.unique(plain, axis=0)),
        distinct_tokens=len(np.unique(plain)),
        smallest_gap=f"{gaps.min():.1e}",
    )
    assert len(np.unique(plain, axis=0)) > PROMPTS - 5  # one-token prompts may coincide
    assert len(np.unique(plain)) > 40


@pytest.mark.parametrize("num_draft_tokens", by_default((1, 3, 5, 8), (3,)))
def test_speculative_text_equals_plain_text(case, toy, num_draft_tokens, report):
    """This holds for draft models that are never, sometimes and always right. One program serves all three."""
    target, batch, plain, gaps = case
    near = toy(3, distance=0.06, num_key_value_heads=4)
    far = toy(5, num_key_value_heads=4)
    for name, draft in {"unrelated": far, "related": near, "itself": target}.items():
        out = jspec.speculative_generate(
            target, draft, *batch, max_new_tokens=NEW, num_draft_tokens=num_draft_tokens, sampling=GREEDY
        )
        rate = np.sum(out.stats.accepted) / np.sum(out.stats.drafted)
        _check_same(report, np.asarray(out.tokens), plain, gaps, draft=name, accepted=f"{rate:.1%}")
        low, high = {"unrelated": (0, 0.1), "related": (0.2, 0.9), "itself": (1, 1)}[name]
        assert low <= rate <= high


def _hf_greedy(model, tokens, lengths, new):
    """Return the tokens that transformers' `model.generate(do_sample=False)` adds to a left-padded batch."""
    import torch

    width = tokens.shape[1]
    ids, mask = np.zeros((2, len(lengths), width), np.int64)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = tokens[row, :length]
        mask[row, width - length :] = 1
    with torch.no_grad():
        options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask), **options)
    return out[:, width:].numpy()


def _hf_twin(target):
    """Return the transformers model with the weights of `target`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = target.config
    sizes = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    )
    fields = {name: getattr(config, name) for name in sizes}
    twin = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, tie_word_embeddings=False)).eval()
    state = {
        "lm_head.weight": target.lm_head.weight,
        "model.norm.weight": target.norm.weight,
        "model.embed_tokens.weight": target.embed_tokens.weight,
    }
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for i, layer in enumerate(target.layers):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}{name}.weight"] = getattr(layer, name).weight
        parts = np.split(layer.self_attn.qkv_proj.weight[...], np.array([heads, heads + groups]) * size, axis=1)
        parts += np.split(layer.mlp.gate_up_proj.weight[...], 2, axis=1)
        parts += [layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight]
        names = [f"self_attn.{one}_proj" for one in "qkv"]
        names += ["mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj", "mlp.down_proj"]
        state |= {f"{prefix}{name}.weight": part for name, part in zip(names, parts, strict=True)}
    twin.load_state_dict({name: torch.tensor(np.array(weight[...]).T.copy()) for name, weight in state.items()})
    return twin


def test_plain_text_matches_transformers(case, report):
    target, (tokens, lengths, _), plain, gaps = case
    _check_same(report, plain, _hf_greedy(_hf_twin(target), tokens, lengths, NEW), gaps)


def _source_prompts(tokenizer, count, seed):
    """Return slices of the standard library's source, 5 to 60 tokens long, padded on the right."""
    rng = np.random.default_rng(seed)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows = []
    while len(rows) < count:
        text = files[rng.integers(len(files))].read_text(encoding="utf-8", errors="ignore")
        start, length = rng.integers(max(1, len(text) - 400)), rng.integers(5, 61)
        ids = tokenizer.encode(text[start : start + 400])[:length]
        if len(ids) == length:
            rows.append(ids)
    lengths = np.array([len(row) for row in rows], np.int32)
    return np.stack([np.pad(row, (0, 60 - len(row))) for row in rows]).astype(np.int32), lengths


def _check_bundled_pair(report, count, new, drafts):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    target, draft, tokenizer = jspec.demo_pair(dtype=np.float32)
    tokens, lengths = _source_prompts(tokenizer, count, seed=11)
    keys = jax.random.split(jax.random.key(0), count)
    plain = jspec.generate(target, tokens, lengths, keys, max_new_tokens=new, sampling=GREEDY)
    plain = np.asarray(plain.tokens)
    gaps = _gaps(target, tokens, lengths, plain)
    twin = transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype="float32").eval()
    _check_same(report, plain, _hf_greedy(twin, tokens, lengths, new), gaps, against="transformers")
    for num_draft_tokens, name in drafts:
        out = jspec.speculative_generate(
            target,
            {"bundled": draft, "itself": target}[name],
            tokens,
            lengths,
            keys,
            max_new_tokens=new,
            num_draft_tokens=num_draft_tokens,
            sampling=GREEDY,
        )
        rate = np.sum(out.stats.accepted) / np.sum(out.stats.drafted)
        _check_same(report, np.asarray(out.tokens), plain, gaps, draft=name, k=num_draft_tokens, accepted=f"{rate:.1%}")
        assert rate == 1 if name == "itself" else rate > 0.1


def test_bundled_pair_is_greedy_exact(report, quick_compile):
    _check_bundled_pair(report, 8, 24, [(4, "bundled")])


@pytest.mark.slow
def test_bundled_pair_is_greedy_exact_in_full(report):
    bundled = [(k, "bundled") for k in (1, 3, 5, 8)]
    _check_bundled_pair(report, PROMPTS, NEW, [*bundled, (4, "itself")])
