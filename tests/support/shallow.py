"""The bundled pair with few layers, whose programs compile in two thirds of the time, but whose texts make no sense."""

import dataclasses

from flax import nnx

import jspec

_demo_pair = jspec.demo_pair  # a test may put `pair` in its place


def first_layers(model, count):
    """Return the first `count` layers of `model` as a separate model."""
    short = nnx.clone(model)
    short.layers = nnx.List(list(short.layers)[:count])
    short.config = dataclasses.replace(short.config, num_hidden_layers=count)
    return short


def pair(*arguments, **options):
    """Return what `jspec.demo_pair` does, with two layers of the target and one of the draft."""
    target, draft, tokenizer = _demo_pair(*arguments, **options)
    return first_layers(target, 2), first_layers(draft, 1), tokenizer
