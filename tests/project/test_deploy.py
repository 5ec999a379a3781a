"""The manifests in deploy/: their arguments, their program, and their agreement with the code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jspec
from jspec.cluster import resources
from jspec.cluster.mesh import processes
from jspec.cluster.serve import app as application

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"


def manifests(name):
    """Return the documents of a manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))}


def test_ray_service_deploys_the_application(monkeypatch):
    """Ray Serve imports the application and calls it with the file's arguments."""
    service = manifests("kuberay.yaml")["RayService"]["spec"]
    config = yaml.safe_load(service["serveConfigV2"])
    (described,) = config["applications"]
    module, _, name = described["import_path"].partition(":")
    assert getattr(sys.modules[module], name) is application.from_config
    monkeypatch.setattr(resources, "_total", dict)
    assert application.from_config(described["args"]) is not None
    assert service["rayClusterConfig"]["rayVersion"].startswith("2.60.")
    seen = {}
    monkeypatch.setattr(application, "app", lambda **arguments: seen.update(arguments))
    monkeypatch.setenv("JSPEC_API_KEY", "secret")
    application.from_config(described["args"])
    assert seen["replicas"] == (1, 4) and seen["resources"] == jspec.cluster.Resources(cpus=2)
    assert seen["server_options"] == {"api_key": "secret"}
    group = service["rayClusterConfig"]["workerGroupSpecs"][0]
    cores = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert seen["replicas"] == (group["minReplicas"], group["maxReplicas"]) and cores >= seen["resources"].cpus


def test_program_of_the_leader_worker_set_runs(sources, tmp_path):
    """The program runs in two processes, which find each other through the variables of the LeaderWorkerSet."""
    files = manifests("leaderworkerset.yaml")
    program = files["ConfigMap"]["data"]["program.py"]
    for name, source in zip(("target", "draft"), sources, strict=True):
        program = program.replace(f'"/cache/{name}"', json.dumps(str(source)))
    assert "/cache" not in program
    (tmp_path / "program.py").write_text(program.replace("]):", "], max_new_tokens=8):"))
    container = files["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
    assert container["ports"] == [{"containerPort": processes._PORT}]
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "", "LWS_GROUP_SIZE": "2"}
    environment = os.environ | quick | {"LWS_LEADER_ADDRESS": "127.0.0.1"}
    running = [
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py"],
            env=environment | {"LWS_WORKER_INDEX": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    shown = [[line for line in out.splitlines() if not line.startswith("[Gloo]")] for out, _ in outputs]
    tokenizer = jspec.text.load_tokenizer(sources[0])
    models = [jspec.load(source) for source in sources]
    (done,) = jspec.complete(*models, tokenizer, ["The capital of France is"], max_new_tokens=8)
    assert ["\n".join(lines) for lines in shown] == [done.text, ""]
