"""Sharded models, and changes to their weights, compared with the same changes on one device."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jspec
from jspec.adapters.tunix_weights import replace_weights
from jspec.core.sharding import TensorParallel, place
from jspec.models.layers import copy_tree
from jspec.models.llama import set_placement, stored_orders
from jspec.models.load import from_arrays
from jspec.training.kinds import of_model
from support import checkpoints


def placed(model, sharding):
    """Return `model` placed where `jspec.load` would put it."""
    model = jax.tree.map(lambda leaf: leaf, model)
    if isinstance(sharding, TensorParallel):
        set_placement(model, sharding)
    orders = stored_orders(model)
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        array = np.asarray(leaf[...])
        order = orders.get(f"{name.partition('.parts.')[0].removesuffix('.weight')}.weight", orders.get(name))
        if order is not None:  # codes have an axis after that of the outputs
            array = np.take(array, order, axis=1 if ".parts." in name else -1)
        leaf.set_value(place(name, array, sharding))
    return model


def changed(mesh):
    """Return whether a divided model that is saved, updated, merged or copied has the weights of one device.

    The checkpoint has as many key-value heads as devices, so the model's projections are interleaved.
    """
    raw = checkpoints.raw_config(num_key_value_heads=2, attention_bias=True)
    projection = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"
    rng, size = np.random.default_rng(0), raw["hidden_size"]
    rows = checkpoints.tensors(raw, seed=0)["model.layers.0.self_attn.k_proj.weight"].shape[0]
    adapter = {
        projection.format(name): rng.normal(size=shape).astype("float32")
        for name, shape in (("A", (2, size)), ("B", (rows, 2)))
    }
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.write(Path(folder) / "first", raw, checkpoints.tensors(raw, seed=0))
        options = {"packed": False}, {"sharding": jspec.tensor_parallel(mesh)}
        one, divided = (jspec.load(path, **option) for option in options)
        assert len(stored_orders(divided)) == 3 * len(divided.layers)  # two weights and a bias
        merged = [jspec.merge_lora(model, adapter, 3.0) for model in (one, divided)]
        drafts = [of_model(model, None, 4, 0).model for model in (one, divided)]  # begins as layers of the target
        pairs = [merged, (one, divided), drafts]
        swapped = [copy_tree(model) for model in (one, divided)]
        for model, source in zip(swapped, merged[::-1], strict=True):
            replace_weights(model, nnx.state(source), stored_orders(source))
        pairs += [(merged[0], model) for model in swapped]
        for model in (one, divided):
            jspec.load_weights(model, checkpoints.tensors(raw, seed=1))
        saved = jspec.load(jspec.ModelDrafter(divided).save(Path(folder) / "saved"), packed=False)
        restored = jspec.load(Path(folder) / "saved", sharding=jspec.tensor_parallel(mesh))
        pairs += [(one, saved), (one, restored)]
        arrays = on_mesh(one, mesh)
        pairs.append((one, from_arrays(one.config, arrays, jnp.dtype("float32"), jspec.tensor_parallel(mesh))))
    outputs = [[decode(model) for model in pair] for pair in pairs]
    assert not np.allclose(outputs[0][0].logprobs, outputs[1][0].logprobs, atol=1e-5)
    return all(np.array_equal(one.tokens, other.tokens) for one, other in outputs) and all(
        np.allclose(one.logprobs, other.logprobs, atol=1e-5) for one, other in outputs
    )


def on_mesh(model, mesh):
    """Yield the arrays of a checkpoint, divided over a mesh along their first axis, as Orbax restores them."""
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        array = np.asarray(leaf[...]).T
        rows = P("model" if len(array) % 2 == 0 else None)
        yield ".".join(map(str, path)), jax.device_put(array, NamedSharding(mesh, rows))


def decode(model):
    """Return outputs of `model` for four prompts of different lengths."""
    tokens = np.random.default_rng(0).integers(0, 7, (4, 6)).astype(np.int32)
    return jspec.generate(
        model, tokens, np.array([6, 3, 1, 4]), jax.random.split(jax.random.key(0), 4), max_new_tokens=8
    )
