"""`jspec serve --replicas` as a process, on a small Ray cluster: a killed replica, shutdown, and bad options."""

import concurrent.futures
import importlib.util
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import openai
import psutil
import pytest

import jspec
from jspec.cluster import resources
from jspec.cluster.resources import Resources, check_resources, default_resources
from support.servers import tokenizer

NEW, STREAMS = 100, 12
BODY = {"model": "here", "prompt": "in a thing", "max_tokens": NEW, "logit_bias": {"0": -100}}


def start(*options):
    """Start a server with two replicas, and return its process and its address."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
    fixed = "--replicas", 2, "--port", 0, "--slots", 2, "--max-length", 128, "--num-draft-tokens", 2, "--name", "here"
    command = [sys.executable, "-m", "jspec", "serve", *map(str, (*options, *fixed))]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"^Serving here at (\S+) with 2 replicas$", line):
            return process, match[1]
    process.wait()
    pytest.fail("".join(lines))


def replicas_of(process):
    """Return the processes of the replicas."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "ServeReplica:jspec:replicas" in " ".join(child.cmdline())]


def texts(target, count):
    """Return the texts of `jspec.generate` with the keys of the seeds 0 to `count` - 1."""
    words = tokenizer()
    ids = words("in a thing")["input_ids"]
    keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), 0))(np.arange(count, dtype=np.uint32))
    batch = np.array([ids] * count), np.full(count, len(ids)), keys
    out = jspec.generate(target, *batch, max_new_tokens=NEW, sampling=jspec.SamplingParams(logit_bias=bias(target)))
    return [words.decode(row) for row in np.asarray(out.tokens).tolist()]


def bias(target):
    """Return a bias that forbids the end of the text."""
    return np.where(np.arange(target.config.vocab_size) == 0, -100.0, 0.0).astype(np.float32)


def test_streams_survive_a_killed_replica_and_sigterm_ends_the_server(sources, report):
    """Seeded streams go on with the text of `jspec.generate` after SIGKILL, and the killed replica is replaced."""
    process, url = start(sources[0], "--draft", sources[1])
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120)
        victims = replicas_of(process)
        assert len(victims) == 2

        def stream(seed):
            body = {"model": "here", "prompt": "in a thing", "max_tokens": NEW, "logit_bias": {"0": -100}}
            deltas = []
            for chunk in client.completions.create(**body, seed=seed, stream=True):
                deltas.append(chunk.choices[0].text)
                if seed == 1 and len(deltas) == 2:
                    victims[0].kill()
            return "".join(deltas)

        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            found = [*pool.map(stream, range(STREAMS))]
        assert found == texts(jspec.load(sources[0]), STREAMS)
        moved = client.get("/../metrics", cast_to=str).split('moved_requests_total{model_name="here",reason="lost"} ')
        report(streams=STREAMS, moved=float(moved[1].split()[0]))
        assert float(moved[1].split()[0]) > 0
        whole = client.completions.create(**BODY, seed=7, n=3).choices  # all choices of a body are routed
        assert [whole[0].text, len({choice.text for choice in whole})] == [found[7], 3]
        late = client.completions.create(**BODY, seed=3, stream=True)
        pieces = [next(late).choices[0].text]
        process.send_signal(signal.SIGTERM)
        pieces += [chunk.choices[0].text for chunk in late]
        assert "".join(pieces) == found[3], "running streams finish"
        assert process.wait(60) == 0
    finally:
        for child in psutil.Process(os.getpid()).children(recursive=True):
            if process.pid in (child.pid, *(parent.pid for parent in child.parents())):
                child.kill()
        process.stderr.close()
        process.wait()


def test_error_names_the_missing_resources(monkeypatch):
    monkeypatch.setattr(resources, "_total", lambda: {"CPU": 2.0, "GPU": 1.0})
    check_resources(2, Resources())
    with pytest.raises(ValueError, match=r"^The Ray cluster has 2 CPUs, but 3 x 1 are needed"):
        check_resources(3, Resources())
    with pytest.raises(ValueError, match=r"^The Ray cluster has 1 GPUs, but 2 x 1 are needed"):
        check_resources(2, Resources(gpus=1))
    assert default_resources() == Resources(gpus=1)
    monkeypatch.setattr(resources, "_total", lambda: {"CPU": 2.0})
    assert default_resources() == Resources()
    monkeypatch.setattr(resources, "_total", lambda: {"CPU": 2.0, "TPU": 4.0})
    assert default_resources() == Resources(tpus=1)
    monkeypatch.setattr(resources, "_total", dict)
    with pytest.raises(ValueError, match=r"call ray.init\(\) first, or pass resources"):
        default_resources()


def test_gpu_share_limits_memory():
    assert Resources(gpus=0.5).actor_options() == {
        "num_cpus": 1,
        "num_gpus": 0.5,
        "runtime_env": {"env_vars": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}},
    }
    assert Resources().actor_options()["runtime_env"]["env_vars"] == {"JAX_PLATFORMS": "cpu"}
    assert Resources(tpus=4).actor_options()["resources"] == {"TPU": 4}


def test_models_and_missing_ray_are_refused(monkeypatch, sources):
    with pytest.raises(TypeError, match=r"^target is of type Llama; pass the path or the name"):
        jspec.cluster.app(jspec.load(sources[0]))
    with pytest.raises(TypeError, match=r"^draft is of type Llama; pass the path or the name"):
        jspec.cluster.app(str(sources[0]), jspec.load(sources[1]))
    monkeypatch.setattr(resources, "_total", lambda: {"CPU": 8.0})
    with pytest.raises(ValueError, match=r"^replicas is \(3, 2\) \(smallest, largest\); expected 1 <= "):
        jspec.cluster.app(str(sources[0]), replicas=(3, 2))
    monkeypatch.setattr(resources, "find_spec", lambda name: None if name == "ray" else importlib.util.find_spec(name))
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e \"\.\[ray\]\""):
        jspec.cluster.app(str(sources[0]))
