"""Programs compiled by XLA for an H100, a T4 and a TPU v5e, without any of these devices. See .ci/devices."""

import dataclasses
import functools
import math
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jspec
from bench import abstract, compiled, devices, graphs
from bench.hlo import arrays
from bench.pairs import SHAPES
from jspec.acceptance import RULES
from jspec.engine.program_table import function_and_inputs
from jspec.engine.runner import Runner
from jspec.engine.slots import Sizes, Variant
from jspec.planning import roofline
from jspec.planning.block_costs import BlockWeights
from jspec.planning.memory import Weights, footprint, slots_of
from jspec.training import fit, kinds
from support import cover
from support.caches import copies_of_a_cache

PAIRS = {"h100": "llama-3.2-3b/llama-3.2-1b", "t4": "llama-3.2-3b/llama-3.2-1b", "v5e": "109m"}
# Head sizes that the fused kernels support.
SIZES = {"hidden_size": 128, "head_dim": 64, "vocab_size": 512}
ON = [pytest.param(name, marks=getattr(pytest.mark, devices.DEVICES[name].platform)) for name in PAIRS]
GPUS = [pytest.param("h100", marks=pytest.mark.cuda), pytest.param("t4", marks=pytest.mark.cuda)]


@functools.cache
def program(name, plain=False, batch=1, layers=2, kind=None, **options):
    """Compile a pair with few layers, quantised to `kind`; `options` are passed to XLA."""
    device = devices.prepare(name)
    configs = (dataclasses.replace(config, num_hidden_layers=layers) for config in abstract.configs(PAIRS[name]))
    models = tuple(abstract.model(config, device.dtype, kind) for config in configs)
    setting = abstract.Setting(batch, draft_length=0 if plain else 4)
    traced = abstract.trace(*models, setting, devices.topology(device))
    return compiled.read(*graphs.compiled(traced.lower(), options)), models, setting


def large(kernels, models, setting):
    """Return kernels without a product that write arrays as large as a matrix or a layer's cache (no distributions)."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: [model.new_cache(setting.batch, 512) for model in models]))
    leaves += [leaf for leaf in jax.tree.leaves(models) if len(leaf.shape) > 1]
    least, vocab = min(leaf.size for leaf in leaves), models[0].config.vocab_size
    return [
        kernel
        for kernel in kernels
        if kernel.moves
        for _, sizes in arrays(kernel.shape)
        if math.prod(sizes) >= least and vocab not in sizes
    ]


def widening_kernels(kernels, models):
    """Return kernels that compute no product but write an array as large as a matrix."""
    hidden, vocab = models[1].config.hidden_size, models[0].config.vocab_size
    found = []
    for kernel in kernels:
        for _, sizes in arrays(kernel.shape):
            least = hidden * (vocab if vocab in sizes else hidden)
            # `written` excludes kernels that update a small part of an array in place.
            if not kernel.flops and math.prod(sizes) >= least and kernel.written >= 2 * least:
                found.append(kernel)
    return found


def check(found, models, setting):
    assert not large(found.kernels, models, setting)
    assert written_once(found.prefill, models, setting)
    # In the loop, nothing waits for the host, and no row waits for another.
    assert (found.loops, found.waits, found.conditionals, found.host) == ([], 0, 0, 0)


def written_once(kernels, models, setting):
    """Return whether prefill writes no weights, and writes each part of the caches once, at its full size."""
    slots = slots_of(setting.width + setting.new_tokens, setting.draft_length)
    caches = jax.tree.leaves(jax.eval_shape(lambda: [model.new_cache(setting.batch, slots) for model in models]))
    # A kernel that writes no memory reads into the TPU's own memory.
    writers = [kernel for kernel in kernels if kernel.written and not kernel.flops]
    found = Counter(sides(sizes) for kernel in writers for _, sizes in arrays(kernel.shape))
    rooms = Counter(sides(leaf.shape) for leaf in caches)
    weights = {sides(leaf.shape) for leaf in jax.tree.leaves(models) if len(leaf.shape) > 1}
    return not weights & found.keys() and all(found[one] <= count for one, count in rooms.items())


def sides(shape):
    """Return an array's sizes above 1, independent of its layout."""
    return tuple(sorted(size for size in shape if size > 1))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "drafting"])
