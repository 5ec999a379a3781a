"""Two ways to sample a token with noise that target and draft share: in two steps, as in jspec, or in one step.

The first step samples a block, and the second step samples a token in it, with sqrt(V) Gumbels each
(`jspec.core.probs.sample_with_noise`). Sampling in one step uses full noise: it takes the largest ``log p + g``, with
one Gumbel g per token. Under the rule "coupled", the k children of a node are k two-step draws without replacement, or
the k largest of ``log q + g``.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jspec
from bench import chats, plots
from bench.passes import LOOP_SECONDS, Pass, pass_seconds
from bench.report import publish
from bench.subject import WIDTH, Subject
from bench.timing import in_turns, seconds, spread
from jspec import theory
from jspec.core.keys import Purpose, gumbel, positions_from, stream, target_noise
from jspec.core.probs import sample_with_noise

CHILDREN = 1, 2, 4, 8
SIZES = (1, 1), (8, 5)  # requests, distributions of each: plain decoding, and a round of four draft tokens
EACH = 8  # distributions from one text
# Maps the requests' keys ``[B]``, positions and distributions ``[B, S, ...]`` to tokens ``int32[B, S]``.
Draw = Callable[[Array, Array, Array], Array]


def in_two_steps(keys: Array, positions: Array, probs: Array) -> Array:
    """Sample in two steps, as jspec does."""
    return sample_with_noise(target_noise(keys, positions, probs.shape[-1]), probs)


def at_once(keys: Array, positions: Array, probs: Array) -> Array:
    """Sample with full noise that is as exact as jspec's."""
    noise = full_noise(stream(keys, positions, Purpose.TARGET).ravel(), probs.shape[-1])
    return jnp.argmax(jnp.log(probs) + noise.reshape(probs.shape), axis=-1).astype(jnp.int32)


def at_once_lean(keys: Array, positions: Array, probs: Array) -> Array:
    """Sample with 32-bit full noise instead of twice 23 bits: take the largest ``p / e``, where e is exponential."""
    keys = stream(keys, positions, Purpose.TARGET).ravel()
    bits = jax.vmap(lambda key: jax.random.bits(key, probs.shape[-1:], "uint32"))(keys).reshape(probs.shape)
    uniforms = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.argmax(probs / -jnp.log1p(-uniforms), axis=-1).astype(jnp.int32)


WAYS: dict[str, Draw] = {"two steps": in_two_steps, "full noise": at_once, "of 32 bits": at_once_lean}


