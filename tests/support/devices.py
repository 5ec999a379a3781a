"""Cases that test_sharding.py runs in a process with four devices; print the result of each case in the named set."""

import collections
import functools
import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jspec
from jspec.bundled import PAIR
from jspec.core.types import pytree
from jspec.drafters import AutoregressiveDrafter
from jspec.drafters.draft_length import DEFAULT
from jspec.models.llama import stored_orders
from support import drafters, eagle_heads, toys
from support.sharded_weights import changed, placed

NEW, K = 8, 2
EXCHANGES = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?[(]"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TARGET = toys.tiny_llama(0, **HEADS)
DRAFT = toys.tiny_llama(1, 1, related_to=TARGET, **HEADS)
QWEN = toys.tiny_llama(2, qkv_bias=True, qk_norm=True, **HEADS)


@functools.cache
def lawless():
    """Return a copy of `TARGET` that has no valid distribution after it reads token 7."""
    model = jax.tree.map(lambda leaf: leaf, TARGET)
    model.embed_tokens.weight.set_value(model.embed_tokens.weight[...].at[:, 7].set(jnp.nan))
    return model


def request(rich=False):
    """Return four rows: tokens, lengths, keys, EOS ids and sampling parameters.

    If `rich`, the parameters are of all kinds, and one row contains token 7.
    """
    tokens = np.random.default_rng(0).integers(0, 7, (4, 6)).astype(np.int32)
    batch = tokens, np.array([6, 3, 1, 4]), jax.random.split(jax.random.key(0), 4)
    if not rich:
        return *batch, np.full((4, 1), -1), {}
    tokens[3, 0] = 7
    options, bias = drafters.every_parameter(4, 8), np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    fields = {name: value for name, value in vars(options["sampling"]).items() if np.ndim(value)}
    bias[:, 7] = -np.inf
    return *batch, options["eos_ids"], fields | {"logit_bias": bias}


def decode(models, request, **options):
    """Decode `request`, plainly if there is no drafter."""
    *batch, eos_ids, fields = request
    options |= {"max_new_tokens": NEW, "eos_ids": eos_ids, "sampling": jspec.SamplingParams(**fields)}
    target, drafter = models
    if drafter is None:
        return jspec.generate(target, *batch, **options)
    return jspec.speculative_generate(target, drafter, *batch, **{"num_draft_tokens": K} | options)


def mesh_of(shape, kind):
    """Return a mesh of this shape on as many devices as it needs."""
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))


def program(models, request, options, shape, kind, manual=False, tensor=False):
    """Return the jitted program and its arguments, on a mesh."""
    mesh = mesh_of(shape, kind)
    request = jax.device_put(request, NamedSharding(mesh, P("data")))
    models = jax.device_put(models, NamedSharding(mesh, P()))
    if tensor:
        models = placed(models[0], jspec.tensor_parallel(mesh)), models[1]
    run = functools.partial(decode, **options)
    if manual:
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    return jax.jit(run), models, request


def compare(models, request, options, *place, **how):
    """Compare with one device: return whether all integers are equal, the largest float error, and the collectives."""
    expected = jax.device_get(decode(models, request, **options))
    run, *arguments = program(models, request, options, *place, **how)
    compiled = run.lower(*arguments).compile()
    out = jax.device_get(compiled(*arguments))
    pairs = list(zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True))
    off = max(np.max(np.abs(one - other)) for one, other in pairs if one.dtype == np.float32)
    return {
        "same": all(np.array_equal(*pair) for pair in pairs if pair[0].dtype != np.float32),
        "off": float(off),
        "invalid": out.stats.invalid.tolist(),
        "accepted": int(out.stats.accepted.sum()),
        "exchanges": dict(collections.Counter(re.findall(EXCHANGES, compiled.as_text()))),
    }


