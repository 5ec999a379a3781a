"""`jax.vmap` over sampling parameters, with rows sharded over two devices: print the collectives of the program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jspec
from support import toys

TARGET = toys.tiny_llama(0)
TOKENS, LENGTHS, KEYS = np.ones((4, 5), np.int32), np.full(4, 5, np.int32), jax.random.split(jax.random.key(0), 4)


def mapped(tokens, lengths, keys, temperatures):
    def call(temperature):
        sampling = jspec.SamplingParams(temperature=temperature)
        return jspec.generate(TARGET, tokens, lengths, keys, max_new_tokens=6, sampling=sampling).tokens

    return jax.vmap(call)(temperatures)


def main():
    temperatures = jnp.array([0.0, 0.5, 1.0])
    expected = jax.jit(mapped)(TOKENS, LENGTHS, KEYS, temperatures)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
        batch = [jax.device_put(array, rows) for array in (TOKENS, LENGTHS, KEYS)]
        batch.append(jax.device_put(temperatures, everywhere))
        with jax.set_mesh(mesh):
            program = jax.jit(mapped).lower(*batch).compile()
            same = bool(np.array_equal(program(*batch), expected))
        text = program.as_text()
        print(
            kind.name, same, *(text.count(f" {name}(") for name in ("all-gather", "all-to-all", "collective-permute"))
        )


if __name__ == "__main__":
    main()
