"""Workers on Ray Data, which complete the parts of a job or the rows of a dataset."""

import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from jspec.cluster.batch.arrow_tables import Dataset, Table, Untyped, check_indices, prompt_columns, with_completions
from jspec.cluster.batch.batch_job import Part
from jspec.cluster.batch.completed import Completed
from jspec.cluster.batch.prompt_files import check_columns, prompt_of
from jspec.cluster.batch.worker import Decoding, Worker
from jspec.cluster.model_pair import Draft, ModelPair
from jspec.cluster.resources import Resources, check_resources, default_resources, require_ray
from jspec.core.program_cache import prepare_environment
from jspec.core.sampling import SamplingParams
from jspec.core.tokenizer import Tokenizer
from jspec.engine import Engine

_ROWS = 256  # per call of a RowWorker
_CPUS_FOR_READING = 1  # Ray Data would wait for ever if its workers held all CPUs
# Limits on the restarts of a worker and on the retries of its rows, because a row can crash every worker.
_RESTARTS, _RETRIES = 8, 3
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit): ")

MakeEngine = Callable[[], tuple[Engine, Tokenizer]]


class PartWorker:
    """A Ray Data actor that completes the parts of a job. Parts and completions are sent as JSON."""

    def __init__(self, make_engine: MakeEngine, decoding: Decoding):
        prepare_environment()
        self._worker = Worker(*make_engine(), decoding)

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[object]]:
        """Complete one part."""
        part = Part(*json.loads(batch["part"][0]))
        return {"number": [part.number], "completed": [json.dumps(self._worker.complete(*part[1:]))]}


class RowWorker:
    """A Ray Data actor that adds completions to the rows of a dataset."""

    def __init__(self, make_engine: MakeEngine, decoding: Decoding, index: str):
        prepare_environment()
        self._worker, self._index = Worker(*make_engine(), decoding), index

    def __call__(self, table: Table) -> Table:
        """Complete the rows of `table`."""
        indices = check_indices(table.column(self._index), self._index)
        rows = zip(prompt_columns(table), indices, strict=True)
        prompts = [prompt_of(row, f"The row with {self._index} {index}") for row, index in rows]
        return with_completions(table, self._worker.complete(indices, prompts))


def decode_on_ray(
    make_engine: MakeEngine, decoding: Decoding, workers: int, resources: Resources, parts: Sequence[Part]
) -> Iterator[tuple[int, list[Completed]]]:
    """Yield the number and completions of each part, as soon as a worker has completed it.

    If a worker is lost, Ray starts it again, and its part is decoded again.

    Args:
        make_engine: a function that each worker calls. It returns an engine that is not running, and its tokenizer.
        decoding: the settings of the completions.
        workers: the number of processes.
        resources: the resources of each process.
        parts: the parts to complete.

    Raises:
        ValueError: the cluster does not have the resources, a worker raised an error, or a worker was lost too
            often.
    """
    import ray
    from ray.data import DataContext
    from ray.exceptions import RayError

    check_resources(workers, resources)
    DataContext.get_current().enable_progress_bars = False
    rows = [{"part": json.dumps(part)} for part in parts]
    dataset = cast(Untyped, ray.data).from_items(rows, override_num_blocks=len(rows))
    options = _options(min(workers, len(parts)), resources, (make_engine, decoding))
    completed = _mapped(dataset, PartWorker, batch_size=1, **options)
    try:
        for batch in completed.iter_batches(batch_size=1):
            yield int(batch["number"][0]), json.loads(batch["completed"][0])
    except RayError as error:
        reason = _reason(error).rstrip(".")
        raise ValueError(f"A worker failed: {reason}; correct the cause, and run the command again.") from error


def complete(
    dataset: Dataset,
    target: str | None = None,
    draft: Draft = None,
    *,
    index: str,
    seed: int = 0,
    max_new_tokens: int = 128,
    sampling: SamplingParams | None = None,
    stop: str | Sequence[str] = (),
    template: Mapping[str, object] | None = None,
    workers: int = 1,
    resources: Resources | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    **engine_options: Any,
) -> Dataset:
    """Return a Ray dataset with the rows of `dataset` and their completions.

    In float32, each completion equals that of `jspec.complete` with ``accept="coupled"``. Completions depend on the
    seed and on each row's index, but not on the number of workers, the order of the rows, or lost workers.

    Args:
        dataset: a Ray dataset with a column "prompt" (text) or "messages" (conversations).
        target, draft, dtype, quantize: as in `jspec.cluster.app`.
        index: the name of a column of distinct integers from 0 to 2**32 - 1. Duplicates are detected only within a
            batch of 256 rows.
        seed, max_new_tokens, sampling, stop, template: as in `jspec.complete`.
        workers: the number of processes. At least one CPU of the cluster must stay free to read the dataset.
        resources: as in `jspec.cluster.app`.
        engine_options: the options of each worker's `jspec.engine.Engine`.

    Returns:
        A lazy dataset with the additional columns "prompt_index", "generated_text", "generated_tokens" and
        "finish_reason".

    Raises:
        ModuleNotFoundError: Ray is not installed.
        TypeError: `target` is not a string, or `draft` is a model.
        ValueError: the dataset lacks the column `index` or a column of prompts, or already has a column that the output
            adds; another argument is invalid; or the connected cluster does not have the resources.
    """
    require_ray()
    columns = cast(Sequence[str], dataset.columns() or ())
    check_columns(columns, "dataset")
    if index not in columns:
        raise ValueError(
            f"index is {index!r}, but dataset has the columns {', '.join(columns)}; pass the name of one of these."
        )
    pair = ModelPair(target, draft, dtype, quantize)
    resources = resources or default_resources()
    check_resources(workers, resources, free_cpus=_CPUS_FOR_READING)
    make_engine = functools.partial(pair.engine, {"max_length": "auto", **engine_options})
    decoding = Decoding(max_new_tokens, seed, sampling, (stop,) if isinstance(stop, str) else tuple(stop), template)
    options = _options(workers, resources, (make_engine, decoding, index))
    return _mapped(dataset, RowWorker, batch_size=_ROWS, batch_format="pyarrow", **options)


def _options(workers: int, resources: Resources, arguments: tuple[object, ...]) -> dict[str, object]:
    """Return the options of `map_batches`."""
    from ray.data import ActorPoolStrategy

    compute = ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1)
    limits = {"max_restarts": _RESTARTS, "max_task_retries": _RETRIES}
    return {"compute": compute, "fn_constructor_args": arguments, **limits, **resources.actor_options()}


def _mapped(dataset: Dataset, worker: type, **options: object) -> Dataset:
    """Return ``dataset.map_batches(worker, **options)``."""
    with warnings.catch_warnings():
        # Ray 2.60 has no other options for the number of restarts, but warns that these will be removed.
        warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
        return dataset.map_batches(worker, **options)


def _reason(error: BaseException) -> str:
    """Return the message of an error as one line, without the worker's traceback."""
    lines = str(error).strip().splitlines()
    first = max((i for i, line in enumerate(lines) if _ERROR.match(line.strip())), default=len(lines) - 1)
    return _ERROR.sub("", " ".join(" ".join(lines[first:]).split()))