def traced(name):
    """Check that this drafter's loops close under `jax.shard_map`; `UpTo` makes more loops than a number."""
    drafter = Fresh() if name == "fresh" else drafters.make(name, TARGET, DRAFT)
    run, *arguments = program(
        (TARGET, drafter), request(), {"num_draft_tokens": jspec.UpTo(K)}, (2, 1), AUTO, manual=True
    )
    run.trace(*arguments)


@pytree
class Fresh(AutoregressiveDrafter):
    """A drafter that carries, within and between drafts, state that at first is the same everywhere."""

    vocab_size = max_positions = None

    def init(self, tokens, num_slots):
        return jnp.zeros(len(tokens))

    def begin(self, state, context, tree):
        return jnp.zeros((context.lengths.size, 8)), jnp.zeros(context.lengths.size)

    def extend(self, carry, tokens, level, context):
        return jnp.zeros((*tokens.shape, 8)), carry + tokens.sum(1)

    def end(self, carry):
        return carry


def keys_alone():
    """Trace the same prompts with different keys on every device."""
    tokens, lengths, keys, ends, _ = request()

    def run(keys):
        return decode((TARGET, DRAFT), (tokens[:2], lengths[:2], keys, ends[:2], {"top_p": 0.9}))

    run = jax.shard_map(run, mesh=mesh_of((2, 1), AUTO), in_specs=P("data"), out_specs=P("data"))
    jax.jit(run).trace(keys)


def with_rows_of_the_target(kind):
    """Return whether a head that uses rows of the divided target's output head gives one device's output."""
    head = jspec.EagleDrafter(eagle_heads.eagle(TARGET, 3, draft_vocab_size=4, own_head=True))
    divided = placed(TARGET, jspec.tensor_parallel(mesh_of((1, 2), kind)))
    with tempfile.TemporaryDirectory() as folder:
        path = head.save(Path(folder) / "head", own_head=False)
        models = [(target, jspec.EagleDrafter.load(path, target)) for target in (TARGET, divided)]
    one, other = (jax.device_get(decode(pair, request())) for pair in models)
    return bool(one.stats.accepted.sum()) and np.array_equal(one.tokens, other.tokens)


def with_few_tokens(kind):
    """Return whether a divided draft model with few tokens stays divided and gives the output of one device."""
    mesh, tokens = mesh_of((1, 2), kind), [6, 1, 3]
    target, draft = (placed(model, jspec.tensor_parallel(mesh)) for model in (TARGET, DRAFT))
    drafter = jspec.ModelDrafter.with_vocabulary(draft, tokens)
    one = jax.device_get(decode((TARGET, jspec.ModelDrafter.with_vocabulary(DRAFT, tokens)), request()))
    other = jax.device_get(decode((target, drafter), request()))
    divided = drafter.model.head.weight[...].addressable_shards[0].data.shape == (8, 3)
    return divided and bool(one.stats.accepted.sum()) and np.array_equal(one.tokens, other.tokens)


def loaded(kind, bits="int8"):
    """Return how a quantized draft's weights are divided, and check that they equal those of one device."""
    model = jspec.load(PAIR / "draft", quantize=bits, sharding=jspec.tensor_parallel(mesh_of((1, 2), kind)))
    expected = nnx.to_flat_state(nnx.state(jspec.load(PAIR / "draft", quantize=bits, packed=False)))
    found, orders = dict(nnx.to_flat_state(nnx.state(model))), stored_orders(model)
    assert len(orders) == 2 * len(model.layers)
    for path, leaf in expected:
        array, order = np.asarray(leaf[...]), orders.get(f"{'.'.join(map(str, path)).partition('.parts.')[0]}.weight")
        assert np.array_equal(found[path][...], array if order is None else array[:, order]), path
    names = {path: f"{path[-4 if 'parts' in path else -2]}.{path[-1]}" for path in found}
    shapes = ((path, leaf[...].shape, leaf[...].addressable_shards[0].data.shape) for path, leaf in found.items())
    return {names[path]: tuple(np.floor_divide(whole, part).tolist()) for path, whole, part in shapes}


