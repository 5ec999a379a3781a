"""One model over several processes: outputs, weights, errors, and lost processes."""

import contextlib
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

import jspec
from jspec.cluster.mesh import checkpoints, processes
from jspec.cluster.mesh.rendezvous import meet
from support import text_pair
from support.on_devices import TESTS

QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return the folders of a target and a draft whose heads four processes can divide."""
    folder = tmp_path_factory.mktemp("mesh")
    return text_pair.write(folder / "target", **HEADS), text_pair.write(folder / "draft", distance=0.3, **HEADS)


@contextlib.contextmanager
def started(count, case, *folders, **environment):
    """Start `count` processes of a mesh, or one without a mesh if it is 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    running = []
    for number in range(max(1, count)):
        places = [folder[number % len(folder)] if isinstance(folder, list) else folder for folder in folders]
        command = [sys.executable, "-m", "support.mesh_process", address, count, number, case, *places]
        options = {"env": os.environ | QUICK | {"PYTHONPATH": path} | environment, "text": True}
        running.append(
            subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        )
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def outcomes(count, case, *folders):
    """Return the lines that each process prints."""
    with started(count, case, *folders) as running:
        done = [process.communicate(timeout=400) for process in running]
    for process, (_, error) in zip(running, done, strict=True):
        assert process.returncode == 0, error
    lines = [[line for line in out.splitlines() if not line.startswith("[Gloo]")] for out, _ in done]
    return [[json.loads(line) for line in one] for one in lines]


@pytest.mark.parametrize(
    ("count", "case"), [(2, "texts"), (4, "text"), (4, "texts")]
)
def test_several_processes_give_the_output_of_one(pair, count, case, report):
    """Every program, plain and speculative, with float32 and int8 weights, on 2 processes; some on 4."""
    (alone,) = outcomes(0, case, *pair)
    found = outcomes(count, case, *pair)
    off = 0.0
    for lines in found:
        for (name, tokens, logprobs), (other, expected, wanted) in zip(lines, alone, strict=True):
            assert name == other and tokens == expected, name
            off = max(off, np.abs(np.subtract(logprobs, wanted)).max())
    report(processes=count, programs=len(alone), logprobs_off=f"{off:.0e}")
    assert off < 1e-4


def test_converted_folders_load_in_parts(pair, run, tmp_path, report):
    """Safetensors and an Orbax checkpoint give the same weights, of which each process holds its share."""
    assert run("convert", pair[0], tmp_path / "orbax")[0] == 0
    folders = pair[0], tmp_path / "orbax"
    ((whole, other),) = outcomes(0, "weights", *folders)
    assert whole == other
    for lines in outcomes(2, "weights", *folders):
        for sums, held in lines:
            np.testing.assert_allclose(sums, whole[0], rtol=1e-5)
            assert held < 0.55 * whole[1]
    report(bytes=whole[1], held=held)


def test_other_checkpoints_and_meshes_are_named(pair, tmp_path):
    """Different weights, and heads that the mesh does not divide, end all processes with one sentence."""
    other = text_pair.write(tmp_path / "target", distance=0.1, **HEADS)
    with started(2, "weights", [pair[0], other]) as running:
        errors = [process.communicate(timeout=200)[1] for process in running]
    assert [process.returncode for process in running] == [3, 3], errors
    for error in errors:
        assert "ValueError: Process 1 has another checkpoint at " in error.splitlines()[-1], error
    with started(4, "weights", text_pair.write(tmp_path / "narrow")) as running:
        errors = [process.communicate(timeout=200)[1] for process in running]
    for error in errors:
        assert "devices, which do not divide the model's" in error.splitlines()[-1], error


def test_killed_process_ends_the_others(pair):
    """No process waits for ever for one that has been killed."""
    with started(2, "killed", *pair) as running:
        assert running[1].wait(200) == -9
        assert running[0].wait(150) != 0


def test_missing_processes_are_named(pair):
    """A process that waits in vain says for which one, or which address it cannot reach."""
    with started(2, "weights", pair[0], JOIN_TIMEOUT="20") as running:
        running[1].kill()
        error = running[0].communicate(timeout=100)[1].splitlines()[-1]
        assert "after 20 seconds process 1 is missing; start it, or check that it can reach this machine." in error
    with pytest.raises(TimeoutError, match=r"^Process 1 cannot reach process 0 at 127.0.0.1:1 within 0.3 seconds \("):
        meet("127.0.0.1:1", 2, 1, 0.3)
    with pytest.raises(ValueError, match=r"^The coordinator's address is 'here'; expected a host and a port"):
        meet("here", 2, 1, 1)


def test_processes_with_the_same_number_are_refused(pair):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "import sys; from jspec.cluster.mesh.rendezvous import meet; meet(sys.argv[1], 3, int(sys.argv[2]), 60)"
    running = [
        subprocess.Popen([sys.executable, "-c", code, address, number], stderr=subprocess.PIPE, text=True)
        for number in "011"
    ]
    for process in running:
        error = process.communicate(timeout=100)[1]
        assert error.splitlines()[-1].startswith("ValueError: Of 3 processes, several have the number 1"), error


def test_incomplete_arguments_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"^coordinator, num_processes and process_id belong together"):
        jspec.cluster.join("10.0.0.1:1234", 2)
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "leader")
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    monkeypatch.setenv("LWS_WORKER_INDEX", "1")
    seen = []
    monkeypatch.setattr(processes, "meet", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *arguments, **_: seen.append(arguments))
    monkeypatch.setattr(processes, "check_same", lambda *_: None)
    jspec.cluster.join(timeout=7)
    assert seen == [("leader:8476", 2, 1, 7), ("leader:8476", 2, 1)]


def test_fingerprint_covers_names_sizes_and_samples(tmp_path):
    """A changed byte in a sample, a renamed file and another size change it. Other files do not matter."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 * 2**20))
    found = {checkpoints.fingerprint(tmp_path)}
    (tmp_path / "README.md").write_text("a")
    assert checkpoints.fingerprint(tmp_path) in found
    for change in (lambda: file.write_bytes(bytes(3 * 2**20 - 1) + b"a"), lambda: file.write_bytes(bytes(2**20))):
        change()
        found.add(checkpoints.fingerprint(tmp_path))
    file.rename(tmp_path / "other.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found.add(checkpoints.fingerprint(tmp_path))
    assert len(found) == 4
    (tmp_path / "a.gguf").write_bytes(b"a")
    assert checkpoints.fingerprint(tmp_path / "a.gguf") != checkpoints.fingerprint(tmp_path)
