"""The memory that JAX arrays take while a checkpoint is loaded."""

import gc

import jax

from jspec.models import load as weights


def watch(monkeypatch, stream):
    """Return a list that fills with the bytes of new arrays after each array that the function `stream` yields.

    `stream` is the name of a function in `jspec.models.load` that returns a configuration, a directory and arrays.
    """
    gc.collect()
    before, live = sum(array.nbytes for array in jax.live_arrays()), []
    original = getattr(weights, stream)

    def watched(*arguments):
        def each():
            for pair in arrays:
                yield pair
                live.append(sum(array.nbytes for array in jax.live_arrays()) - before)

        config, directory, arrays = original(*arguments)
        return config, directory, each()

    monkeypatch.setattr(weights, stream, watched)
    return live
