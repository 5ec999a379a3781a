"""Tokens per second of Qwen2.5-Coder on coding questions, with drafters, llama.cpp and transformers in turns."""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import convert
import jspec
from bench import answers, chats, llamacpp, plots, rivals
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns, mean_ratio
from convert import hub_names
from jspec.drafters import frequent_tokens
from jspec.drafters.combine.fallback import with_lookup_first
from jspec.models.language_model import vocab_size_of
from pair.corpus import read_documents

NAMES = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
LLAMA_CPP, LLAMA_CPP_LOOKUP = "llama.cpp", "llama.cpp lookup"
LOOKUP = 2  # the number of draft tokens that llama-cpp-python recommends without a GPU
ASSISTED = 4  # the number of draft tokens of transformers' assistant
ALL = "all"
Group = tuple[tuple[str, ...], list[np.ndarray]]  # the questions of one batch: their kinds and their token ids
Calls = dict[str, Callable[[], Any]]
SmallDraft = tuple[str, jspec.Llama | jspec.ModelDrafter]  # its name and the draft
GroupTimes = tuple[dict[str, Any], dict[str, float]]  # a group's outputs and seconds, by program


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings of a run.

    Attributes:
        questions: the total number of questions.
        batches: the batch sizes, in questions.
        ks: the draft lengths of the draft model.
        with_transformers: whether to measure transformers, too, with the same weights in float32.
        tune: whether to add the draft length that `jspec.tune` chooses on the first batch of questions.
        activation_bits: the precision of jspec's activations.
    """

    questions: int
    batches: tuple[int, ...]
    ks: tuple[int, ...]
    new_tokens: int
    temperature: float
    with_transformers: bool
    tune: bool
    activation_bits: int = 24

    def __post_init__(self) -> None:
        if uneven := [batch for batch in self.batches if self.questions % batch]:
            raise ValueError(
                f"--questions {self.questions} is not a multiple of --batch {uneven[0]}; pass a multiple of "
                f"{uneven[0]}, or another --batch."
            )
        if self.with_transformers and self.temperature:
            raise ValueError(f"--transformers decodes only greedily; omit it or --temperature {self.temperature:g}.")
        if self.tune and self.new_tokens < 8:
            raise ValueError(f"--tune needs at least 8 new tokens; got --max-new-tokens {self.new_tokens}.")


def find(target: str | None = None, draft: str | None = None) -> tuple[str, str]:
    """Return the sources of the pair: `target` and `draft` if given, or else local files.

    Local files are looked up in the folder that JSPEC_MODELS names (by default ~/.cache/jspec-models), then in the
    Hugging Face cache.

    Raises:
        FileNotFoundError: a file is not on this machine.
    """
    return _find(NAMES[0]) if target is None else target, _find(NAMES[1]) if draft is None else draft


def _find(name: str) -> str:
    model = hub_names.MODELS[name]
    folder = Path(os.environ.get("JSPEC_MODELS") or Path.home() / ".cache" / "jspec-models")
    file = folder / str(model.file)
    local = file if file.is_file() else hub_names.find(name)
    if local is None:
        raise FileNotFoundError(
            f"{model.file} is neither in {folder} nor in the Hugging Face cache; get it with `{model.command}`, or set "
            "JSPEC_MODELS to its folder."
        )
    return str(local)


def coding_questions(tokenizer: Any, count: int) -> list[tuple[str, np.ndarray]]:
    """Return the kinds and token ids of `count` coding questions, which alternate between the four kinds."""
    each = -(-count // len(chats.CODE_KINDS))
    rows = [[(kind, row) for row in chats.rows(tokenizer, kind, each)] for kind in chats.CODE_KINDS]
    return [question for one_of_each in zip(*rows, strict=True) for question in one_of_each][:count]


def measure(subject: Subject, source: str, run: Run, small: SmallDraft | None = None) -> None:
    """Publish one row per batch size, kind of question and program.

    Args:
        source: the source of the target.
        small: a smaller variant of the draft model to measure as well, or None.
    """
    questions = coding_questions(subject.tokenizer, run.questions)
    longest = max(len(row) for _, row in questions)
    others, rows, notes = _others(subject, convert.resolve(source), longest, run), [], []
    for batch in run.batches:
        parts = [questions[i : i + batch] for i in range(0, len(questions), batch)]
        groups: list[Group] = [(tuple(kind for kind, _ in part), [row for _, row in part]) for part in parts]
        tuned = _tuned(subject, groups[0][1], run) if run.tune else None
        ways = drafters(subject, sorted({*run.ks, *([tuned] if tuned else [])}), small)
        readings = _readings(subject, others, groups, ways, run)
        kinds = (ALL, *dict.fromkeys(kind for kind, _ in questions)) if batch == 1 else (ALL,)
        rows += [row for kind in kinds for row in _rows(kind, batch, groups, readings)]
        if tuned is not None:
            notes.append(f"Batch {batch}: tune chose {f'K = {tuned}' if tuned else 'plain decoding'}.")
    _publish(subject, run, rows, notes, others)


def small_draft(subject: Subject, count: int | None, kind: str | None) -> SmallDraft | None:
    """Return a smaller variant of the draft model and its name.

    Quantise it if `kind` is given, and reduce its vocabulary if `count` is given. Return None if neither is given.

    Raises:
        TypeError: the draft is not a model.
        ValueError: `count` is out of range, or the draft model cannot be quantised.
    """
    name, draft = "draft model", subject.draft
    vocab_size_of("--draft", draft)
    if kind is not None:
        name, draft = f"{name}, {kind}", jspec.quantize(draft, kind)
    if count is not None:
        name, draft = f"{name}, {count} tokens", reduced(dataclasses.replace(subject, draft=draft), count)
    return None if draft is subject.draft else (name, draft)


def reduced(subject: Subject, count: int) -> jspec.ModelDrafter:
    """Return the draft model with a vocabulary of `count` tokens, which include the EOS ids.

    The other tokens are the most frequent ones in Python's standard library. If these are too few, tokens with low ids
    are added, because byte-pair encoding numbers frequent tokens first.

    Raises:
        TypeError: the draft is not a model.
        ValueError: `count` is smaller than the number of EOS ids, or larger than the vocabulary.
    """
    vocab_size = vocab_size_of("--draft", subject.draft)
    ends = chats.ends(subject)
    if not len(ends) <= count <= vocab_size:
        raise ValueError(f"--draft-vocabulary {count} is out of range; pass a number from {len(ends)} to {vocab_size}.")
    texts = [document.text for document in read_documents()]
    counted = np.concatenate([np.array(ids) for ids in subject.tokenizer(texts, verbose=False)["input_ids"]])
    tokens = frequent_tokens(counted, count, vocab_size, always=ends)
    return jspec.ModelDrafter.with_vocabulary(subject.draft, tokens)


def drafters(subject: Subject, ks: Sequence[int], small: SmallDraft | None = None) -> dict[str, tuple[Any, int | None]]:
    """Return the drafter and draft length for each name. A length of None means the default of `jspec.complete`."""
    found: dict[str, tuple[Any, int | None]] = {"plain": (None, None)}
    found |= {f"draft model, K = {k}": (subject.draft, k) for k in ks}
    if small is not None:
        found |= {f"{small[0]}, K = {k}": (small[1], k) for k in ks}
    return found | {
        "lookup": (jspec.NGramDrafter(), None),
        "lookup, else draft model": (with_lookup_first(subject.draft), None),
    }


def _others(subject: Subject, file: Path, longest: int, run: Run) -> dict[str, Any]:
    """Return models with the same weights by program. Omit programs that are not installed or cannot read them."""
    found: dict[str, Any] = {}
    if importlib.util.find_spec("llama_cpp") is not None and file.is_file():
        context = longest + run.new_tokens + LOOKUP + 1
        found[LLAMA_CPP] = llamacpp.load(file, logits_all=False, context=context)
        found[LLAMA_CPP_LOOKUP] = llamacpp.load(file, logits_all=True, context=context, lookup=LOOKUP)
    if run.with_transformers:
        found["transformers"] = rivals.twin(subject.target), rivals.twin(subject.draft)
    return found


def _tuned(subject: Subject, rows: list[np.ndarray], run: Run) -> int:
    """Return the draft length that `jspec.tune` chooses among chains; 0 for plain decoding."""
    (request,) = chats.requests(subject.tokenizer, rows, len(rows))
    options = {"max_draft_tokens": min(8, run.new_tokens // 4 - 1), "max_new_tokens": run.new_tokens, "max_nodes": 0}
    sampling = jspec.SamplingParams(temperature=run.temperature)
    return jspec.tune(subject.target, subject.draft, *request, sampling=sampling, **options).num_draft_tokens


def _readings(
    subject: Subject, others: dict[str, Any], groups: list[Group], ways: dict[str, tuple[Any, int | None]], run: Run
) -> list[GroupTimes]:
    """Return each group's outputs and seconds by program. All programs answer one group before the next begins."""
    readings: list[GroupTimes] = []
    warm: set[int] = set()
    for _, rows in groups:
        requests = chats.requests(subject.tokenizer, rows, len(rows))
        calls: Calls = {
            name: chats.decoder(subject, drafter, k, requests, run.new_tokens, run.temperature)
            for name, (drafter, k) in ways.items()
        }
        calls |= _other_calls(others, rows, run, chats.ends(subject))
        outs: dict[str, Any] = {}
        width = requests[0][0].shape[1]
        times = in_turns(answers.kept(calls, outs), repeats=1, warmup=int(width not in warm))
        warm.add(width)
        readings.append((outs, {name: float(seconds[0]) for name, seconds in times.items()}))
    return readings


