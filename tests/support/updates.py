"""A long request and a small engine, for tests that replace an engine's weights."""

import threading

import jax

import jspec
from jspec.engine import Request
from support.engines import NEW, alone

LONG = Request((1, 2, 3), NEW, jspec.SamplingParams(temperature=0.7), jax.random.key(5))
SMALL = {"slots": 2, "max_length": 64, "num_draft_tokens": 2, "chunks": (8,), "rounds": 1}


def text(target, request=LONG):
    return list(alone(target, [request])[0][0])


def started(engine, *requests):
    """Submit requests and wait until each of them has output. Return their results and an event for the end of each."""
    results, ends = [], []
    for request in requests:
        has_output, has_ended = threading.Event(), threading.Event()

        def listen(result, has_output=has_output, has_ended=has_ended):
            has_output.set()
            if result.finish_reason:
                has_ended.set()

        results.append(engine.submit(request, listen).result)
        ends.append(has_ended)
        assert has_output.wait(60)
    return results, ends