def refused(sharding):
    return jspec.load(PAIR / "draft", sharding=sharding) and None


def partly_manual():
    """Trace a program whose rows are divided by `jax.shard_map`, and its weights by XLA."""
    mesh = mesh_of((2, 2), EXPLICIT)
    run = jax.shard_map(decode, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"})
    jax.jit(run).trace((TARGET, DRAFT), jax.device_put(request(), NamedSharding(mesh, P("data"))))


def documented(small=True):
    """Return the outputs of docs/sharding.md, whose blocks form one program; `small` replaces the bundled models."""
    text = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text(encoding="utf-8")
    names, texts, bundled = {}, [], jspec.demo_pair
    if small:
        model, tokenizer = jspec.Llama(toys.llama_config(1, 2048), rngs=nnx.Rngs(0)), bundled()[2]
        jspec.demo_pair = lambda sharding: (placed(model, sharding), placed(model, sharding), tokenizer)
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block, names)
        texts.append(np.asarray(names["out"].tokens).tolist())
    jspec.demo_pair = bundled
    return texts


def half():
    """Return whether the bfloat16 output is the same as on one device."""
    models = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (TARGET, DRAFT))
    return compare(models, request(), {}, (2, 1), EXPLICIT)["same"]


def vmapped(kind, *place):
    """Return whether two vmapped batches, divided by batch or by row, give the output of one batch alone."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), request())
    stacked = jax.device_put(stacked, NamedSharding(mesh_of((2, 1), kind), P(*place)))
    out = jax.jit(jax.vmap(functools.partial(decode, (TARGET, DRAFT))))(stacked)
    return np.array_equal(out.tokens, [decode((TARGET, DRAFT), request()).tokens] * 2)


def tuned():
    """Run "auto" on a divided batch, and return the K that is found for it."""
    rows = NamedSharding(mesh_of((2, 1), EXPLICIT), P("data"))
    batch = jax.device_put(request()[:3], rows)
    jspec.speculative_generate(TARGET, DRAFT, *batch, max_new_tokens=NEW, num_draft_tokens="auto")
    return jspec.tune(TARGET, DRAFT, *batch, max_new_tokens=12, max_draft_tokens=K).num_draft_tokens


def called():
    """Return whether calling a model by itself, as docs/sharding.md describes, gives the right logits."""
    mesh = mesh_of((2, 1), EXPLICIT)
    tokens = request()[0]
    with jax.set_mesh(mesh):
        divided = jax.sharding.auto_axes(TARGET, out_sharding=P("data"))(jax.device_put(tokens, P("data")))
    return bool(np.allclose(divided, TARGET(tokens), atol=1e-5))


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
PLAIN, RICH = ((QWEN, None), request(), {}), ((lawless(), DRAFT), request(rich=True), {})
TREE = jspec.TreeDrafter(DRAFT, jspec.Tree.branching((2, 1)))
SEARCH = jspec.DynamicTreeDrafter(DRAFT, num_nodes=4, max_depth=2, width=2)
RULES = "block", "coupled", jspec.Lenient(0.5)
LENGTHS = (
    jspec.UpTo(K),
    jspec.WhileConfident(K),
    jspec.Heuristic(K),
    jspec.ByAcceptance(K),
    jspec.ByEstimatedAcceptance(K),
)
QUICK = {
    "text: explicit, rows": functools.partial(compare, *RICH, (2, 1), EXPLICIT),
    "text: explicit, rows and weights": functools.partial(compare, *RICH, (2, 2), EXPLICIT, tensor=True),
    "text: automatic, rows, plain": functools.partial(compare, *PLAIN, (2, 1), AUTO),
    "text: automatic, weights, plain": functools.partial(compare, *PLAIN, (1, 2), AUTO, tensor=True),
    "text: explicit, rows, tree": functools.partial(
        compare,
        (lawless(), TREE),
        request(rich=True),
        {"num_draft_tokens": DEFAULT, "accept": "traversal"},
        (2, 1),
        EXPLICIT,
    ),
    "text: shard_map, dynamic tree": functools.partial(
        compare,
        (lawless(), SEARCH),
        request(rich=True),
        {"num_draft_tokens": DEFAULT, "accept": "coupled"},
        (2, 1),
        AUTO,
        manual=True,
    ),
    "text: shard_map": functools.partial(compare, *RICH, (2, 1), AUTO, manual=True),
    **{f"traced: {name}": functools.partial(traced, name) for name in (*drafters.NAMES, "fresh")},
    "traced: keys alone": keys_alone,
    "loaded: explicit": functools.partial(loaded, EXPLICIT),
    "loaded: automatic": functools.partial(loaded, AUTO),
    "loaded: explicit, int4": functools.partial(loaded, EXPLICIT, "int4"),
    "loaded: automatic, int4": functools.partial(loaded, AUTO, "int4"),
    "changed: automatic": lambda: changed(mesh_of((1, 2), AUTO)),
    "changed: explicit": lambda: changed(mesh_of((1, 2), EXPLICIT)),
    "head: explicit": functools.partial(with_rows_of_the_target, EXPLICIT),
    "head: automatic": functools.partial(with_rows_of_the_target, AUTO),
    "head: few tokens, explicit": functools.partial(with_few_tokens, EXPLICIT),
    "head: few tokens, automatic": functools.partial(with_few_tokens, AUTO),
    "refused: no such axis": lambda: jspec.tensor_parallel(mesh_of((1, 2), AUTO), "tensor") and None,
    "refused: no sharding": lambda: refused(P()),
    "refused: gives none": lambda: refused(lambda name, shape: P()),
    "refused: rank": lambda: refused(NamedSharding(mesh_of((1, 2), AUTO), P(None, "model"))),
    "refused: uneven": lambda: refused(jspec.tensor_parallel(mesh_of((1, 3), AUTO))),
    "refused: part of a mesh": partly_manual,
    "documented: text": documented,
}


def every_program():
    """Yield a name with models and options, for every drafter, rule and kind of draft length."""
    for name in drafters.NAMES:
        yield name, ((TARGET, drafters.make(name, TARGET, DRAFT)), request(), {})
    for rule in RULES:
        yield str(rule), ((TARGET, DRAFT), request(), {"accept": rule})
    for length in LENGTHS:
        yield str(length), ((TARGET, DRAFT), request(), {"num_draft_tokens": length})
    for rule in ("rejection", "traversal", "coupled"):
        yield f"tree, {rule}", ((TARGET, TREE), request(), {"accept": rule, "num_draft_tokens": DEFAULT})
    yield "dynamic tree", ((TARGET, SEARCH), request(), {"accept": "coupled", "num_draft_tokens": DEFAULT})
    yield "int8", ((jspec.quantize(TARGET, "int8"), jspec.quantize(DRAFT, "int8")), request(), {})


SLOW = {
    **{f"explicit, {name}": functools.partial(compare, *what, (2, 1), EXPLICIT) for name, what in every_program()},
    **{
        f"shard_map, {name}": functools.partial(compare, *what, (2, 1), EXPLICIT, manual=True)
        for name, what in every_program()
    },
    **{
        f"weights, {name}": functools.partial(compare, *what, (1, 2), EXPLICIT, tensor=True)
        for name, what in every_program()
    },
    "half precision": half,
    **{
        f"vmap, {kind}, {place}": functools.partial(vmapped, kind, *place)
        for kind in (EXPLICIT, AUTO)
        for place in (("data",), (None, "data"))
    },
    "tuned": tuned,
    "called": called,
    "documented": lambda: len({str(text) for text in documented(small=False)}) == 1,
}


def play(case):
    try:
        return case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    cases = {"quick": QUICK, "slow": SLOW}[sys.argv[1]]
    for name, case in cases.items():
        print(json.dumps([name, play(case)]), flush=True)
