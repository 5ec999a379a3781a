"""An engine's exported programs: when they are read, what they depend on, and that they change no output."""

import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import jspec
from jspec.engine import Engine, Request, exported_programs, programs
from jspec.engine.runner import _programs
from jspec.engine.slots import Variant
from jspec.models.quantize import quantize
from support import drafters, toys
from support.matrix import PROMPTS

pytestmark = pytest.mark.usefixtures("quick_compile")
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
OPTIONS = {"slots": 2, "max_length": 40, "chunks": (8,), "rounds": 3}


@pytest.fixture
def folder(tmp_path):
    """Yield JAX's compilation cache directory, empty."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def traced(monkeypatch):
    """Return a list of program names that grows with every trace."""
    names = []

    def counted(name):
        function = getattr(programs, name)

        def traced(*arguments, **options):
            names.append(name)
            return function(*arguments, **options)

        return traced

    for name in ("assign_slot", "prefill", "prefill_batch", "catch_up_drafter", "decode_rounds"):
        monkeypatch.setattr(programs, name, counted(name))
    return names


def exported(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.exported")}


def decoded(target, drafter, constraint=None, num_draft_tokens=2):
    """Return the tokens of three requests and their log-probabilities, from an engine with no programs in memory.

    Timing decides which programs an engine runs, and the programs decide how values are rounded.
    """
    _programs.cache_clear()
    samplings = {}, {"temperature": 0.7}, {"top_p": 0.8, "presence_penalty": 0.5}
    with Engine(target, drafter, num_draft_tokens=num_draft_tokens, **OPTIONS) as engine:
        requests = [
            Request(PROMPTS[i], 12, jspec.SamplingParams(**samplings[i]), key, constraint=constraint, top_logprobs=i)
            for i, key in enumerate(jax.random.split(jax.random.key(3), 3))
        ]
        results = engine.generate(requests)
    return [result.tokens for result in results], np.concatenate([result.raw_logprobs for result in results])


def lowered(target, drafter, num_draft_tokens=2, most=None):
    """Lower the first `most` programs that an engine's start compiles, and return their number."""
    _programs.cache_clear()
    with Engine(target, drafter, num_draft_tokens=num_draft_tokens, **OPTIONS) as engine:
        keys = engine.device._startup_keys()[:most]
        for key in keys:
            engine.device._lowered(key)
    return len(keys)


def models(**details):
    target = toys.tiny_llama(10, **details)
    return target, toys.tiny_llama(11, 1, related_to=target, **details)


NAMES = ("model", "eagle 3", "fallback", "recycling", "several", "few tokens")


@pytest.mark.parametrize("name", ["none", "int8", "bfloat16", *NAMES])
def test_later_engine_traces_nothing_and_decodes_same_text(folder, traced, name):
    target, draft = models()
    if name == "int8":
        target = quantize(target)
    if name == "bfloat16":
        target, draft = (jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model) for model in (target, draft))
    drafter = drafters.make(name, target, draft) if name in NAMES else None if name == "none" else draft
    num_draft_tokens = "auto" if name in drafters.TREE_NAMES else 2
    jax.config.update("jax_compilation_cache_dir", None)
    texts, logprobs = decoded(target, drafter, num_draft_tokens=num_draft_tokens)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    assert lowered(target, drafter, num_draft_tokens) == len(exported(folder)) > 6
    count = len(traced)
    again, found = decoded(target, drafter, num_draft_tokens=num_draft_tokens)
    assert again == texts and len(traced) == count
    np.testing.assert_allclose(found, logprobs, atol=0.05 if name == "bfloat16" else 1e-5)


def test_programs_that_call_the_host_are_not_stored(folder):
    target, draft = models()
    _programs.cache_clear()
    with Engine(target, draft, num_draft_tokens=2, **OPTIONS) as engine:
        for key in engine.device._decode_keys(Variant.CONSTRAINED):
            engine.device._lowered(key)
    assert not exported(folder)


@pytest.mark.parametrize("damage", [b"", b"no pickle", None])
def test_damaged_file_is_rewritten(folder, traced, caplog, damage):
    """Empty, invalid and truncated files are replaced."""
    target, draft = models()
    lowered(target, draft, most=2)
    for path in folder.glob("*.exported"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    count = len(traced)
    lowered(target, draft, most=2)
    assert len(traced) == 2 * count and caplog.text.count("cannot be read and will be replaced") == len(
        exported(folder)
    )
    lowered(target, draft, most=2)
    assert len(traced) == 2 * count


def test_unwritable_folder_costs_only_time(folder, caplog, monkeypatch):
    target, draft = models()
    (folder / "file").touch()
    monkeypatch.setattr(exported_programs, "_path", lambda *_: folder / "file" / "1.exported")
    assert lowered(target, draft, most=2) == 2
    assert "cannot be written" in caplog.text


def path_of(target=None, drafter=None, *parts):
    target = toys.tiny_llama(10) if target is None else target
    leaves, structure = jax.tree.flatten((target, drafter))
    return exported_programs._path(leaves, structure, (structure, *parts))


OTHERS = {
    "constant": lambda: path_of(toys.tiny_llama(10, rms_norm_eps=1e-3)),
    "shape": lambda: path_of(toys.tiny_llama(10, vocab_size=9)),
    "depth": lambda: path_of(toys.tiny_llama(10, 1)),
    "int8": lambda: path_of(quantize(toys.tiny_llama(10))),
    "bfloat16": lambda: path_of(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), toys.tiny_llama(10))),
    "drafter": lambda: path_of(None, jspec.NGramDrafter()),
    "drafter's constant": lambda: path_of(None, jspec.NGramDrafter(max_ngram=2)),
    "rule": lambda: path_of(None, None, jspec.rules.Typical(0.3, 0.09)),
    "rule's constant": lambda: path_of(None, None, jspec.rules.Typical(0.3, 0.1)),
    "long constant": lambda: path_of(None, None, tuple(range(2000))),
    "other long constant": lambda: path_of(None, None, (*range(1000), 0, *range(1001, 2000))),
}


