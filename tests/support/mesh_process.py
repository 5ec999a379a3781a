"""A process of a mesh: ``mesh_process ADDRESS COUNT NUMBER CASE FOLDER...`` prints the outcome of a case as JSON."""

import json
import os
import signal
import sys
import time

import jax
import numpy as np

import jspec
from jspec.cluster import join, load_on_mesh
from jspec.models.live_weights import leaves_by_name
from jspec.models.llama import stored_orders
from jspec.text import request_keys

NEW = 10


def request(count=4, vocab_size=60):
    """Return ragged prompts and their keys."""
    rng = np.random.default_rng(0)
    lengths = np.array([1 + 3 * i % 7 for i in range(count)], np.int32)
    return rng.integers(1, vocab_size, (count, lengths.max())).astype(np.int32), lengths, request_keys(5, count)


def outcomes(target, draft, names):
    """Yield the name, the tokens and the log-probabilities of each program with one of the `names`, or of all."""
    options = {"max_new_tokens": NEW, "sampling": jspec.SamplingParams(temperature=0.8, repetition_penalty=1.1)}
    tree = jspec.TreeDrafter(draft, jspec.Tree((0, 0, 1)))
    programs = {
        "plain": lambda: jspec.generate(target, *request(), **options),
        "coupled": lambda: jspec.speculative_generate(target, draft, *request(), accept="coupled", **options),
        "block": lambda: jspec.speculative_generate(target, draft, *request(), accept="block", **options),
        "lookup": lambda: jspec.speculative_generate(target, jspec.NGramDrafter(), *request(), **options),
        "tree": lambda: jspec.speculative_generate(target, tree, *request(), **options),
    }
    for name in names or programs:
        out = jax.device_get(programs[name]())
        yield name, out.tokens.tolist(), out.logprobs.tolist()


def loaded(mesh, *folders):
    """Return the models, divided over a mesh if it is not None."""
    return [jspec.load(folder) if mesh is None else load_on_mesh(folder, mesh) for folder in folders]


def text(mesh, target, draft):
    """Print the outputs of one program."""
    texts(mesh, target, draft, ("coupled",))


def texts(mesh, target, draft, names=()):
    """Print the outputs of every program, with float32 weights and with quantised ones."""
    for name, tokens, logprobs in outcomes(*loaded(mesh, target, draft), names):
        print(json.dumps([name, tokens, logprobs]), flush=True)
    if names:
        return
    if mesh is None:
        quantized = [jspec.load(folder, quantize="int8", packed=False) for folder in (target, draft)]
    else:
        quantized = [load_on_mesh(folder, mesh, quantize="int8") for folder in (target, draft)]
    out = jspec.speculative_generate(*quantized, *request(), max_new_tokens=NEW, accept="coupled")
    print(json.dumps(["int8", np.asarray(out.tokens).tolist(), np.asarray(out.logprobs).tolist()]))


def killed(mesh, target, draft):
    """Decode for ever, but kill process 1."""
    models = loaded(mesh, target, draft)
    jspec.speculative_generate(*models, *request(), max_new_tokens=NEW)
    print(json.dumps("decoding"), flush=True)
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        jax.block_until_ready(jspec.speculative_generate(*models, *request(), max_new_tokens=NEW))
        time.sleep(0.01)


def weights(mesh, *folders):
    """Print a checksum of every weight of each model, and how many bytes of the model this process holds."""
    for model in loaded(mesh, *folders):
        leaves, orders = leaves_by_name(model), stored_orders(model)
        held = sum(shard.data.nbytes for leaf in leaves.values() for shard in leaf[...].addressable_shards)
        print(json.dumps([[_checksum(leaf[...], orders.get(name)) for name, leaf in leaves.items()], held]))


def _checksum(leaf, order):
    """Return a sum of all values, each with a weight that depends on its position side by side."""
    weights = jax.numpy.cos(jax.numpy.arange(leaf.size).reshape(leaf.shape) * 0.7)
    return float((leaf * (weights if order is None else weights[..., order])).sum())


def main():
    address, count, number, case, *folders = sys.argv[1:]
    mesh = None
    if int(count):
        join(address, int(count), int(number), timeout=float(os.environ.get("JOIN_TIMEOUT", "100")))
        mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    {"text": text, "texts": texts, "killed": killed, "weights": weights}[case](mesh, *folders)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(3)