def _other_calls(others: dict[str, Any], rows: list[np.ndarray], run: Run, ends: Sequence[int]) -> Calls:
    """Return the calls of other programs by name. llama.cpp and assisted generation support only one row."""
    calls: Calls = {}
    if "transformers" in others:
        target, assistant = others["transformers"]
        ways = {"transformers plain": {}}
        if len(rows) == 1:
            ways["transformers assisted"] = rivals.assisted(assistant, ASSISTED)
        for name, options in ways.items():
            calls[name] = lambda options=options: rivals.greedy(target, rows, run.new_tokens, ends, **options)[0]
    for name in (LLAMA_CPP, LLAMA_CPP_LOOKUP) if len(rows) == 1 else ():
        if name in others:
            answer = functools.partial(llamacpp.answer, others[name], rows[0], run.new_tokens, ends, run.temperature)
            calls[name] = lambda answer=answer: [answer()]
    return calls


def _rows(kind: str, batch: int, groups: list[Group], readings: list[GroupTimes]) -> list[dict[str, Any]]:
    """Return one table row per program, from the groups of one kind or of all kinds."""
    chosen = [reading for (kinds, _), reading in zip(groups, readings, strict=True) if kind in (ALL, *kinds)]
    texts = {name: [answers.texts(outs[name]) for outs, _ in chosen] for name in chosen[0][0]}
    tokens = {name: np.array([sum(map(len, rows)) for rows in texts[name]]) for name in texts}
    seconds = {name: np.array([times[name] for _, times in chosen]) for name in texts}
    rows = []
    for name in texts:
        outs = [out for results, _ in chosen for out in results[name]]
        row = {"question": kind, "batch": batch, "program": name}
        row["tokens/s"] = float(tokens[name].sum() / seconds[name].sum())
        row |= dict(zip(answers.DRAFTING, answers.drafting(outs), strict=True))
        for other in ("plain", LLAMA_CPP):
            row |= dict.fromkeys((f"x {other}", f"{other}: from", f"{other}: to"), "")
            if other in texts:
                gain = mean_ratio(seconds[other] / tokens[other], seconds[name] / tokens[name])
                row |= {f"x {other}": gain.median, f"{other}: from": gain.low, f"{other}: to": gain.high}
        pairs = zip(texts[name], texts["plain"], strict=True)
        same = sum(one == two for ours, plain in pairs for one, two in zip(ours, plain, strict=True))
        rows.append(row | {"same texts": f"{same} of {batch * len(chosen)}"})
    return rows


