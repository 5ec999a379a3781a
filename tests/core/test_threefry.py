"""The unrolled hash yields the same random numbers as JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.threefry import with_unrolled_hash

KEYS = jax.random.split(jax.random.key(5), 3)
DRAWS = {
    "bits": lambda key: jax.random.bits(key, (2, 7), "uint32"),
    "bytes": lambda key: jax.random.bits(key, (5,), "uint8"),
    "one number": lambda key: jax.random.uniform(key),
    "gumbel": lambda key: jax.random.gumbel(key, (2, 33), jnp.float32, mode="high"),
    "half precision": lambda key: jax.random.uniform(key, (9,), jnp.float16),
    "split": lambda key: jax.random.key_data(jax.random.split(key)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_equal_those_of_jax(name):
    def draw(keys, numbers):
        return jax.vmap(lambda key, n: DRAWS[name](jax.random.fold_in(key, n)))(keys, numbers)

    numbers = jnp.array([0, 1, 2**32 - 1], jnp.uint32)
    faster = with_unrolled_hash(KEYS)
    assert faster.dtype != KEYS.dtype
    np.testing.assert_array_equal(jax.jit(draw)(faster, numbers), draw(KEYS, numbers))


def test_numbers_in_a_shard_map():
    """Inside `jax.shard_map`, both forms of the hash must have results of the same type."""

    def draw(keys):
        return jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 3)))(with_unrolled_hash(keys))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    rows = jax.sharding.PartitionSpec("rows")
    found = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=rows, out_specs=rows))(KEYS)
    np.testing.assert_array_equal(found, draw(KEYS))


def test_64_bits_equal_those_of_jax():
    with jax.enable_x64(True):
        found, expected = (jax.random.bits(keys[0], (4,), "uint64") for keys in (with_unrolled_hash(KEYS), KEYS))
        np.testing.assert_array_equal(found, expected)


def test_program_has_no_loops():
    draw = jax.jit(lambda keys: jax.vmap(jax.random.bits)(with_unrolled_hash(keys)))
    assert "while" not in draw.lower(KEYS).as_text()


def test_other_keys_are_kept():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    assert with_unrolled_hash(keys) is keys
    with jax.threefry_partitionable(False):
        assert with_unrolled_hash(KEYS) is KEYS
    faster = with_unrolled_hash(KEYS)
    assert with_unrolled_hash(faster) is faster
