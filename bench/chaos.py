"""Kill replicas while they decode, and count lost streams, wrong texts and pauses."""

import asyncio
import contextlib
import dataclasses
import os
import random
import re
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import psutil
from jax import Array

import jspec
from bench import plots
from bench.report import RESULTS, publish
from bench.subject import held_out, ragged
from jspec.bundled import PAIR
from jspec.cluster import Resources, app
from jspec.text import eos_ids, load_tokenizer

_HOST, _PORT, _MODEL = "127.0.0.1", 8765, "bundled"
_BATCH = 50
_QUANTILES = ("p50 pause, s", "0.5"), ("p99 pause, s", "0.99")
_TITLE = "ServeReplica:jspec:"  # in the title of every process of the application, before the deployment's name
_ATTEMPTS = 60  # a second apart


@dataclasses.dataclass(frozen=True)
class Attack:
    """The plan of the attack.

    Attributes:
        replicas: the number of replicas.
        interval: the seconds between two signals.
        signal_number: the signal, sent to a victim chosen at random.
        victim: "replicas" or "ingress". If the ingress is lost, clients send their requests again.
        concurrency: how many streams are open at any time.
    """

    replicas: int
    interval: float
    signal_number: signal.Signals
    victim: str
    concurrency: int


def run(streams: int, new_tokens: int, attack: Attack, folder: Path = RESULTS) -> None:
    """Compare the texts of seeded streams with those of `jspec.generate`, while replicas are killed."""
    prompts = _prompts(streams)
    expected = _texts(prompts, new_tokens)
    with _service(attack.replicas):
        began, killer = time.perf_counter(), Killer(attack)
        texts, errors = asyncio.run(_stream_all(prompts, new_tokens, attack, killer))
        seconds = time.perf_counter() - began
        metrics = httpx.get(f"http://{_HOST}:{_PORT}/metrics", timeout=60).text
    differing = sum(text != wanted for text, wanted in zip(texts, expected, strict=True) if text is not None)
    quantiles = {name: _metric(metrics, f'moved_request_pause_seconds.*quantile="{q}"') for name, q in _QUANTILES}
    row = {
        "streams": streams,
        "tokens": new_tokens,
        "signals": killer.count,
        "moved": _metric(metrics, 'moved_requests_total.*reason="lost"')
        + _metric(metrics, 'moved_requests_total.*reason="unresponsive"'),
        "differing": differing,
        "lost": texts.count(None),
        "errors": len(errors),
        **quantiles,
        "tokens/s": streams * new_tokens / seconds,
    }
    victims = "The ingress" if attack.victim == "ingress" else f"A random one of {attack.replicas} replicas"
    text = f"{victims} receives {attack.signal_number.name} every {attack.interval:g} seconds."
    name = f"chaos-{attack.victim}-{attack.signal_number.name.lower()}-c{attack.concurrency}-{attack.interval:g}s"
    draw = plots.columns("streams", "moved", "differing", "errors")
    publish(name, "Seeded streams while processes are lost", [row], draw, [text, *errors[:3]], folder)


def _prompts(count: int) -> list[list[int]]:
    """Return prompts of 8 to 32 tokens from held-out modules."""
    rows = held_out(load_tokenizer(PAIR / "target"), count)["inside a module"]
    return [rows[i % len(rows)][: 8 + i % 25].tolist() for i in range(count)]


def _texts(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[str]:
    """Return the texts of `jspec.generate`, with the keys of the seeds 0, 1, 2, ..."""
    target, tokenizer = jspec.load(PAIR / "target"), load_tokenizer(PAIR / "target")
    keys = jax.vmap(_key)(jnp.arange(len(prompts), dtype=jnp.uint32))
    tokens, lengths, _ = ragged(prompts)
    ends, texts = eos_ids(target, tokenizer), list[str]()
    for part in np.array_split(np.arange(len(prompts)), -(-len(prompts) // _BATCH)):
        batch = tokens[part], lengths[part], keys[part]
        out = jspec.generate(target, *batch, max_new_tokens=new_tokens, eos_ids=ends)
        for row, length in zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True):
            texts.append(tokenizer.decode([i for i in row[:length].tolist() if i not in ends]))
    return texts


def _key(seed: Array) -> Array:
    """Return the key of a request's first choice."""
    return jax.random.fold_in(jax.random.key(seed), 0)


@contextlib.contextmanager
def _service(replicas: int) -> Generator[None]:
    import ray
    from ray import serve

    ray.init(num_cpus=replicas, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": _HOST, "port": _PORT})
        application = app(
            replicas=replicas,
            resources=Resources(cpus=1),
            name=_MODEL,
            server_options={"max_waiting": 1000},
            slots=4,
            max_length=512,
        )
        serve.run(application, name="jspec")
        yield
        serve.shutdown()
    finally:
        ray.shutdown()


async def _stream_all(
    prompts: Sequence[Sequence[int]], new_tokens: int, attack: Attack, killer: "Killer"
) -> tuple[list[str | None], list[str]]:
    """Return the text of each stream, or None if it failed, and the errors."""
    client = openai.AsyncOpenAI(base_url=f"http://{_HOST}:{_PORT}/v1", api_key="x", max_retries=0, timeout=600)
    room, errors = asyncio.Semaphore(attack.concurrency), list[str]()

    async def stream(seed: int, prompt: Sequence[int]) -> str | None:
        async with room:
            for _ in range(_ATTEMPTS if attack.victim == "ingress" else 1):
                try:
                    chunks = await client.completions.create(
                        model=_MODEL, prompt=[*prompt], max_tokens=new_tokens, temperature=1, seed=seed, stream=True
                    )
                    return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(1)
            return None

    killing = asyncio.ensure_future(killer.run())
    texts = await asyncio.gather(*(stream(seed, prompt) for seed, prompt in enumerate(prompts)))
    killing.cancel()
    return texts, errors


class Killer:
    """Send signals to replicas or the ingress, and count them."""

    def __init__(self, attack: Attack):
        self._attack, self.count = attack, 0

    async def run(self) -> None:
        """Send signals until cancelled."""
        while True:
            await asyncio.sleep(self._attack.interval)
            titles = {
                process.pid: " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
            }
            if pids := [pid for pid, title in titles.items() if _TITLE + self._attack.victim in title]:
                os.kill(random.choice(pids), self._attack.signal_number)
                self.count += 1


def _metric(text: str, pattern: str) -> float:
    match = re.search(rf"{pattern}.*\}} (\S+)", text)
    return float(match[1]) if match else 0.0
