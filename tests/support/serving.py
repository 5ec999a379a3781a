"""Helpers for the server tests and others."""

from collections import Counter

import httpx
import jax
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import jspec
from jspec.text import pieces


def alone(running, prompt, seed, index, count=12, **sampling):
    """Return the tokens that `jspec.generate` gives for choice `index`, their text, and their log-probabilities."""
    ids = prompt if isinstance(prompt, list) else running.tokenizer(prompt)["input_ids"]
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
    batch, sampling = (np.array([ids]), np.array([len(ids)]), key[None]), jspec.SamplingParams(**sampling)
    target = running.engine.device.target
    out = jspec.generate(target, *batch, max_new_tokens=count, eos_ids=(0,), sampling=sampling)
    tokens = out.tokens[0, : int(out.lengths[0])].tolist()
    return tokens, "".join(pieces(running.tokenizer, ids, tokens)), np.asarray(out.raw_logprobs)[0, : len(tokens)]


def metrics(running):
    """Return every counter by its name and labels, except for the model's name."""
    families = text_string_to_metric_families(httpx.get(f"{running.url}/metrics").text)
    return Counter(
        {
            (sample.name, *(value for name, value in sample.labels.items() if name != "model_name")): sample.value
            for family in families
            for sample in family.samples
        }
    )