def _publish(subject: Subject, run: Run, rows: list[dict[str, Any]], tuned: list[str], others: dict[str, Any]) -> None:
    bits, rounding = "", "jspec does not round activations."
    if run.activation_bits < 24:
        bits = f"-{run.activation_bits}-bit-activations"
        rounding = f"jspec rounds activations that multiply quantised weights to {run.activation_bits} bits."
    rival = "-transformers" if run.with_transformers else ""
    missing = "" if LLAMA_CPP in others else " llama.cpp is not measured: it needs llama-cpp-python and a GGUF file."
    publish(
        f"answers-{subject.name}{bits}{rival}-t{run.temperature:g}-{jax.default_backend()}",
        f"{subject.name}, temperature {run.temperature:g}: answers to {run.questions} coding questions,"
        f" at most {run.new_tokens} new tokens, {subject.target.dtype}",
        rows,
        plots.answers,
        notes=[
            "All programs answer one question before the next. Times include the prompt, and answers end at EOS. x: the"
            " speed per token relative to another program, a geometric mean over questions (or batches of questions)."
            " from and to: the 95 % bootstrap interval of x. same texts: the number of texts that equal those of"
            " jspec's plain decoding; sampled texts may differ.",
            f"llama.cpp's prompt lookup drafts {LOOKUP} tokens, and transformers' assistant drafts {ASSISTED}; both"
            f" support only one row.{missing} llama.cpp rounds activations to 8 bits and samples without a seed. Its"
            f" cache is float32, without flash attention. {rounding}",
            *tuned,
        ],
        folder=subject.folder,
    )
