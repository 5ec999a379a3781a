"""Host memory of processes that load one model together."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import convert
from bench import plots
from bench.report import RESULTS, publish
from convert.saving import save_new
from jspec.bundled import PAIR
from jspec.cluster import join, load_on_mesh

_ALLOWED_MB = 200  # beyond a process's share of the weights
_CONFIG: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def run(counts: Iterable[int], layers: int, folder: Path = RESULTS) -> None:
    """Publish one row per checkpoint format and number of processes.

    Args:
        layers: the number of layers of the random float32 model. A layer has 63 MB, and the vocabulary 268 MB.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        sources = {"safetensors": Path(scratch) / "hf", "Orbax": Path(scratch) / "orbax"}
        size = _write(sources["safetensors"], layers)
        convert.save(convert.load(sources["safetensors"]), sources["Orbax"])
        for kind, source in sources.items():
            for count in counts:
                found = _processes(count, source)
                most = max(peak - base for base, peak, _ in found)
                row = {"checkpoint": kind, "MB": size / 1e6, "processes": count, "share, MB": size / count / 1e6}
                row |= {"most memory of a process, MB": most, "allowed, MB": size / count / 1e6 + _ALLOWED_MB}
                rows.append(row | {"s": max(seconds for *_, seconds in found)})
    notes = [
        "Resident memory at its peak, less that before loading, of the process that needs most. It includes the"
        " process's share of the weights, because the devices are CPUs."
    ]
    draw = plots.bars("checkpoint", "most memory of a process, MB")
    publish("mesh-memory", "A model over several processes of one machine", rows, draw, notes, folder)


def _write(folder: Path, layers: int) -> int:
    """Write a random model, and return the size of its weights in bytes."""
    config = dataclasses.replace(convert.read_config(PAIR / "target"), num_hidden_layers=layers, **_CONFIG)
    generator = np.random.default_rng(0)
    shapes = convert.shapes(config)
    arrays = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_new(config, arrays, folder)
    return sum(array.nbytes for array in arrays.values())


def _processes(count: int, source: Path) -> list[tuple[float, float, float]]:
    """Return the memory before loading, the peak memory (both in MB) and the seconds of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "bench.mesh", address, str(count), str(source)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True) for i in range(count)
    ]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("A process of the mesh failed; see its error above.")
    return [tuple(json.loads(output.splitlines()[-1])) for output in outputs]


def _load(address: str, count: int, source: str, number: int) -> None:
    """Load the model as one of the processes, and print what `_processes` returns."""
    join(address, count, number)
    mesh = jax.make_mesh((count,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    base, began = _peak(), time.perf_counter()
    model = load_on_mesh(source, mesh)
    jax.block_until_ready(jax.tree.leaves(model))
    print(json.dumps([base, _peak(), time.perf_counter() - began]))


def _peak() -> float:
    """Return the largest amount of resident memory so far, in MB. `getrusage` would include that of the parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    _load(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
