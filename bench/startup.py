"""Time to the first token, and time to compile, each in a fresh process with and without the persistent cache."""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import jax

from bench import plots
from bench.report import publish

_CHILD = """
import json, sys, time
began = time.perf_counter()
import jax, numpy as np, jspec
from bench import pairs
imported = time.perf_counter()
models = pairs.pair(sys.argv[1])
jax.block_until_ready(jax.tree.leaves(models[0]))
loaded = time.perf_counter()
plain = sys.argv[2] == "plain"
function = jspec.generate if plain else jspec.speculative_generate
request = (np.ones((1, 64), np.int32), np.array([64]), jax.random.split(jax.random.key(0), 1))
def first_token():
    start = time.perf_counter()
    limit = jspec.SamplingParams(max_tokens=1)
    jax.block_until_ready(function(*(models[:1] if plain else models), *request, max_new_tokens=128, sampling=limit))
    return time.perf_counter() - start
first, warm = first_token(), min(first_token() for _ in range(5))
print(json.dumps({"import": imported - began, "load": loaded - imported, "compile": first - warm, "first token": warm}))
"""


def _child(pair: str, program: str, cache: str | None) -> dict[str, float]:
    """The times of one fresh process."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    if cache:
        environment |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, pair, program], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def run(pair: str) -> None:
    """Publish one row for each program and state of the cache."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for program in ("plain", "speculative"):
            for state, folder in (("none", None), ("filled", cache), ("used", cache)):
                times = _child(pair, program, folder)
                if state != "filled":
                    rows.append(
                        {"program": program, "persistent cache": state} | {f"{k}, s": v for k, v in times.items()}
                    )
    publish(f"startup-{pair}-{jax.default_backend()}", f"{pair}: a fresh process, prompt of 64 tokens, K = 4", rows,
            plots.startup)  # fmt: skip
