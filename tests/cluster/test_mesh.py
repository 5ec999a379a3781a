"""One model over several processes: outputs, weights, errors, and lost processes."""

import concurrent.futures
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import jspec
from jspec.cluster.mesh import checkpoints, processes
from jspec.cluster.mesh.rendezvous import wait_for_all
from support import text_pair
from support.on_devices import TESTS

QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return the folders of a target and a draft whose heads four processes can divide."""
    folder = tmp_path_factory.mktemp("mesh")
    return text_pair.write(folder / "target", **HEADS), text_pair.write(folder / "draft", distance=0.3, **HEADS)


def free_port():
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def started(count, case, *folders, **environment):
    """Start `count` processes of a mesh, or one without a mesh if it is 0."""
    address = f"127.0.0.1:{free_port()}"
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


@pytest.mark.parametrize(("count", "case"), [(2, "text"), (2, "texts"), (4, "texts")])
def test_several_processes_give_the_output_of_one(pair, count, case, report):
    """Every program gives the same output on several processes as on one, with float32 and int8 weights."""
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


def test_errors_are_raised_in_all_processes(pair, tmp_path):
    """Different weights, a missing checkpoint, and heads that the mesh does not divide end all processes."""
    other = text_pair.write(tmp_path / "target", distance=0.1, **HEADS)
    cases = {
        "must be the same in all processes, but it differs from process 0 in: 1 (here, in": [pair[0], other],
        "ValueError: Process 1 failed: ": [pair[0], tmp_path / "missing"],
        "Process 0 failed: The mesh axis 'model' has size 2, which does not divide the model's": text_pair.write(
            tmp_path / "narrow", num_attention_heads=3, num_key_value_heads=3
        ),
    }
    for reason, folders in cases.items():
        with started(2, "weights", folders) as running:
            errors = [process.communicate(timeout=200)[1] for process in running]
        assert [process.returncode for process in running] == [3, 3], errors
        assert all(reason in error.splitlines()[-1] for error in errors), errors


def test_killed_process_ends_the_others(pair):
    """No process waits for ever for one that has been killed."""
    with started(2, "killed", *pair) as running:
        assert running[1].wait(200) == -9
        assert running[0].wait(150) != 0


def joined(*processes, timeout=20, before=lambda port: None):
    """Return the errors of processes, given by (num_processes, process_id, version), that meet in threads."""
    port = free_port()

    def join(process):
        count, number, version = process
        try:
            wait_for_all(f"localhost:{port}", count, number, timeout, {"jax": version})
        except (ValueError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        futures = [pool.submit(join, processes[0])]
        time.sleep(0.3)
        before(port)
        futures += [pool.submit(join, process) for process in processes[1:]]
        return [future.result() for future in futures]


def test_rendezvous_waits_for_all_processes():
    assert joined((3, 0, "1"), (3, 2, "1"), (3, 1, "1")) == [None] * 3
    assert joined((1, 0, "1")) == [None]


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ([(3, 0, "1"), (3, 1, "1")], "TimeoutError: Only 2 of 3 processes joined at port "),
        ([(3, 0, "1"), (3, 1, "1"), (3, 1, "1")], "ValueError: Several processes have process_id 1; give each its own"),
        ([(2, 0, "1"), (2, 1, "2")], "ValueError: In process 1, the version of jax is 2 instead of 1; use the same"),
        ([(2, 0, "1"), (3, 1, "1")], "ValueError: In process 1, num_processes is 3 instead of 2; use the same"),
    ],
)
def test_incompatible_processes_get_the_same_error(processes, reason):
    """Every process raises the error, not only process 0."""
    for error in joined(*processes, timeout=3):
        assert error is not None and error.startswith(reason)


def test_strangers_and_restarted_processes_do_not_matter():
    """Programs that probe the port are ignored, and a process that ended may join again."""
    assert joined((3, 0, "1"), (3, 1, "1"), (3, 2, "1"), before=disturb) == [None] * 3


def disturb(port):
    """Connect as other programs do, and as a process 1 that ends before the others have joined."""
    own = json.dumps({"process_id": 1, "num_processes": 3, "versions": {"jax": "1"}}).encode()
    for content in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\xff\n", b"[1]\n", b'{"process_id": "a"}\n', own + b"\n"):
        with socket.create_connection(("localhost", port)) as connection:
            connection.sendall(content)


def test_unreachable_process_0_and_malformed_arguments_are_named():
    port = free_port()
    with pytest.raises(
        TimeoutError, match=rf"^Process 1 could not reach process 0 at 127.0.0.1:{port} within 0.5 seconds \("
    ):
        wait_for_all(f"127.0.0.1:{port}", 2, 1, 0.5, {})
    for address in ("here", "here:x", "here:70000", ":1"):
        with pytest.raises(ValueError, match=r"^The coordinator's address is .*; expected a host and a port"):
            wait_for_all(address, 2, 1, 1, {})
    with pytest.raises(
        ValueError, match=r"^process_id is 2; expected a number from 0 to 1, because num_processes is 2"
    ):
        wait_for_all("localhost:1", 2, 2, 1, {})
    with (
        socket.create_server(("", port)) as _,
        pytest.raises(OSError, match=rf"^Process 0 cannot listen at port {port}"),
    ):
        wait_for_all(f"localhost:{port}", 2, 0, 1, {})


def test_incomplete_arguments_are_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"^coordinator, num_processes and process_id are '10.0.0.1:1234', 2 and None; pass all three"
    ):
        jspec.cluster.join("10.0.0.1:1234", 2)
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "leader")
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    monkeypatch.setenv("LWS_WORKER_INDEX", "1")
    seen = []
    monkeypatch.setattr(processes, "wait_for_all", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda *arguments, **_: seen.append(arguments))
    jspec.cluster.join(timeout=7)
    assert [arguments[:4] for arguments in seen] == [("leader:8476", 2, 1, 7), ("leader:8476", 2, 1)]
    assert seen[0][4].keys() == {"jspec", "jax", "jaxlib"}


def test_fingerprint_covers_configuration_and_samples(pair, tmp_path, run):
    """A changed byte in a sample, another size and another configuration change it. Other files do not matter."""
    folder = shutil.copytree(pair[0], tmp_path / "copy")
    found = {checkpoints.fingerprint(folder)}
    assert found == {checkpoints.fingerprint(pair[0])}
    for name in ("README.md", "trainer_state.json", "other.safetensors"):
        (folder / name).write_text("{}")
    assert checkpoints.fingerprint(folder) in found
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for changed in (content[:-1] + b"a", content + bytes(2**21), content + bytes(2**21 - 1) + b"a"):
        file.write_bytes(changed)
        found.add(checkpoints.fingerprint(folder))
    (folder / "config.json").write_text("{}")
    found.add(checkpoints.fingerprint(folder))
    (tmp_path / "a.gguf").write_bytes(b"a")
    found.add(checkpoints.fingerprint(tmp_path / "a.gguf"))
    assert run("convert", pair[0], tmp_path / "orbax")[0] == 0
    found.add(checkpoints.fingerprint(tmp_path / "orbax"))
    assert len(found) == 7
