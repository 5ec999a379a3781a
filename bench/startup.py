"""Time to the first token, and time to compile, each in a fresh process with and without the persistent cache."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from bench import plots
from bench.report import publish

_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
import jax, numpy as np, jspec
from bench import pairs
imported = time.perf_counter()
pair, source, program = json.loads(sys.argv[1])
target, draft = (jspec.load(source), jspec.NGramDrafter()) if source else pairs.pair(pair)
jax.block_until_ready(jax.tree.leaves(target))
loaded = time.perf_counter()
lengths = {"plain": None, "K = 4": 4, "up to 8": jspec.UpTo(8), "engine": "auto"}[program]
function, models, options = (jspec.generate, [target], {})
if lengths is not None:
    function, models, options = jspec.speculative_generate, [target, draft], {"num_draft_tokens": lengths}
request = (np.ones((1, 64), np.int32), np.array([64]), jax.random.split(jax.random.key(0), 1))
def first_token():
    start = time.perf_counter()
    if program == "engine":
        engine.generate([Request((1,) * 64, 1, salt=str(start))])
    else:
        limit = jspec.SamplingParams(max_tokens=1)
        jax.block_until_ready(function(*models, *request, max_new_tokens=128, sampling=limit, **options))
    return time.perf_counter() - start
if program == "engine":
    from jspec.engine import Engine, Request
    engine = Engine(target, draft, slots=8).__enter__()
    first = time.perf_counter() - loaded
else:
    first = first_token()
warm = min(first_token() for _ in range(5))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
constrained = None
if program == "engine":  # how long its first constrained request waits, and how fast another one is meanwhile
    class Anything:
        allowed = lambda self: np.full(-(-target.config.vocab_size // 32), 2**32 - 1, np.uint32)
        consume = lambda self, token: True
        rollback = lambda self, count: None
    def speed(is_over):
        start, count = time.perf_counter(), 0
        while not is_over():
            count += len(engine.generate([Request((1,) * 64, 32)])[0].tokens)
        return count / (time.perf_counter() - start)
    start = time.perf_counter()
    alone = speed(lambda: time.perf_counter() > start + 3)
    start = time.perf_counter()
    held = engine.submit(Request((1,) * 64, 1, constraint=Anything), lambda _: None)
    meanwhile = speed(lambda: held.result.finish_reason)
    constrained = {"waits, s": time.perf_counter() - start, "others, share": meanwhile / alone}
weights = sum(leaf.nbytes for leaf in jax.tree.leaves((target, draft))) / 1e9
print(json.dumps({"import, s": imported - began, "load, s": loaded - imported, "first call, s": first,
                  "first token, s": warm, "weights, GB": weights, "peak memory, GB": peak, "constrained": constrained}))
"""

# Runs `jspec serve` up to the point where it would listen, then prints the numbers of cache hits and misses.
SERVE = """
from collections import Counter
import jspec.serve.run
from jspec.cli import main, serve
events = Counter()
def engine_of(*given, real=serve.engine_of, **options):
    import jax
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    return real(*given, **options)
serve.engine_of = engine_of
def ready(*_):
    print("READY", *(events[f"/jax/compilation_cache/cache_{name}"] for name in ("hits", "misses")), flush=True)
jspec.serve.run.run = ready
main()
"""


def served(target: str | None) -> list[dict[str, float]]:
    """Return the seconds of two starts of `jspec serve`, and the numbers of cache hits and misses.

    A target is served with its default draft.
    """
    starts: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment() | {"XDG_CACHE_HOME": folder}
        if "HF_HOME" not in environment:  # the models stay in their folder
            environment["HF_HOME"] = str(Path.home() / ".cache" / "huggingface")
        command = [sys.executable, "-c", SERVE, "serve", *([target] if target else []), "--port", "0"]
        for _ in range(2):
            began = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            seconds = time.perf_counter() - began
            if done.returncode:
                raise RuntimeError(done.stderr)
            hits, misses = map(int, done.stdout.partition("READY ")[2].split())
            starts.append({"start, s": seconds, "cache hits": hits, "cache misses": misses})
    return starts


def _environment() -> dict[str, str]:
    """Return this process's environment without the cache settings."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }


def _child(subject: tuple[str, str | None, str], cache: str | None) -> dict[str, Any]:
    """Return the times of one fresh process. `subject`: the pair, a target that replaces the pair, and the program."""
    environment = _environment()
    if cache:
        environment |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(subject)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def run(pair: str, target: str | None) -> None:
    """Publish one row for each program and cache state. `target` drafts by prompt lookup."""
    rows: list[dict[str, Any]] = []
    constrained: list[dict[str, float]] = []  # from the engine, without and with the cache
    with tempfile.TemporaryDirectory() as cache:
        for program in ("plain", "K = 4", "up to 8", "engine"):
            for state, folder in (("none", None), ("filled", cache), ("used", cache)):
                times = _child((pair, target, program), folder)
                asked = times.pop("constrained")
                if state != "filled":
                    constrained += [asked] * bool(asked)
                    rows.append({"program": program, "persistent cache": state} | times)
    starts = served(target) if target or pair == "bundled" else []
    name = Path(target or pair).name
    publish(
        f"startup-{name}-{jax.default_backend()}",
        f"{name}: a fresh process, prompt of 64 tokens",
        rows,
        plots.startup,
        notes=[
            "The first call of an engine with 8 slots includes its start, with the warm-up.",
            "The engine's first constrained request waits for programs that no cache keeps: "
            + ", ".join(
                f"{one['waits, s']:.1f} s, while another request decodes at {one['others, share']:.2f} of its speed"
                for one in constrained
            )
            + ".",
            *(
                f"Start {i} of `jspec serve`: {start['start, s']:.1f} s, with {start['cache hits']:g} programs "
                f"from the cache and {start['cache misses']:g} other programs."
                for i, start in enumerate(starts, 1)
            ),
        ],
        constrained=constrained,
        served=starts,
    )
