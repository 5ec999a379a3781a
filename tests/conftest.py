"""Fixtures shared by all tests: toy models, ragged prompts, and the reporting of measured values."""

import dataclasses
import io
import itertools
import os
import shutil
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


# XLA's previous CPU emitters, which jaxlib still offers up to 0.10.
_OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
# Splitting a program for parallel compilation gains nothing, because every core already runs a test worker.
_QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# Tests outside the default run, by marker; a name without brackets stands for every case of a test.
_TIERS = {
    marker: {*(Path(__file__).parent / f"{marker}.txt").read_text(encoding="utf-8").splitlines()}
    for marker in ("slow", "long")
}

# Lines of those files that name no test. They are known only after all tests have been collected.
_UNKNOWN = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption("--as-shipped", action="store_true", help="Compile as users do; it takes three times as long.")


def pytest_configure(config):
    """Select XLA's older emitters, which halve compile time, the bulk of the tests' run time."""
    if _OLDER_EMITTERS and not config.getoption("--as-shipped"):
        os.environ["XLA_FLAGS"] = f"{_QUICK_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    # Importing jax has set this to 1, and XLA's warnings would disturb what the tests' own processes print.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    worker, cores = os.environ.get("PYTEST_XDIST_WORKER", ""), sorted(getattr(os, "sched_getaffinity", set)(0))
    if worker and cores:  # one core per worker: XLA starts a thread per core, and waiting threads spin
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the tests that tests/long.txt and tests/slow.txt list."""
    config.stash[_UNKNOWN] = []
    found, files = {}, {item.nodeid.removeprefix("tests/").split("::")[0] for item in items}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for key in {name, name.split("[")[0]}:
            found.setdefault(key, []).append(item)
    for marker, names in _TIERS.items():
        for item in itertools.chain.from_iterable(found[name] for name in names & found.keys()):
            if item.get_closest_marker("slow") is None:
                item.add_marker(marker)
        if config.args == config.getini("testpaths"):
            config.stash[_UNKNOWN].extend(
                f"tests/{marker}.txt: {name}"
                for name in sorted(names - found.keys())
                # A file without any test was skipped, such as for want of torch.
                if name.split("::")[0] in files or not (Path(__file__).parent / name.split("::")[0]).exists()
            )


def pytest_terminal_summary(terminalreporter):
    """Print the values that the tests reported."""
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
def unknown_tests(pytestconfig):
    """Return the lines of tests/long.txt and tests/slow.txt that name no test, if all tests were collected."""
    return pytestconfig.stash[_UNKNOWN]


@pytest.fixture
def report(request):
    """Return ``report(tokens=25600, differing=0)``, which records values of this test to list after the run."""

    def add(**figures):
        text = ", ".join(f"{name}={value}" for name, value in figures.items())
        request.node.user_properties.append(("figures", text))
        print(text)

    return add


@pytest.fixture
def quick_compile(request):
    """Let XLA skip its slow optimisations, for logic tests, whose models are tiny and whose cost is compiling."""
    jax.config.update("jax_disable_most_optimizations", not request.config.getoption("--as-shipped"))
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def as_shipped():
    """Return `compiler_options` for a test that inspects a program's HLO instructions but not LLVM's output."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return quick | ({"xla_cpu_use_fusion_emitters": True} if _OLDER_EMITTERS else {})


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Keep programs compiled by commands and child processes out of the user's own cache folder.

    Programs compiled in this process are not cached, even if the environment that JAX has read names a folder.
    """
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def engines_compile_when_needed():
    """Make engines compile each program on first use, because most tests need only a few programs.

    A test that needs all programs calls the original `Runner.compile`, which its file has kept.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.engine.runner.Runner.compile", lambda _: None)
        patch.setattr("jspec.engine.engine.warm_up", lambda *_: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_programs_of_other_files():
    """Drop compiled programs after each file: thousands slow everything down, and the next file reuses few of them."""
    yield
    jax.clear_caches()
    if engines := sys.modules.get("jspec.engine.runner"):
        engines._programs.cache_clear()


@pytest.fixture
def freed_programs():
    """Free compiled programs after the test if there are many: at 65,530 memory mappings, XLA ends the process."""
    yield
    mappings = Path("/proc/self/maps")
    if not mappings.exists() or len(mappings.read_bytes().splitlines()) > 30_000:
        jax.clear_caches()


@pytest.fixture
def compilations():
    """Yield ``compilations()``, which returns the number of programs XLA has compiled since the test began."""
    events = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(events)
    jax.monitoring.unregister_event_duration_listener(listen)


def _arrays(config: convert.LlamaConfig, seed: int) -> dict[str, np.ndarray]:
    """Return random weights for which every layer matters and distributions are as peaked as a trained model's."""
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        if name.endswith("norm.weight"):
            return rng.uniform(0.7, 1.3, shape)
        scale = {"lm_head.weight": 3.0, "embed_tokens.weight": 6.0}.get(name, 1.5)
        return rng.normal(size=shape) * scale / np.sqrt(config.hidden_size)

    return {name: draw(name, shape).astype(np.float32) for name, shape in convert.shapes(config).items()}


@pytest.fixture(scope="session")
def toy():
    """Return ``toy(seed, distance=0, **changes) -> Llama``, which makes a model of `TOY` with `changes` to its config.

    A ``distance`` above 0 moves the seed's weights that fraction of the way to an unrelated model's (1: all the way).
    The result is a draft model that often agrees with ``toy(seed)``.
    """

    def make(seed: int, distance: float = 0.0, **changes) -> Llama:
        config = dataclasses.replace(TOY, **changes)
        near, far = _arrays(config, seed), _arrays(config, seed + 1000)
        mixed = ((name, near[name] + distance * (far[name] - near[name])) for name in near)
        return from_arrays(config, mixed, np.float32)

    return make


@pytest.fixture(scope="session")
def prompts():
    """Return ``prompts(lengths, seed=0, width=None, vocab_size=61)``, which makes random ragged prompts.

    It returns ``(tokens, lengths, keys)``. The positions after a prompt's end hold garbage, including ids far outside
    the vocabulary.
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
    """Write a tiny target model and its draft model, and return their folders."""
    from support import text_pair

    folder = tmp_path_factory.mktemp("sources")
    return text_pair.write(folder / "target"), text_pair.write(folder / "draft", distance=0.3)


@pytest.fixture(scope="module")
def chatty(sources):
    """Return the folder of a target whose tokenizer has a chat template."""
    from support.templates import TEMPLATE

    folder = sources[0].parent / "chatty"
    shutil.copytree(sources[0], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def running(sources):
    """Yield a server for the two models on a real port."""
    from support import servers  # OpenAI's client takes a second to load, and most tests do without it

    with servers.running(sources) as running:
        yield running


@pytest.fixture
def gate(running, monkeypatch):
    """Yield an event that blocks the engine's decoding until ``gate.set()``; it is set after the test in any case."""
    from support.streams import until

    engine = running.engine  # its last call for an earlier request must not wait at the gate
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
    """Return ``complete(**fields)``, which requests a completion, by default of 12 tokens with a seed."""
    return running.complete


@pytest.fixture(scope="module")
def chat(running):
    """Return ``chat(**fields)``, which requests a chat completion, by default of 12 tokens with a seed."""
    return running.chat


@pytest.fixture
def run(monkeypatch, capsys):
    """Return ``run(*arguments, stdin=None)``, which runs `jspec` in this process.

    It returns the exit code, standard output, and standard error.

    Args:
        stdin: Input bytes, or None for a terminal.
    """

    def command(*arguments, stdin=None):
        source = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        source.isatty = lambda: stdin is None
        monkeypatch.setattr(sys, "stdin", source)
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        return exit_.value.code or 0, *capsys.readouterr()

    return command