def full_noise(keys: Array, vocab_size: int) -> Array:
    """Return one Gumbel per token, ``float32[n, V]`` for ``keys[n]``, in the mode of `jspec.core.keys.gumbel`."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high"))(keys)


@functools.partial(jax.jit, static_argnames="children")
def ranks_in_two_steps(keys: Array, p: Array, q: Array, children: int) -> Array:
    """Return the rank of the child drawn from ``q[V]`` that equals the target's token, or `children` if none does.

    The result is ``int32[n]`` for ``keys[n]``.
    """

    def rank(noise: Array) -> Array:
        token, left, found = sample_with_noise(noise, p), q, jnp.int32(children)
        for number in range(children):
            child = sample_with_noise(noise, left)
            found = jnp.where((found == children) & (child == token), number, found)
            left = left.at[child].set(0)
        return found

    return jax.vmap(rank)(gumbel(keys, p.size))


@functools.partial(jax.jit, static_argnames="children")
def ranks_at_once(keys: Array, p: Array, q: Array, children: int) -> Array:
    """Return the same as `ranks_in_two_steps`, but with full noise."""
    noise = full_noise(keys, p.size)
    token = jnp.argmax(jnp.log(p) + noise, axis=-1)
    same = lax.top_k(jnp.log(q) + noise, children)[1] == token[:, None]
    return jnp.where(same.any(1), jnp.argmax(same, axis=1), children).astype(jnp.int32)


def share(probability: Any, bits: int) -> np.ndarray:
    """Return how often full noise with `bits` bits per number draws a token, relative to its probability p.

    The ratio is 1 for exact noise. A token is drawn if its exponential, computed from ``v = (i + 1/2) / 2^bits``, is
    below p times an exponential with mean ``1 / (1 - p)``. The chance of that is ``(1 - v)^((1 - p) / p)``. Its mean
    over all i, for small v, is ``p y / sinh(y)`` with ``y = (1 - p) / (2^(bits + 1) p)``.
    """
    p = np.asarray(probability, np.float64)
    y = np.clip((1 - p) / (2.0 ** (bits + 1) * p), 1e-12, 500)
    return y / np.sinh(y)


def lost(laws: np.ndarray, bits: int) -> float:
    """Return the total-variation error of noise with `bits` bits, averaged over the distributions ``laws[n, V]``."""
    return float(np.mean([np.sum(law * (1 - share(law, bits))) for law in np.maximum(laws, 1e-30).astype(np.float64)]))


@functools.partial(jax.jit, static_argnames="layers")
def _laws(model: jspec.Llama, tokens: Array, at: Array, layers: tuple[int, ...] | None) -> Array:
    cache = model.new_cache(*tokens.shape)
    hidden, _ = model.forward(tokens, cache, jnp.zeros(len(tokens), jnp.int32), layers=layers)
    return jax.nn.softmax(model.logits(hidden[:, at]))


def laws(subject: Subject, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return target and draft distributions after the same text at temperature 1, ``float32[count, V]`` each."""
    tokens, lengths, _ = subject.request(-(-count // EACH), WIDTH)
    exits = isinstance(subject.draft, jspec.EarlyExitDrafter)
    models = (subject.target, None), (subject.target, subject.draft.layers) if exits else (subject.draft, None)
    found = [
        [
            _laws(model, row[None, :length], np.linspace(EACH, length - 1, EACH, dtype=int), layers)[0]
            for row, length in zip(tokens, lengths, strict=True)
        ]
        for model, layers in models
    ]
    p, q = (np.concatenate(jax.device_get(rows))[:count] for rows in found)
    return p, q


def with_questions(subject: Subject, count: int) -> Subject:
    """Return `subject` with `WIDTH`-token pieces of the `bench.chats` questions as prompts."""
    texts = "\n\n".join(question for kind in chats.KINDS for question in chats.questions(kind))
    ids = subject.tokenizer(texts, verbose=False)["input_ids"]
    pieces = [ids[i : i + WIDTH] for i in range(0, len(ids) - WIDTH + 1, WIDTH)]
    return dataclasses.replace(subject, prompts=pieces[:: max(1, len(pieces) // -(-count // EACH))])


def accepted(p: np.ndarray, q: np.ndarray, noises: int) -> dict[str, np.ndarray]:
    """Return how often one of the children is the target's token, from `noises` draws for each distribution.

    The arrays are ``float64[n, len(CHILDREN)]``.
    """
    most, found = max(CHILDREN), {"two steps": [], "full noise": []}
    for number, (target, draft) in enumerate(zip(p, q, strict=True)):
        keys = jax.random.split(jax.random.key(number), noises)
        for name, ranks in (("two steps", ranks_in_two_steps), ("full noise", ranks_at_once)):
            which = np.asarray(ranks(keys, target, draft, most))
            found[name].append([(which < children).mean() for children in CHILDREN])
    return {name: np.array(rates) for name, rates in found.items()}


class Drawing:
    """Many draws from ``probs[B, S, V]`` in one loop, each at different positions."""

    def __init__(self, draw: Draw, probs: Array):
        self.arguments = draw, jax.random.split(jax.random.key(0), len(probs)), probs
        self._run(1)
        self.count = max(3, int(LOOP_SECONDS / (seconds(lambda: self._run(3)) / 3)))

    def _run(self, count: int) -> Array:
        return _draws(*self.arguments, jnp.int32(count))

    def __call__(self) -> Array:
        """Draw `count` times from each distribution."""
        return self._run(self.count)


@functools.partial(jax.jit, static_argnames="draw")
def _draws(draw: Draw, keys: Array, probs: Array, count: Array) -> Array:
    batch, width, _ = probs.shape

    def step(number: Array, tokens: Array) -> Array:
        # The distributions depend on the previous draw, because otherwise XLA would hoist their logarithms.
        there = jnp.where(tokens >= 0, 1.0, 0.0)[..., None]
        return draw(keys, positions_from(jnp.full(batch, number * width), width), probs * there)

    return lax.fori_loop(0, count, step, jnp.zeros((batch, width), jnp.int32))


def costs(subject: Subject, p: np.ndarray, size: tuple[int, int], repeats: int) -> dict[str, float]:
    """Return the microseconds per distribution of each way to draw, and of the target's "pass", measured in turns."""
    batch, width = size
    probs = jnp.asarray(p[np.arange(batch * width) % len(p)]).reshape(batch, width, -1)
    draws = {name: Drawing(draw, probs) for name, draw in WAYS.items()}
    passes = {"pass": Pass(subject.target, width, batch)}
    times = in_turns(draws | passes, repeats)
    taken = {name: spread(times[name]).median / one.count for name, one in draws.items()}
    return {name: time / (batch * width) * 1e6 for name, time in (taken | pass_seconds(passes, times)).items()}


def run(subjects: Sequence[Subject], count: int, noises: int, repeats: int) -> None:
    """Publish, for every pair, one row per number of children, two rows of costs, and two of the combined effect."""
    rows, notes = [], []
    for subject in subjects:
        p, q = laws(subject, count)
        rates = accepted(p, q, noises)
        taken = {size: costs(subject, p, size, repeats) for size in SIZES}
        rows += table(p.shape[1], rates, taken)
        notes.append(_about(subject, p, q, noises))
    publish(
        f"noise-{jax.default_backend()}",
        f"Drawing with shared noise, in two steps or at once: {' and '.join(subject.name for subject in subjects)}",
        rows,
        plots.noise,
        notes=[
            "accepted: how often one of that many children is the target's token under coupled; standard error: that"
            " of the difference, over distributions. us per distribution: the time of compiled noise and drawing; pass:"
            " the time of the target's pass over as many rows. tokens/s: the speed of 8 requests with 4 levels of that"
            " many children, if drawing and a pass over 5 rows of each request were the only costs. of 32 bits: full"
            " noise with half the random bits and one logarithm.",
            *notes,
            chosen(rows),
        ],
        folder=subjects[0].folder,
    )


def _about(subject: Subject, p: np.ndarray, q: np.ndarray, noises: int) -> str:
    off = " and ".join(f"{lost(p, bits):.1g} with {bits}" for bits in (16, 32))
    most = float(np.mean(theory.acceptance_rate(p, q)))
    return (
        f"V = {p.shape[1]:,}: {subject.name}, {len(p)} distributions at temperature 1, {noises} draws each; at most"
        f" {most:.3f} of single draft tokens could be accepted. Full noise with numbers of limited width is off by a"
        f" total variation of {off} bits."
    )


def table(
    vocab_size: int, rates: dict[str, np.ndarray], taken: dict[tuple[int, int], dict[str, float]]
) -> list[dict[str, Any]]:
    """Return one pair's rows from the results of `accepted` and `costs`."""
    lead = rates["full noise"] - rates["two steps"]
    means, errors = {name: rate.mean(0) for name, rate in rates.items()}, lead.std(0, ddof=1) / len(lead) ** 0.5
    rows = [
        _row(
            vocab_size,
            f"accepted, of {children}",
            {name: float(mean[i]) for name, mean in means.items()},
            float(errors[i]),
        )
        for i, children in enumerate(CHILDREN)
    ]
    rows += [_row(vocab_size, f"us per distribution, {batch} x {width}", taken[batch, width]) for batch, width in SIZES]
    batch, width = SIZES[-1]
    found = taken[batch, width]
    for i in (CHILDREN.index(1), CHILDREN.index(4)):
        tokens = {name: float(theory.expected_tokens(mean[i], width - 1)) for name, mean in means.items()}
        tokens["of 32 bits"] = tokens["full noise"]  # the same distribution
        speeds = {name: tokens[name] / width / (found[name] + found["pass"]) * 1e6 for name in WAYS}
        rows.append(_row(vocab_size, f"tokens/s, {CHILDREN[i]} per level", speeds))
    return rows


def _row(vocab_size: int, what: str, values: dict[str, float], error: float | str = "") -> dict[str, Any]:
    found = {name: values.get(name, "") for name in (*WAYS, "pass")}
    return (
        {"V": vocab_size, "what": what}
        | found
        | {"full - two steps": values["full noise"] - values["two steps"], "standard error": error}
    )


def chosen(rows: plots.Rows) -> str:
    """Return a sentence that says which way is faster overall, and which one jspec uses."""
    speeds = [row for row in rows if row["what"].startswith("tokens/s")]
    said = [
        f"{row['full noise'] / row['two steps']:.2f} ({row['of 32 bits'] / row['two steps']:.2f} of 32 bits) at V ="
        f" {row['V']:,}, {row['what'].removeprefix('tokens/s, ')}"
        for row in speeds
    ]
    return f"Speed of full noise over that of two steps: {'; '.join(said)}. jspec draws in two steps."
