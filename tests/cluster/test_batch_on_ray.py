"""Batch jobs on a small Ray cluster: lost workers, datasets, and too many workers."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest

import jspec
from jspec.cluster.resources import Resources
from support.servers import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
WORDS = "in", "a", "thing", "the", "hat"
PROMPTS = [" ".join(WORDS[(i * step) % 5] for step in range(1, 3 + i % 7)) for i in range(48)]
NEW = 24
FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
_WORKER = "PartWorker"  # in the title of every worker process


@pytest.fixture(scope="module")
def cluster():
    """Start a Ray cluster with three cores in this process, and yield its address."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FAST.items():
            patch.setenv(name, value)  # for the workers
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork")  # the child only starts another program
            context = ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
        yield context.address_info["address"]
        ray.shutdown()


@pytest.fixture(scope="module")
def done(sources):
    """Return the completions of the prompts by `jspec.complete`."""
    options = {"max_new_tokens": NEW, "accept": "coupled", "seed": 7}
    return jspec.complete(*map(jspec.load, sources), tokenizer(), PROMPTS, **options)


def workers(known=()):
    """Return the processes of the workers that this process or its children started and that are not `known`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_worker = _WORKER in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
            if is_worker and process not in known:
                found.append(process)
    return found


@contextlib.contextmanager
def job(sources, file, address, *options):
    """Run `jspec batch`, and yield the process. It starts its own cluster if `address` is None."""
    command = [sys.executable, "-m", "jspec", "batch", file, "--output", file.parent / "output", "--target", sources[0]]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | FAST
    environment |= {} if address is None else {"RAY_ADDRESS": address}
    process = subprocess.Popen([*map(str, (*command, *options))], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition, process, seconds=240):
    """Wait until ``condition()`` is true, and return it. Fail if `process` ends first."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < end, (
            process.stderr.read() if process.poll() else "timed out"
        )
        time.sleep(0.05)
    return found


def test_killed_workers_change_nothing(cluster, sources, done, tmp_path, report):
    """A worker is killed while it compiles and another one while it decodes. Every prompt is completed once."""
    file, output = tmp_path / "prompts.jsonl", tmp_path / "output"
    file.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in PROMPTS))
    options = "--draft", sources[1], "-n", NEW, "--seed", 7, "--slots", 2, "--workers", 2, "--num-draft-tokens", 2
    with job(sources, file, cluster, *options) as process:
        first = wait_for(lambda: len(found := workers()) == 2 and found, process)
        first[0].kill()
        wait_for(lambda: [*output.glob("part-*")], process)
        second = workers(known=first[:1])
        second[0].kill()
        error = process.communicate(timeout=240)[1]
    assert process.returncode == 0 and "48 prompts in 8 files; " in error, error
    rows = [json.loads(line) for part in sorted(output.glob("part-*")) for line in part.read_text().splitlines()]
    assert [row["prompt_index"] for row in rows] == [*range(48)]
    assert [row["generated_tokens"] for row in rows] == [one.tokens for one in done]
    assert [row["generated_text"] for row in rows] == [one.text for one in done]
    report(killed=[first[0].pid, second[0].pid], tokens=sum(len(one.tokens) for one in done))


def test_dataset_rows_get_their_completions(cluster, sources, done, tmp_path):
    """The completions depend on the index column, not on the order of the rows."""
    import ray

    order = sorted(range(len(PROMPTS)), key=lambda i: i * 7 % 48)
    rows = [{"prompt": PROMPTS[i], "number": i, "x": [i, i + 1]} for i in order]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = ray.data.read_json(str(tmp_path / "rows.jsonl"), override_num_blocks=5)  # reading needs a core, too
    options = {"slots": 2, "max_length": 128, "num_draft_tokens": 2, "max_waiting": 4}
    found = jspec.cluster.complete(
        dataset, *map(str, sources), index="number", seed=7, max_new_tokens=NEW, workers=2, **options
    ).take_all()
    by_index = {row["prompt_index"]: row for row in found}
    assert len(found) == len(by_index) == 48
    for i, one in enumerate(done):
        row = by_index[i]
        assert (row["number"], row["prompt"], [*row["x"]]) == (i, PROMPTS[i], [i, i + 1])
        assert ([*row["generated_tokens"]], row["generated_text"]) == (one.tokens, one.text)
        assert row["finish_reason"] == one.finish_reason


