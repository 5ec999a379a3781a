"""Helpers for the constraint tests and others."""

import functools

import jax
import numpy as np

import jspec
from jspec.engine import Request
from support import toys
from support.law import VOCAB
from support.matrix import PROMPTS

OPTIONS = {"max_length": 40, "chunks": (8,), "rounds": 3}


class NoMultiples:
    """A constraint that forbids two adjacent tokens whose sum is a multiple of 3."""

    def __init__(self, fails_at=None):
        self.text, self.fails_at = [], fails_at

    def may(self, token):
        return not self.text or (self.text[-1] + token) % 3 != 0

    def allowed(self):
        if len(self.text) == self.fails_at:
            raise RuntimeError("planted")
        return np.array([sum(1 << token for token in range(VOCAB) if self.may(token))], np.uint32)

    def consume(self, token):
        if self.may(token):
            self.text.append(token)
            return True
        return False

    def rollback(self, count):
        del self.text[len(self.text) - count :]


class Guesses(NoMultiples):
    """The same constraint, which after every second token forces two tokens, allowed or not."""

    def forced(self):
        return [(self.text[-1] + 1) % VOCAB, self.text[-1]] if len(self.text) % 2 else []


@functools.cache
def models():
    target = toys.tiny_llama(10)
    return target, toys.tiny_llama(11, 1, related_to=target)


def requests(count=6):
    keys = jax.random.split(jax.random.key(2), count)
    return [
        Request(
            PROMPTS[i % 5],
            24,
            jspec.SamplingParams(temperature=1 + i % 2),
            keys[i],
            eos_ids=(7,),
            constraint=(None, NoMultiples, Guesses)[i % 3],
        )
        for i in range(count)
    ]


def texts(results):
    assert {result.finish_reason for result in results} <= {"length", "eos"}
    return [result.tokens for result in results]
