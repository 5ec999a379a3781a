"""Shared by all tests: toy models, ragged prompts, and the figures that tests report."""

import dataclasses
import io
import os
import sys
import threading
from pathlib import Path

import jax
import jaxlib.version
import numpy as np
import pytest

import convert
from jspec import Llama, cli
from jspec.cli import app as _app  # noqa: F401, loads the commands
from jspec.models.load import from_arrays

pytest.register_assert_rewrite("support")  # before any test imports it

TOY = convert.LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    rope=convert.RopeConfig(),
    bos_token_id=None,
    eos_token_ids=(),
)


# The emitters that XLA had before it changed them, which jaxlib can be asked for until 0.10.
_OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
# With a worker on every core, to split a program for parallel compilation is work for nothing.
_QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
SLOW = {*(Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines()}


def pytest_addoption(parser):
    parser.addoption("--as-shipped", action="store_true", help="Compile as users do; it takes three times as long.")


def pytest_configure(config):
    """Compiling is most of what the tests do, and the older emitters take half the time for it."""
    if _OLDER_EMITTERS and not config.getoption("--as-shipped"):
        os.environ["XLA_FLAGS"] = f"{_QUICK_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    worker, cores = os.environ.get("PYTEST_XDIST_WORKER", ""), sorted(getattr(os, "sched_getaffinity", set)(0))
    if worker and cores:  # a core for each worker: the threads that XLA starts for every core spin while they wait
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow the tests that tests/slow.txt lists, mostly members of families that also have quick ones."""
    found = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in SLOW & found.keys():
        found[name].add_marker(pytest.mark.slow)
    if config.args == config.getini("testpaths") and (missing := SLOW - found.keys()):
        raise pytest.UsageError(f"tests/slow.txt names {min(missing)}, which is not a test; correct or remove it.")


def pytest_terminal_summary(terminalreporter):
    """List the figures that the tests which ran have reported."""
    lines = [
        f"{result.nodeid.split('::')[-1]}: {text}"
        for outcome in ("passed", "failed")
        for result in terminalreporter.stats.get(outcome, [])
        for name, text in getattr(result, "user_properties", [])
        if name == "figures" and result.when == "call"
    ]
    if lines:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join(lines) + "\n")


@pytest.fixture
def report(request):
    """``report(tokens=25600, differing=0)``: figures of this test, listed after the run."""

    def add(**figures):
        text = ", ".join(f"{name}={value}" for name, value in figures.items())
        request.node.user_properties.append(("figures", text))
        print(text)

    return add


@pytest.fixture
def quick_compile(request):
    """Let XLA skip its slow optimisations; for tests of logic, where models are tiny and compiling is the cost."""
    jax.config.update("jax_disable_most_optimizations", not request.config.getoption("--as-shipped"))
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def as_shipped():
    """``compiler_options`` for a program whose instructions are looked at; what LLVM makes of them is not."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return quick | ({"xla_cpu_use_fusion_emitters": True} if _OLDER_EMITTERS else {})


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Keep the programs that commands and child processes compile out of the user's own folder.

    JAX has already read its environment, so the programs of this process are not cached.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def engines_compile_when_needed():
    """Have engines compile each program when they first need it, because most tests need only a few.

    A test that needs all of them calls the `Device.compile` that its file has kept.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.engine.runner.Runner.compile", lambda _: None)
        patch.setattr("jspec.engine.engine.warm_up", lambda *_: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_programs_of_other_files():
    """In a process that holds thousands of programs everything takes longer, and few are of use to the next file."""
    yield
    jax.clear_caches()
    if engines := sys.modules.get("jspec.engine.runner"):
        engines._programs.cache_clear()


@pytest.fixture
def freed_programs():
    """Frees compiled programs after the test where they are many: at 65,530 mappings XLA ends the process."""
    yield
    mappings = Path("/proc/self/maps")
    if not mappings.exists() or len(mappings.read_bytes().splitlines()) > 30_000:
        jax.clear_caches()


@pytest.fixture
def compilations():
    """``compilations()``: how many programs XLA has compiled since the test began."""
    events = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(events)
    jax.monitoring.unregister_event_duration_listener(listen)


def _arrays(config: convert.LlamaConfig, seed: int) -> dict[str, np.ndarray]:
    """Random weights under which every layer matters and the laws are as peaked as those of a trained model."""
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        if name.endswith("norm.weight"):
            return rng.uniform(0.7, 1.3, shape)
        scale = {"lm_head.weight": 3.0, "embed_tokens.weight": 6.0}.get(name, 1.5)
        return rng.normal(size=shape) * scale / np.sqrt(config.hidden_size)

    return {name: draw(name, shape).astype(np.float32) for name, shape in convert.shapes(config).items()}


@pytest.fixture(scope="session")
def toy():
    """``toy(seed, distance=0, **changes) -> Llama``: a toy model of `TOY` with `changes` to its config.

    With ``distance`` above 0 its weights are those of the same seed pushed that far (1: as far as an unrelated
    model's), which makes a draft that often agrees with ``toy(seed)``.
    """

    def make(seed: int, distance: float = 0.0, **changes) -> Llama:
        config = dataclasses.replace(TOY, **changes)
        near, far = _arrays(config, seed), _arrays(config, seed + 1000)
        mixed = ((name, near[name] + distance * (far[name] - near[name])) for name in near)
        return from_arrays(config, mixed, np.float32)

    return make


@pytest.fixture(scope="session")
def prompts():
    """``prompts(lengths, seed=0, width=None, vocab_size=61)``: random ragged prompts ``(tokens, lengths, keys)``.

    What lies behind a prompt's end is garbage, ids far outside the vocabulary included.
    """

    def make(lengths, seed=0, width=None, vocab_size=TOY.vocab_size):
        rng = np.random.default_rng(seed)
        lengths = np.asarray(lengths, np.int32)
        shape = (lengths.size, width or lengths.max())
        tokens = rng.integers(0, vocab_size, shape)
        garbage = rng.integers(-(10**6), 10**6, shape)
        tokens = np.where(np.arange(shape[1]) < lengths[:, None], tokens, garbage).astype(np.int32)
        return tokens, lengths, jax.random.split(jax.random.key(seed), lengths.size)

    return make


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of a tiny target and its draft."""
    from support import text_pair

    folder = tmp_path_factory.mktemp("sources")
    return text_pair.write(folder / "target"), text_pair.write(folder / "draft", distance=0.3)


@pytest.fixture(scope="module")
def running(sources):
    """A server of the two on a real port."""
    from support import servers  # OpenAI's client, which most tests do without, takes a second to load

    with servers.running(sources) as running:
        yield running


@pytest.fixture
def gate(running, monkeypatch):
    """``gate.set()`` lets the engine decode; until then it is as slow as can be. It is open again afterwards."""
    from support.streams import until

    engine = running.engine  # whose last call for an earlier request must not wait at the gate
    until(lambda: not engine._heartbeat._running and not engine._loop.is_busy)
    opened, decode_rounds = threading.Event(), running.engine.device.decode_rounds
    monkeypatch.setattr(
        running.engine.device, "decode_rounds", lambda *arguments: (opened.wait(), decode_rounds(*arguments))[1]
    )
    yield opened
    opened.set()
    until(lambda: not running.server.open and not running.engine.running_requests)


@pytest.fixture(scope="module")
def complete(running):
    """``complete(**fields)``: a completion of 12 tokens with a seed, unless told otherwise."""
    return running.complete


@pytest.fixture(scope="module")
def chat(running):
    """``chat(**fields)``: the same of a chat."""
    return running.chat


@pytest.fixture
def run(monkeypatch, capsys):
    """``run(*arguments, stdin=None)``: exit code, standard output and error of `jspec`, in this process.

    Args:
        stdin: bytes; None is a terminal.
    """

    def command(*arguments, stdin=None):
        source = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        source.isatty = lambda: stdin is None
        monkeypatch.setattr(sys, "stdin", source)
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        return exit_.value.code or 0, *capsys.readouterr()

    return command