def test_wrong_datasets_and_clusters_are_refused(cluster, sources):
    import ray

    complete = functools.partial(jspec.cluster.complete, ray.data.from_items([{"prompt": "a", "x": 1}]))
    with pytest.raises(ValueError, match=r"^index is 'number', but dataset has the columns prompt, x; pass the name"):
        complete(str(sources[0]), index="number")
    with pytest.raises(TypeError, match=r"^target is of type Llama; pass the path"):
        complete(jspec.load(sources[0]), index="x")
    with pytest.raises(
        ValueError, match=r"^The Ray cluster has 3 CPUs, but 3 x 1 and 1 for reading the dataset are needed"
    ):
        complete(str(sources[0]), index="x", workers=3)  # none would be left for reading
    with pytest.raises(ValueError, match=r"^The Ray cluster has 0 GPUs, but 1 x 1 are needed; use fewer"):
        complete(str(sources[0]), index="x", resources=Resources(gpus=1))
    with pytest.raises(ValueError, match=r"^stop is \('',\); expected non-empty strings"):
        complete(str(sources[0]), index="x", stop="")
    with pytest.raises(ValueError, match=r"^seed must be an int from 0"):
        complete(str(sources[0]), index="x", seed=-1)
    other = ray.data.from_items([{"prompt": "a", "prompt_index": 1}])
    with pytest.raises(ValueError, match=r"^dataset has a column 'prompt_index', which the output uses; rename it"):
        jspec.cluster.complete(other, str(sources[0]), index="prompt_index")


def test_worker_that_always_dies_ends_the_job(cluster, sources):
    """A worker that dies at every start ends the job with an error."""
    import ray

    dataset = ray.data.from_items([{"prompt": "a", "x": 1}])
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.raises(ray.exceptions.RayError, match="died"):
        jspec.cluster.complete(dataset, str(sources[0]), lambda _: os._exit(1), index="x").take_all()


def test_errors_are_one_sentence(cluster, sources, tmp_path):
    """A job that the cluster cannot run fails before it starts. An error in the workers ends the job."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "in"}')
    options = "--plain", "-n", 16, "--workers"
    with job(sources, tmp_path / "prompts.jsonl", cluster, *options, 4) as process:
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and error.startswith("jspec: --workers: The Ray cluster has 3 CPUs, but 4 x 1")
    with job(sources, tmp_path / "prompts.jsonl", cluster, *options, 1, "--slots", 10**9) as process:
        error = process.communicate(timeout=120)[1]
    ours = [line for line in error.splitlines() if "core_worker" not in line and line]  # Ray's C++ code logs a warning
    assert process.returncode == 1 and len(ours) == 1, error
    assert ours[0].startswith("jspec: A worker failed: 1,000,000,000 slots of ")


def test_ctrl_c_ends_the_cluster_that_the_command_started(sources, tmp_path):
    """Ctrl-C ends the command at once. The workers and the cluster that it started end, too."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "in"}')
    known = workers()
    with job(sources, tmp_path / "prompts.jsonl", None, "--plain", "-n", 16, "--workers", 1) as process:
        wait_for(lambda: workers(known), process)
        children = psutil.Process(process.pid).children(recursive=True)
        ending = [child for child in children if "Agent" not in child.name()]  # Ray's agents end a minute later
        assert {"raylet", "gcs_server"} <= {child.name() for child in ending}
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130  # much less, but other tests may be running
    assert not psutil.wait_procs(ending, timeout=30)[1]
