"""The public programs, lowered for GPUs and TPUs that are not here: nothing in them is for one platform alone."""

import re

import pytest

from bench import abstract
from support import cover, drafters, lowering
from support.few import by_default

# Every drafter but trained heads, with rules, lengths and the rest in turn.
FEW = [
    (name, cover.RULE_OBJECTS[i % 5], cover.LENGTHS[i // 2 % len(cover.LENGTHS)], i % 3 == 0, (1, 8)[i % 2])
    for i, name in enumerate(cover.CHOICES[0])
    if name not in drafters.HEADS
]

ALL = FEW + cover.TREES


def check(one):
    traced = abstract.trace(*cover.program(one))
    texts = {platform: lowering.lowered(traced, platform) for platform in ("cpu", "tpu")}
    over_rows = {
        platform: len(re.findall(r"#stablehlo\.scatter<[^>]*input_batching_dims", text))
        for platform, text in texts.items()
    }
    assert not any("callback" in text for text in texts.values())
    # On TPUs that is a loop. One is left, of the tokens in the prompt, before all rounds.
    assert over_rows["tpu"] <= 1 < over_rows["cpu"], over_rows
    assert "callback" not in lowering.lowered(traced, "cuda")  # last, for jax cannot always


@pytest.mark.parametrize("one", by_default([(one,) for one in ALL], [(one,) for one in ALL[::4]]), ids=cover.name)
def test_every_drafter_is_lowered(one):
    check(one)


@pytest.mark.slow
@pytest.mark.parametrize("one", cover.every(), ids=cover.name)
def test_every_program_is_lowered(one):
    check(one)
