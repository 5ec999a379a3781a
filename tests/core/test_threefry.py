"""Random numbers without loops equal JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.threefry import without_loops

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
    faster = without_loops(KEYS)
    assert faster.dtype != KEYS.dtype
    np.testing.assert_array_equal(jax.jit(draw)(faster, numbers), draw(KEYS, numbers))


def test_64_bits_equal_those_of_jax():
    with jax.enable_x64(True):
        found, expected = (jax.random.bits(keys[0], (4,), "uint64") for keys in (without_loops(KEYS), KEYS))
        np.testing.assert_array_equal(found, expected)


def test_program_has_no_loops():
    draw = jax.jit(lambda keys: jax.vmap(jax.random.bits)(without_loops(keys)))
    assert "while" not in draw.lower(KEYS).as_text()


def test_other_keys_are_kept():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    assert without_loops(keys) is keys
    with jax.threefry_partitionable(False):
        assert without_loops(KEYS) is KEYS
    faster = without_loops(KEYS)
    assert without_loops(faster) is faster
