"""Scores of five small tasks in lm-eval: the model class that runs jspec in process, and lm-eval's own `hf` class."""

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import jspec
from bench import plots
from bench.chats import FOLDER as PROMPTS
from bench.report import RESULTS, publish

FOLDER = Path(__file__).parent / "lm_eval_tasks"
BATCH = 8
FEW = 3  # rows at the start of a file that serve as examples
LETTERS = "ABCD"
ANSWER, FIRST = r"is (\d+)", {"function": "take_first"}


@dataclasses.dataclass(frozen=True)
class Found:
    """The results of one model on one task.

    Attributes:
        score: the value of the task's metric.
        log_likelihoods: all log-likelihoods, in order.
        answers: everything that must be equal: generated texts, and whether greedy decoding gives a continuation.
    """

    score: float
    log_likelihoods: np.ndarray
    answers: list[object]


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with one JSON object per line."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def sums() -> list[dict[str, Any]]:
    """Return sums of small numbers."""
    rng = np.random.default_rng(0)
    return [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in rng.integers(1, 30, (FEW + 16, 2))]


def texts() -> list[dict[str, Any]]:
    """Return chat prompts as texts, and all of them as one text that is longer than the models' window."""
    prompts = [row["prompt"] for kind in ("summary", "rewriting", "chat") for row in lines(PROMPTS / f"{kind}.jsonl")]
    return [{"text": text} for text in [*prompts[:15], "\n\n".join(prompts)]]


def tasks() -> list[dict[str, Any]]:
    """Return the tasks in lm-eval's format: two multiple-choice tasks, last words, whole texts, and generation."""
    return [
        task(
            "letters",
            lines(FOLDER / "questions.jsonl"),
            output_type="multiple_choice",
            doc_to_text="Question: {{question}}\n{% for choice in choices %}{{'ABCD'[loop.index0]}}. {{choice}}\n"
            "{% endfor %}Answer:",
            doc_to_choice=list(LETTERS),
            doc_to_target="{{answer}}",
            metric_list=[{"metric": "acc"}],
            **examples("{{'ABCD'[answer]}}"),
        ),
        task(
            "endings",
            lines(FOLDER / "endings.jsonl"),
            output_type="multiple_choice",
            doc_to_text="{{context}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{answer}}",
            metric_list=[{"metric": "acc_norm"}],
        ),
        task(
            "last words",
            lines(FOLDER / "passages.jsonl"),
            output_type="loglikelihood",
            doc_to_text="{{passage.split(' ')[:-1]|join(' ')}}",
            doc_to_target="{{' '+passage.split(' ')[-1]}}",
            metric_list=[{"metric": "perplexity"}],
        ),
        task(
            "whole texts",
            texts(),
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "word_perplexity"}],
        ),
        task(
            "sums",
            sums(),
            output_type="generate_until",
            doc_to_text="Question: {{question}}\nAnswer:",
            doc_to_target="{{answer}}",
            generation_kwargs={"until": ["\n\n", "Question:"], "max_gen_toks": 32},
            filter_list=[{"name": "number", "filter": [{"function": "regex", "regex_pattern": ANSWER}, FIRST]}],
            metric_list=[{"metric": "exact_match"}],
            **examples("{{question[8:-1]}} is {{answer}}."),
        ),
    ]


def examples(target: str) -> dict[str, Any]:
    """Return the fields of a task that puts `FEW` solved examples before each question."""
    return {
        "num_fewshot": FEW,
        "fewshot_split": "examples",
        "fewshot_config": {"sampler": "first_n", "doc_to_target": target},
    }


def task(name: str, rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return a task over `rows`. lm-eval reads no file for it."""
    import datasets

    splits = {"examples": rows[:FEW], "test": rows[FEW:]} if "num_fewshot" in fields else {"test": rows}
    held = {split: datasets.Dataset.from_list(part) for split, part in splits.items()}
    return {"task": name, "custom_dataset": lambda **_: held, "test_split": "test", "num_fewshot": 0, **fields}


def evaluate(model: Any, arguments: dict[str, Any] | None = None) -> dict[str, Found]:
    """Return lm-eval's results of a model, or of the model with that name and these arguments, by task."""
    import lm_eval

    own = tasks()
    out = lm_eval.simple_evaluate(model, arguments, own, batch_size=BATCH, bootstrap_iters=0)
    assert out is not None
    found = {}
    for name in (fields["task"] for fields in own):
        score = next(value for key, value in out["results"][name].items() if is_score(key, value))
        samples = sorted(out["samples"][name], key=lambda sample: sample["doc_id"])
        responses = [value for sample in samples for value in flat(sample["resps"])]
        numbers = [value for value in responses if isinstance(value, float)]
        found[name] = Found(score, np.array(numbers), [value for value in responses if not isinstance(value, float)])
    return found


def is_score(key: str, value: object) -> bool:
    """Return whether an entry of lm-eval's results is the value of a metric."""
    return "," in key and "_stderr" not in key and isinstance(value, float)


def flat(value: object) -> list[object]:
    """Return the values in nested lists and tuples, in order."""
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list | tuple) else [value]


def run(target: str, draft: str | None, max_length: int, output: Path | None) -> None:
    """Publish both models' scores and the largest difference of their log-likelihoods."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from jspec.evaluation.lm_eval import JSpecLM

    with tempfile.TemporaryDirectory() as name:
        folder = str(Path(name) / "model")
        jspec.ModelDrafter(jspec.load(target, "float32", packed=False)).save(folder, target)
        model = JSpecLM(folder, draft=draft, batch_size=BATCH, max_length=max_length, dtype="float32", packed=False)
        ours = evaluate(model)
        # torch's float32 log-softmax is off by 1e-5 per token, always in the same direction.
        dtypes = {"dtype": "float32", "softmax_dtype": "float64"}
        theirs = evaluate("hf", {"pretrained": folder, "max_length": max_length, "device": "cpu", **dtypes})
    rows = [row(name, theirs[name], ours[name]) for name in theirs]
    publish(
        f"lm-eval-{Path(target).stem}-cpu",
        f"{target}: scores of jspec and of lm-eval's hf class, float32, windows of {max_length} tokens",
        rows,
        plots.bars("task", "jspec"),
        notes=[
            "largest difference: between the two log-likelihoods of a continuation or text, and relative to its value.",
            "same answers: whether all generated texts and all greedy flags are equal.",
            f"hf computes its log-softmax in float64. jspec generates with the draft {draft}.",
        ],
        folder=output or RESULTS,
    )


def row(name: str, theirs: Found, ours: Found) -> dict[str, Any]:
    """Return a line of the table."""
    gaps = np.abs(theirs.log_likelihoods - ours.log_likelihoods)
    sizes = np.abs(theirs.log_likelihoods)
    return {
        "task": name,
        "log-likelihoods": len(gaps),
        "hf": theirs.score,
        "jspec": ours.score,
        "largest difference": float(gaps.max(initial=0)),
        "relative": float((gaps / sizes).max(initial=0)),
        "same answers": theirs.answers == ours.answers,
    }