@pytest.mark.parametrize("name", ON)
def test_program_moves_nothing_large(name, plain, batch, report):
    found, models, setting = program(name, plain, batch)
    report(kernels=found.count(), megabytes=round(found.temporary / 1e6))
    check(found, models, setting)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "drafting"])
@pytest.mark.parametrize("name", GPUS)
def test_program_with_library_matmul_moves_nothing_large(name, plain):
    """The kernels that multiply are chosen by measuring on the device; the choice must not matter."""
    check(*program(name, plain, xla_gpu_enable_triton_gemm=False))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "drafting"])
@pytest.mark.parametrize("name", ON)
def test_quantised_matrices_are_read_as_stored(name, plain, batch, kind, report):
    """No matrix is widened in the loop, except on a T4 for more than 32 rows."""
    found, models, _ = program(name, plain, batch, kind=kind)
    moved = sum(kernel.times * (kernel.read + kernel.written) for kernel in found.kernels)
    report(kernels=found.count(), megabytes=round(moved / 1e6))
    reads = {"int8": 0.55, "int4": 0.4}[kind] if batch == 1 and name != "v5e" else math.inf  # v5e: all in its memory
    unquantised = program(name, plain, batch)[0]
    assert moved <= reads * sum(kernel.times * (kernel.read + kernel.written) for kernel in unquantised.kernels)
    if name == "t4" and batch > 1 and not plain:
        assert widening_kernels(found.kernels, models)
    else:
        assert not widening_kernels(found.kernels, models)
    assert (found.loops, found.waits, found.conditionals, found.host) == ([], 0, 0, 0)


@pytest.mark.cuda
def test_h100_layer_uses_few_kernels(report):
    """A layer has few kernels.

    They are attention, the sum of its shares, a norm after each block, four products, a sum of parts, and the
    activation.
    """
    device = devices.prepare("h100")
    few, more = ([*abstract.pair(PAIRS["h100"], device.dtype, num_hidden_layers=n)] for n in (2, 4))
    layers = compiled.by_layer(device, *zip(few, more, strict=True), abstract.Setting())
    base = program("h100", plain=True)[0].count() - 2 * layers["plain"]
    report(**layers, beside_layers=base)
    assert max(layers.values()) <= 10.5 and base + 28 * layers["plain"] <= 328


@pytest.mark.cuda
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "drafting"])
def test_h100_host_launches_few_graphs(plain, report):
    """A round has one graph before the draft loop, one per iteration and one after; loop conditions run alone."""
    found, _, setting = program("h100", plain)
    report(**vars(found.graphs))
    assert found.graphs.captured + found.graphs.outside == found.count()
    assert found.graphs.launched <= setting.draft_length + 1
    assert found.graphs.outside <= 0.1 * found.count()


