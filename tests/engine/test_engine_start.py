"""The programs an engine compiles before it starts, which JAX can cache, and those for constrained requests."""

import dataclasses
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jspec.engine import Engine, Request
from jspec.engine.runner import Runner, _programs
from jspec.engine.slots import Variant
from support.constrained import OPTIONS, NoMultiples, models, requests, texts

pytestmark = pytest.mark.usefixtures("quick_compile")
ASKS = "python_cpu_callback"  # marks a program that calls the host
COMPILE = Runner.compile


def test_startup_programs_do_not_call_host():
    """JAX never caches programs that call the host, so these would be compiled at every start."""
    runner = Engine(*models(), slots=2, **OPTIONS).device
    asks = {
        key: ASKS in runner._lowered(key).as_text() for key in (*runner._startup_keys(), *runner._decode_keys(*Variant))
    }
    assert {key for key, does in asks.items() if does} == {*runner._decode_keys(Variant.CONSTRAINED)}
    assert not {*runner._startup_keys()} & {*runner._decode_keys(Variant.CONSTRAINED)}


@pytest.mark.parametrize("part", ["lowered", "compiled"])
def test_failed_compilation_ends_startup(monkeypatch, part):
    """Later programs are not compiled, and those that have been compiled are kept."""
    _programs.cache_clear()
    runner, begun = Engine(*models(), slots=2, **OPTIONS).device, []
    bad = runner._startup_keys()[-1 if part == "lowered" else 2]

    def lowered(key):
        if key == bad and part == "lowered":
            raise RuntimeError("planted")
        return types.SimpleNamespace(compile=lambda: compiled(key))

    def compiled(key):
        begun.append(key)
        time.sleep(0.1)
        if key == bad:
            raise RuntimeError("planted")
        return key

    monkeypatch.setattr("jspec.engine.runner.ThreadPoolExecutor", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(runner, "_lowered", lowered)
    with pytest.raises(RuntimeError, match="planted"):
        COMPILE(runner)
    assert len(begun) <= 4 < len(runner._startup_keys()) and not runner.is_compiled
    assert part == "lowered" or {*runner._startup_keys()[:2]} <= {*runner._programs}
    _programs.cache_clear()


@pytest.fixture
def compiling(monkeypatch):
    """Hold compilation for constrained requests until the event is set, except for the first `free` steps."""
    ends, later = threading.Event(), Runner.deferred_compiles
    ends.free = 0
    _programs.cache_clear()

    def held(runner):
        steps = later(runner)
        return [*steps[: ends.free], *(lambda step=step: (ends.wait(60), step()) for step in steps[ends.free :])]

    monkeypatch.setattr(Runner, "deferred_compiles", held)
    yield ends
    ends.set()


def wait_for(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_constrained_requests_wait_for_their_programs(compiling):
    free, constrained, *_ = requests()
    ended = []
    with Engine(*models(), slots=2, **OPTIONS) as engine:
        active = engine.submit(constrained, lambda result: result.finish_reason and ended.append(result))
        assert texts(engine.generate([free])) == [tuple_of(free)] and not ended and engine.num_waiting == 1
        gone = engine.submit(constrained, lambda _: None)
        engine.cancel(gone)
        wait_for(lambda: gone.result.finish_reason == "cancelled")
        assert not ended
        threading.Timer(0.5, compiling.set).start()  # while the engine is closing, which loses no request
    assert [result is active.result for result in ended] == [True] and texts(ended) == [tuple_of(constrained)]


def tuple_of(request):
    """Return the output of `request` from an engine that compiles programs when it first needs them."""
    return next(one.tokens for one in Engine(*models(), slots=1, **OPTIONS).stream_sync(request) if one.finish_reason)


def test_closing_engine_does_not_wait_for_unneeded_programs(compiling):
    with Engine(*models(), slots=2, **OPTIONS) as engine:
        engine.expect_constraints()
        active = engine.submit(requests()[1], lambda _: None)
        begun = time.monotonic()
        engine.close(cancel=True)
    assert active.result.finish_reason == "cancelled" and time.monotonic() - begun < 30  # a step waits 60 seconds
    engine.expect_constraints()  # has no effect


def test_decoding_starts_before_draft_programs_are_compiled(compiling):
    """Decode without drafts until the programs with drafts are compiled; the output is the same."""
    request, compiling.free = requests()[1], 2
    with Engine(*models(), slots=2, **OPTIONS) as engine:
        first = engine.generate([request])[0]
        assert not any(first.drafted) and not engine._compiler.is_done
        compiling.set()
        wait_for(lambda: engine._compiler.is_done)
        second = engine.generate([request])[0]
    assert any(second.drafted) and texts([first]) == texts([second]) == [tuple_of(request)]


@pytest.fixture
def fails_once(monkeypatch):
    """Return a function that fails an engine's first compilation of each constrained program, and lists them."""
    compiled = Runner._program
    _programs.cache_clear()

    def make(engine):
        failed = []

        def program(runner, *key):
            if runner is engine.device and key[2:3] == (Variant.CONSTRAINED,) and key not in failed:
                failed.append(key)
                raise MemoryError("planted")
            return compiled(runner, *key)

        monkeypatch.setattr(Runner, "_program", program)
        return failed

    return make


def test_failed_compilation_ends_only_requests_that_need_it(fails_once):
    """Only requests that need the program end, and the next such request tries to compile it again."""
    free, constrained, *_ = requests()
    with Engine(*models(), slots=2, **OPTIONS) as engine:
        failed = fails_once(engine)
        found = engine.generate([dataclasses.replace(free, key=None), constrained, free])
        again = engine.generate([constrained])
    assert [one.finish_reason == "error" for one in found] == [False, True, False] and not found[1].is_refused
    assert found[1].error == "The programs that constraints need cannot be compiled: MemoryError: planted"
    assert texts(again) == [tuple_of(constrained)] and len(failed) == 4


def test_engine_uses_programs_compiled_by_another_engine(fails_once):
    """An engine whose own compilation failed uses the programs that another engine has compiled."""
    constrained = requests()[1]
    with Engine(*models(), slots=2, **OPTIONS) as mine, Engine(*models(), slots=2, **OPTIONS) as other:
        failed = fails_once(mine)
        assert mine.generate([constrained])[0].finish_reason == "error" and len(failed) == 4
        assert texts(other.generate([constrained])) == texts(mine.generate([constrained])) == [tuple_of(constrained)]


def test_engine_without_thread_compiles_programs_on_demand(compiling):
    engine, request = Engine(*models(), slots=2, **OPTIONS), requests()[1]
    engine.expect_constraints()
    result = next(one for one in engine.stream_sync(request) if one.finish_reason)
    assert texts([result]) == [tuple_of(request)]
    engine.close()


def test_failure_during_compilation_loses_no_request(compiling):
    free, constrained, *_ = requests()
    with Engine(*models(), slots=2, **OPTIONS) as engine:
        waiting = engine.submit(constrained, lambda _: None)
        decode_rounds, calls = engine.device.decode_rounds, iter(range(1000))
        engine.device.decode_rounds = lambda *how: 1 / 0 if next(calls) == 2 else decode_rounds(*how)
        assert texts(engine.generate([free])) == [tuple_of(free)] and next(calls) > 2
        compiling.set()
    assert texts([waiting.result]) == [tuple_of(constrained)]


def test_constraint_programs_are_compiled_during_decoding(compilations):
    """The first constrained request compiles all of them, while slots change hands."""
    keys = jax.random.split(jax.random.key(4), 3)
    with Engine(*models(), slots=2, **OPTIONS, num_draft_tokens=1, accept="block") as engine:
        engine.generate([Request((1, 2), 20, key=key) for key in keys] + requests()[1:2])
        assert not engine.device.deferred_compiles()
        before = compilations()
        assert all(map(NoMultiples().consume, engine.generate(requests()[1:2])[0].tokens))
        assert compilations() == before
