"""The output of every drafter under every rule equals the record, so that no change alters it by accident.

A change that is meant to alter the output of old seeds must record it anew and say so in the CHANGELOG:
``PYTHONPATH=tests python tests/exactness/test_recorded.py --record``. ``--record NAME`` adds a new drafter's output.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jspec
from support import drafters, toys

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

FILE = Path(__file__).with_name("recorded.json")
LOSSY = jspec.Lenient(0.5), jspec.Typical(0.09, 0.3), jspec.TopK(2), jspec.Threshold(0.2)
RULES = {
    rule if isinstance(rule, str) else type(rule).__name__: rule for rule in ("rejection", "block", "coupled", *LOSSY)
}
PROMPTS = ((6, 1, 6, 1, 6), (2, 7), (4, 4, 0, 4))
NEW, K = 12, 3
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
LENGTHS = {
    "UpTo": jspec.UpTo(K),
    "WhileConfident": jspec.WhileConfident(K),
    "Heuristic": jspec.Heuristic(K),
    "ByAcceptance": jspec.ByAcceptance(K),
    "ByConfidence": jspec.ByConfidence(K),
    "ByEstimatedAcceptance": jspec.ByEstimatedAcceptance(K, 0.4),
}
# Name -> drafter, rule, draft length, penalties. None as the drafter stands for plain decoding.
MATRIX = {f"{name}, {rule}": (name, rule, K, {}) for name in drafters.NAMES for rule in RULES}
OTHERS = {
    f"{name}, {rule}, {length}{', penalties' if penalties else ''}": (name, rule, LENGTHS.get(length, K), penalties)
    for name, rule, length, penalties in (
        ("ngram", "rejection", "UpTo", {}),
        ("fallback", "block", "UpTo", {}),
        ("cascade", "coupled", "UpTo", PENALTIES),
        ("model", "rejection", "WhileConfident", {}),
        ("early exit", "Lenient", "WhileConfident", {}),
        ("mixture", "block", "WhileConfident", PENALTIES),
        ("early exit", "rejection", "Heuristic", {}),
        ("model", "block", "ByConfidence", {}),
        ("retrieval", "coupled", "ByAcceptance", {}),
        ("block with corrections", "block", "ByEstimatedAcceptance", {}),
        ("model", "coupled", "ByEstimatedAcceptance", PENALTIES),
        ("model", "rejection", "3", PENALTIES),
        ("cascade", "TopK", "3", PENALTIES),
    )
} | {"plain": (None, "rejection", 0, {}), "plain, penalties": (None, "rejection", 0, PENALTIES)}
PROGRAMS = MATRIX | OTHERS
# Every drafter except trained heads, every rule, and each length.
FEW = {
    f"{name}, {list(RULES)[i % len(RULES)]}" for i, name in enumerate(drafters.NAMES) if name not in drafters.HEADS
} | {
    "ngram, rejection, UpTo",
    "cascade, coupled, UpTo, penalties",
    "model, rejection, WhileConfident",
    "mixture, block, WhileConfident, penalties",
    "early exit, rejection, Heuristic",
    "model, rejection, 3, penalties",
    "plain",
    "plain, penalties",
}


@functools.cache
def pair():
    target = toys.tiny_llama(10)
    return target, toys.tiny_llama(11, 1, related_to=target)


def text(drafter, rule, draft_length, penalties):
    """Return a program's record in JSON form: a row's tokens and origins as digits, numbers to 3 decimals."""
    target, draft = pair()
    tokens = np.zeros((len(PROMPTS), max(map(len, PROMPTS))), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    batch = tokens, np.array([len(prompt) for prompt in PROMPTS]), jax.random.split(jax.random.key(5), len(PROMPTS))
    sampling = jspec.SamplingParams(
        temperature=[1.0, 0.7, 0.0], top_p=[1.0, 0.8, 1.0], max_tokens=[0, 11, 0], **penalties
    )
    options = {"max_new_tokens": NEW, "sampling": sampling, "eos_ids": np.array([[5], [-1], [-1]])}
    if drafter is None:
        out = jspec.generate(target, *batch, **options)
    else:
        out = jspec.speculative_generate(
            target,
            drafters.make(drafter, target, draft),
            *batch,
            num_draft_tokens=draft_length,
            accept=RULES[rule],
            **options,
        )
    out = jax.device_get(out)
    stats = {name: value.tolist() for name, value in vars(out.stats).items()}
    return {
        "tokens": ["".join(map(str, row)) for row in out.tokens],
        "lengths": out.lengths.tolist(),
        "origins": ["".join(map(str, row)) for row in out.origins],
        "logprobs": np.round(out.logprobs.astype(float), 3).tolist(),
        "stats": stats | {"distortion": np.round(out.stats.distortion.astype(float), 3).tolist()},
    }


def _apart(found):
    """Return what must be equal, and what may differ by rounding."""
    stats = dict(found["stats"])
    rounded = [*found["logprobs"], stats.pop("distortion")]
    return {name: found[name] for name in ("tokens", "lengths", "origins")} | stats, np.concatenate(rounded)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_output_equals_record(name):
    found, numbers = _apart(text(*PROGRAMS[name]))
    expected, numbers_expected = _apart(json.loads(FILE.read_text(encoding="utf-8"))[name])
    assert found == expected
    np.testing.assert_allclose(numbers, numbers_expected, atol=2e-3)


def test_record_covers_programs_rules_and_origins():
    record = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(record) == set(PROGRAMS) > FEW
    assert {rule for _, rule, *_ in (PROGRAMS[name] for name in FEW)} == set(RULES)
    assert set("".join("".join(one["origins"]) for one in record.values())) == set("01234")
    assert {one["lengths"][0] for one in record.values()} - {NEW}  # some rows reach their EOS token


def record(part):
    """Rewrite the file: record programs whose names contain `part` anew, and keep the others as they were."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    lines = []
    for name in PROGRAMS:
        known[name] = text(*PROGRAMS[name]) if part in name or name not in known else known[name]
        lines.append(f"{json.dumps(name)}: {json.dumps(known[name])}")
        jax.clear_caches()  # otherwise, it crashes some hundred programs later
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--record"] or len(sys.argv) > 3:
        sys.exit(
            "To record texts anew, all or those of which the name has PART: "
            "PYTHONPATH=tests python tests/exactness/test_recorded.py --record [PART]"
        )
    jax.config.update("jax_disable_most_optimizations", True)  # like `quick_compile`
    record("".join(sys.argv[2:]))