@pytest.mark.cuda
def test_h100_round_with_block_drafter_copies_no_weights(report):
    """Both models' attention is one kernel, and no product's weights are joined with another's."""
    device = devices.prepare("h100")
    target, drafter = abstract.pair("qwen3-8b/dspark", device.dtype, num_hidden_layers=2)
    found = compiled.compile_and_read(device, target, drafter, abstract.Setting(draft_length=7))
    hidden = target.config.hidden_size
    report(**{part: found.count(part) for part in (*compiled.PARTS, compiled.DRAFT_STEP)})
    assert not [kernel for kernel in found.kernels if kernel.moves and kernel.written >= 2 * hidden * hidden]
    assert (found.loops, found.waits, found.conditionals, found.host) == ([], 0, 0, 0)
    planned = BlockWeights(drafter.block.config, 2).kernels(7) + 2 * 10
    planned += roofline.KERNELS_A_PASS + roofline.KERNELS_A_ROUND
    assert found.count() == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [{}, {"quantized": "int8"}, {"quantized": "int4"}, {"qk_norm": True}, {"attention_bias": True}, {"mlp_bias": True}],
    ids=str,
)
@pytest.mark.parametrize("name", GPUS)
def test_plan_counts_compiled_kernels(name, changes, report):
    device, config = devices.prepare(name), abstract.configs(PAIRS[name])[0]
    more = dict(changes)
    quantized = more.pop("quantized", None)

    def count(layers):
        shallow = dataclasses.replace(config, num_hidden_layers=layers, **more)
        model = abstract.model(shallow, device.dtype, quantized)
        return compiled.compile_and_read(device, model, None, abstract.Setting().plain()).count()

    two, four = count(2), count(4)
    layer = (four - two) / 2
    report(layer=layer, beside=two - 2 * layer)
    planned = roofline.kernels_a_layer(Weights(dataclasses.replace(config, **more), 2, quantized), device.dtype)
    assert layer == pytest.approx(planned, abs=1)
    assert two - 2 * layer == pytest.approx(roofline.KERNELS_A_PASS + roofline.KERNELS_A_ROUND, rel=0.3)


@pytest.mark.parametrize("name", GPUS)
def test_plan_predicts_memory_of_long_prompt(name, report):
    """Plans predict a long prompt's temporaries apart from the caches, which reach full size only at the end."""
    device, setting = devices.prepare(name), abstract.Setting(width=2048, new_tokens=16)
    models = abstract.pair(PAIRS[name], device.dtype, num_hidden_layers=2)
    found = compiled.compile_and_read(device, *models, setting)
    planned = footprint(tuple(Weights(model.config, 2) for model in models), 1, 2048 + 16, 2048, setting.draft_length)
    report(planned=planned.temporaries, allocated=found.temporary - planned.caches)
    assert planned.temporaries == pytest.approx(found.temporary - planned.caches, rel=0.3)


@pytest.mark.cuda
@pytest.mark.parametrize("draft_length", [0, 4])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_eight_gpus_exchange_two_sums_per_layer(kind, draft_length, report):
    """A 70B target, with an 8B draft or alone: no GPU waits for the host, or copies or exchanges caches or matrices."""
    device, setting = devices.prepare("h100"), abstract.Setting(draft_length=draft_length)
    exchanges, kernels = [], []
    for layers in (2, 3):
        sizes = dict(zip(("llama-3.3-70b", "llama-3.1-8b"), (layers, 2), strict=True))
        configs = [dataclasses.replace(SHAPES[name], num_hidden_layers=count) for name, count in sizes.items()]
        models = [abstract.model(config, device.dtype, kind) for config in configs]
        traced = abstract.trace(*models, setting, devices.topology(device, 8))
        found = compiled.read(*graphs.compiled(traced.lower()))
        assert (found.loops, found.waits, found.conditionals, found.host) == ([], 0, 0, 0)
        assert not large(found.kernels, models, setting)
        slots = slots_of(setting.width + setting.new_tokens, setting.draft_length)
        one_head = 128, slots
        of_cache = [k for k in found.kernels for _, sizes in arrays(k.shape) if sides(sizes) == one_head]
        assert of_cache and max(kernel.written for kernel in of_cache) < 2 * 128 * slots
        exchanges.append(Counter(k.op for k in found.kernels if k.op.startswith(("all-", "reduce-", "collective-"))))
        kernels.append(found.count())
    count = kernels[1] - kernels[0] - 2  # without the exchanges
    planned = roofline.kernels_a_layer(Weights(configs[0], 2, kind, num_devices=8), device.dtype, draft_length + 1)
    report(round=dict(exchanges[0]), layer=dict(exchanges[1] - exchanges[0]), kernels=count, planned=planned)
    assert exchanges[1] - exchanges[0] == {"all-reduce-start": 2}
    # The target and the draft's two kinds of pass have two layers each. A pass collects embeddings and adds up logits.
    passes = 3 if draft_length else 1
    assert exchanges[0] == {"all-reduce-start": passes * (2 * 2 + 1), "all-gather-start": passes}
    assert count == planned if kind is None else abs(count - planned) <= 2