def test_file_name_depends_on_everything_that_shapes_program(folder, monkeypatch):
    names = {"none": path_of()} | {name: make() for name, make in OTHERS.items()}
    with jax.default_matmul_precision("float32"):
        names["precision"] = path_of()
    with jax.enable_x64(True):
        names["x64"] = path_of()
    monkeypatch.setenv("JSPEC_KERNELS", "0")
    names["kernels"] = path_of()
    monkeypatch.delenv("JSPEC_KERNELS")
    assert names["none"] == path_of()
    monkeypatch.setattr(exported_programs, "_code", lambda: "other code")
    names["code"] = path_of()
    assert None not in names.values() and len({*names.values()}) == len(names)


def test_third_party_code_is_not_stored(folder):
    """Third-party code may change without changing its name."""

    @jax.tree_util.register_static
    class Mine(jspec.NGramDrafter):
        pass

    assert path_of(None, Mine()) is None
    assert path_of(None, None, lambda: 0) is None
    assert path_of(None, None, decoded) is None
    assert path_of(toys.markov_pair(0)[0]) is None


def test_missing_or_remote_folder_stores_nothing(folder):
    for other in (None, "gs://bucket/programs"):
        jax.config.update("jax_compilation_cache_dir", other)
        assert path_of() is None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_enable_compilation_cache", False)
    assert path_of() is None


def test_file_name_is_equal_in_every_process(folder):
    target, draft = models()
    head = drafters.make("eagle 3", target, draft).save(folder / "head")
    code = (
        "from test_exported_programs import *\n"
        f"jax.config.update('jax_compilation_cache_dir', {str(folder)!r})\n"
        f"drafters = jspec.NGramDrafter(), jspec.drafters.EagleDrafter.load({str(head)!r})\n"
        "print(*(path_of(None, drafter, jspec.rules.Typical(0.3, 0.09)) for drafter in drafters))"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    found = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1 and str(folder) in found.pop()


ARGUMENTS = np.float32(1), np.float32(2)


def total(x, y):
    return {"sum": x + y, "y": y}


def lowered_total():
    """Return the result of `total` as it is lowered now."""
    return exported_programs.lower(total, ARGUMENTS, "total").compile()(*ARGUMENTS)


def test_oldest_files_are_deleted(folder, monkeypatch):
    """Among them what a killed process has left."""
    monkeypatch.setattr(exported_programs, "_MAX_FILES", 3)
    for name in range(5):
        old = folder / ("partial.exported.x1" if name == 2 else f"{name}.exported")
        old.touch()
        os.utime(old, (name, name))
    assert lowered_total() == {"sum": 3, "y": 2}
    assert {"3.exported", "4.exported"} < exported(folder).keys() and len([*folder.glob("*.exported*")]) == 3


def test_file_with_invalid_program_is_replaced(folder, caplog):
    """It can be read, but JAX cannot lower what is in it."""
    assert lowered_total()["sum"] == 3
    (path,) = folder.glob("*.exported")
    result, content = pickle.loads(path.read_bytes())
    start = content.index(b"ML\xefR") + 40
    damaged = content[:start] + bytes(len(content) - start - 400) + content[len(content) - 400 :]
    path.write_bytes(pickle.dumps((result, damaged)))
    for _ in range(3):
        assert lowered_total()["sum"] == 3
    assert caplog.text.count("cannot be used") == 1 and path.exists()


def test_missing_flatbuffers_disables_storing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.export.serialization", None)
    assert lowered_total()["sum"] == 3 and not exported(folder)


def test_programs_on_mesh_are_not_stored(folder):
    """The mesh in use is part of a program, and of no setting."""
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert path_of() is None
    assert path_of(jax.device_put(toys.tiny_llama(10), jax.sharding.NamedSharding(MESH, P()))) is None
    assert path_of() is not None


def test_sources_newer_than_the_process_store_nothing(folder, monkeypatch):
    """The process may run older ones."""
    exported_programs._code.cache_clear()
    assert path_of() is not None
    exported_programs._code.cache_clear()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 0.0)
    assert path_of() is None
    exported_programs._code.cache_clear()


def test_file_of_another_user_is_read(folder, monkeypatch):
    assert lowered_total()["sum"] == 3
    files = exported(folder)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(exported_programs, "_export", refuse)
    assert lowered_total()["sum"] == 3 and exported(folder) == files


def test_programs_with_kernels_can_be_exported():
    """Programs with jspec's own kernels can be exported for CUDA."""
    target = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), toys.tiny_llama(10, head_dim=64))
    arguments = target, np.zeros((2, 1), np.int32), target.new_cache(2, 256), np.zeros(2, np.int32)
    leaves, structure = jax.tree.flatten(arguments)
    exported, _ = exported_programs._export(lambda model, *rest: model.forward(*rest), leaves, structure, "cuda")
    assert "xla.gpu.triton" in exported.mlir_module()
