"""The compiled generation program: compiled once, usable inside other programs, with no cache copy in its loop."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.decoding.inputs import ProgramSpec, PromptBatch
from jspec.decoding.program import decode_program, traced
from jspec.drafters.base import own_tree, tree_of
from jspec.drafters.draft_length import Fixed
from jspec.models.kv_cache import whole_tiles
from support import drafters
from support.few import by_default

SIZE, NEW, K = 3, 12, 2
HEADS = (*drafters.HEADS, "vectors", "eagle", "eagle 3")


@pytest.fixture(scope="module")
def models(toy):
    return toy(0), toy(0, distance=0.1)


def _settings(rng, size):
    """Return random sampling parameters. The same fields are always given; only their values change."""
    return jspec.SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0], size),
        top_k=rng.integers(0, 61, size),
        top_p=rng.uniform(0.1, 1, size),
        min_p=float(rng.uniform(0.01, 0.2)),
        repetition_penalty=float(rng.uniform(1.01, 1.5)),
        max_tokens=rng.integers(0, NEW, size),
    )


def test_one_compilation_serves_all_calls_of_a_shape(models, prompts, quick_compile, compilations, report):
    rng = np.random.default_rng(0)
    batches = [prompts(rng.integers(1, 7, SIZE), seed=seed, width=6) for seed in range(101)]
    texts = set()

    def call(i):
        out = jspec.speculative_generate(
            *models,
            *batches[i],
            max_new_tokens=NEW,
            num_draft_tokens=K,
            sampling=_settings(rng, SIZE),
            eos_ids=rng.integers(0, 61, 2),
            pad_id=int(rng.integers(61)),
        )
        texts.add(np.asarray(out.tokens).tobytes())

    call(0)
    before, programs = compilations(), decode_program._cache_size()
    assert before > 0  # the listener receives events
    for i in range(1, 101):
        call(i)
    report(calls=100, distinct_outputs=len(texts), compilations=compilations() - before)
    assert len(texts) == 101
    assert compilations() == before
    assert decode_program._cache_size() == programs


@pytest.fixture
def outside(models, prompts, quick_compile):
    """Return two stacked batches, and their output tokens from standalone calls."""
    batches = [prompts([4, 1, 6], seed=seed) for seed in (1, 2)]
    outs = [jspec.speculative_generate(*models, *b, max_new_tokens=NEW, num_draft_tokens=K) for b in batches]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    return stacked, np.stack([out.tokens for out in outs])


def _call(models, batch, **options):
    return jspec.speculative_generate(*models, *batch, max_new_tokens=NEW, num_draft_tokens=K, **options)


def test_jit_gives_same_output(models, outside):
    batches, expected = outside
    batch = jax.tree.map(lambda leaf: leaf[0], batches)
    np.testing.assert_array_equal(jax.jit(_call)(models, batch).tokens, expected[0])


def test_sampling_and_eos_ids_may_be_traced(models, outside):
    batch = jax.tree.map(lambda leaf: leaf[1], outside[0])
    sampling = jspec.SamplingParams(temperature=jnp.array([0.0, 0.5, 1.0]), top_k=jnp.array([0, 9, 3]))
    options = {"sampling": sampling, "eos_ids": jnp.array([3, 4]), "pad_id": jnp.array(7)}
    inside = jax.jit(lambda models, batch, options: _call(models, batch, **options))(models, batch, options)
    np.testing.assert_array_equal(inside.tokens, _call(models, batch, **options).tokens)


def test_scan_gives_same_output(models, outside):
    batches, expected = outside
    tokens = jax.jit(lambda: jax.lax.scan(lambda _, batch: (None, _call(models, batch).tokens), None, batches)[1])()
    np.testing.assert_array_equal(tokens, expected)


def test_vmap_gives_same_output(models, outside):
    batches, expected = outside
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda batch: _call(models, batch).tokens))(batches), expected)


def _computations(hlo):
    """Return the instruction lines of every computation in an HLO module's text, keyed by name."""
    found, name = {}, None
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{?.*\{$", line):
            name = header[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line.strip())
    return found


def _reached(computations, root):
    """Return all instructions of `root` and of the computations that it calls."""
    lines, waiting, seen = [], [root], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        lines += computations[name]
        for line in computations[name]:
            waiting += [called for called in re.findall(r"%([\w.\-]+)", line) if called in computations]
    return lines


def _shape_and_op(line):
    """Return ``f32[2,3]`` and ``copy`` for ``%x = f32[2,3]{1,0} copy(...)``; a tuple has None as its shape."""
    match = re.match(r"(?:ROOT )?%?[\w.\-]+ = (?:(\w+\[[\d,]*\])\S*|\(.*?\)) ([\w\-]+)\(", line)
    return (match[1], match[2]) if match else (None, None)


@pytest.mark.parametrize(
    "kind",
    ["plain", "model", "early exit", "varying length", *(pytest.param(name, marks=pytest.mark.slow) for name in HEADS)],
)
@pytest.mark.parametrize("rows", by_default((1, 5), (5,)))
def test_decode_loop_copies_no_cache_and_never_calls_host(toy, prompts, rows, kind, as_shipped, report):
    """The widths are odd, so that no other array has a cache's size."""
    target, draft = toy(0, num_hidden_layers=2), toy(0, num_key_value_heads=4)
    batch, new, k = prompts([7, 3, 1, 2, 5][:rows]), 31, 0 if kind == "plain" else K
    if kind in HEADS:
        drafter = drafters.make(kind, target, draft)
    else:
        drafter = {"plain": None, "early exit": jspec.EarlyExitDrafter(1)}.get(kind, jspec.ModelDrafter(draft))
    k = k if own_tree(drafter) is None else drafter.tree.max_depth
    draft_length = jspec.Heuristic(k) if kind == "varying length" else Fixed(k)
    spec = ProgramSpec(new, draft_length, RULES["rejection"])
    params = traced(jspec.SamplingParams(), (5,), 0)
    lowered = decode_program.lower(target, drafter, PromptBatch(*batch), params, spec=spec)
    program = lowered.compile(as_shipped).as_text()
    slots = whole_tiles(7 + new + tree_of(drafter, k).size + 1)
    sizes = {rows * heads * slots * 8 for heads in ((2, 4) if k else (2,))}
    computations = _computations(program)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", program, re.M)[1]
    body = [line for line in computations[entry] if _shape_and_op(line)[1] == "while"]
    assert len(body) == 1
    lines = _reached(computations, re.search(r"body=%?([\w.\-]+)", body[0])[1])
    shapes = [_shape_and_op(line) for line in lines]

    def size(shape):
        return math.prod(map(int, filter(None, shape.split("[")[1].rstrip("]").split(","))))

    of_cache = [(shape, op) for shape, op in shapes if shape and size(shape) in sizes]
    copies = [(shape, op) for shape, op in of_cache if op in ("copy", "copy-start", "transpose", "concatenate")]
    host = [line for line in lines if re.search(r"\b(infeed|outfeed|send|recv)\(|callback|python", line)]
    report(instructions=len(lines), cache_sized=len(of_cache), copies=len(copies), host_calls=len(host))
    assert len(of_cache) > 4  # the parser sees the caches
    assert not copies
    assert not host


def test_number_types_do_not_cause_recompilation(models, prompts, quick_compile):
    batch = prompts([4, 1, 6], seed=1)

    def call(temperature, max_tokens):
        settings = jspec.SamplingParams(temperature=temperature, max_tokens=max_tokens)
        out = jspec.speculative_generate(*models, *batch, max_new_tokens=NEW, num_draft_tokens=K, sampling=settings)
        return np.asarray(out.tokens), decode_program._cache_size()

    text, programs = call(0, 3)
    for temperature, max_tokens in ((0.0, 3.0), (np.float32(0), np.int64(3)), (np.float64(0), np.float32(3))):
        again, programs_now = call(temperature, max_tokens)
        np.testing.assert_array_equal(text, again)
        assert programs_now == programs


def test_decoding_works_with_64_bit_types_enabled(models, prompts, quick_compile):
    tokens, lengths, keys = prompts([4, 1, 6], seed=1)
    sampling = jspec.SamplingParams(temperature=np.array([0.0, 1.0, 0.7]), max_tokens=np.array([0, 9, 5]))
    options = {"max_new_tokens": NEW, "sampling": sampling}
    expected = jspec.speculative_generate(*models, tokens, lengths, keys, **options)
    with jax.enable_x64(True):
        out = jspec.speculative_generate(*models, tokens.astype(np.int64), lengths, keys, **options)
    jax.tree.map(np.testing.assert_array_equal, (out.tokens, out.stats), (expected.tokens, expected.stats))