@pytest.mark.parametrize("one", cover.pairwise() + cover.TREES, ids=cover.name)
@pytest.mark.parametrize("name", ON)
def test_every_program_compiles(name, one):
    """Any two choices of drafter, rule, length, dtype and batch are combined in one of these programs.

    On GPUs, a library multiplies, because XLA has no Triton kernel for some small products unless it can try several.
    """
    device = devices.prepare(name)
    traced = abstract.trace(*cover.program(one, device.dtype, **SIZES), devices.topology(device))
    options = {"xla_gpu_enable_triton_gemm": False} if device.platform == "cuda" else None
    assert compiled.read(traced.lower().compile(options)).host == 0


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("name", ON)
def test_training_step_compiles(name, kind):
    """A training step compiles in the device's dtype and computes the target's hidden states on the way."""
    device = devices.prepare(name)
    config = dataclasses.replace(
        abstract.configs("109m")[0],
        num_hidden_layers=3,
        num_key_value_heads=1,
        num_attention_heads=2,
        intermediate_size=256,
        **SIZES,
    )
    target = jspec.Llama(config, jax.numpy.dtype(device.dtype), rngs=nnx.Rngs(0))
    schedule = fit.Schedule(steps=9, depth=2)
    begun = kinds.KINDS[kind](target, np.arange(100) if kind == "eagle" else None, schedule.depth, 0)
    trainee = kinds.trainee_of(begun)
    training = fit.begin(trainee, schedule)
    batch = jax.ShapeDtypeStruct((8, 64), "int32"), jax.ShapeDtypeStruct((8, 64), "bool")
    found = devices.topology(device)
    shapes = abstract.divided((training.state, target, *batch), Mesh(found, ("model",)))
    with abstract.tracing_for(found):
        lowered = training.step.lower(*shapes, None)
    assert lowered.compile()


@pytest.mark.parametrize(
    "key",
    [
        ("assign_slot",),
        ("prefill", 32),
        ("prefill_batch",),
        ("catch_up_drafter",),
        ("decode_rounds", 0, Variant.TEMPERATURE_ONLY, 8),
    ]
    + [("decode_rounds", 4, variant, 8) for variant in Variant],
    ids=str,
)
@pytest.mark.parametrize("name", ON)
def test_engine_programs_compile_without_cache_copies(name, key, report, monkeypatch):
    """No program copies a cache. Host callbacks for constraints are replaced, as they need their device to compile."""
    monkeypatch.setattr(jax, "pure_callback", lambda asked, of, *_: jax.numpy.zeros(of.shape, of.dtype))
    chip = devices.prepare(name)
    config = dataclasses.replace(
        abstract.configs("109m")[0],
        num_hidden_layers=2,
        num_key_value_heads=2,
        num_attention_heads=4,
        intermediate_size=256,
        **SIZES,
    )
    target, draft = (jspec.Llama(config, jax.numpy.dtype(chip.dtype), rngs=nnx.Rngs(seed)) for seed in (0, 1))
    drafter = jspec.ModelDrafter(draft)
    one = Runner(target, drafter, RULES["rejection"], Sizes(8, 500, 1, (32, 256), (0, 4), 4, 5))
    function, shapes = function_and_inputs(key, one._slot_shapes, one.rule, one.sizes, config.vocab_size)
    found = devices.topology(chip)
    where = abstract.divided(((target, drafter), one._slots, *shapes), Mesh(found, ("model",)))
    run = jax.jit(lambda models, *rest: function(*models, *rest), donate_argnums=1)
    with abstract.tracing_for(found):
        lowered = run.lower(*where)
    program = lowered.compile()
    of_cache, copies = copies_of_a_cache(program.as_text(), config, 8 * one.positions)
    report(cache_sized=of_cache, copies=len(copies))
    assert of_cache and not copies
