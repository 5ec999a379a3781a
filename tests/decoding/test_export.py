"""The public programs can be lowered for absent GPUs and TPUs, so nothing in them is platform-specific."""

import re

import pytest

from bench import abstract
from support import cover, drafters, lowering
from support.few import by_default

# Every drafter except trained heads, cycling through rules, lengths and the other options.
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
    # On TPUs, such a scatter is a loop. The only one left is over the prompt's tokens, before the first round.
    assert over_rows["tpu"] <= 1 < over_rows["cpu"], over_rows
    assert "callback" not in lowering.lowered(traced, "cuda")  # last, because jax cannot always lower for CUDA


@pytest.mark.parametrize("one", by_default([(one,) for one in ALL], [(one,) for one in ALL[::4]]), ids=cover.name)
def test_every_drafter_can_be_lowered(one):
    check(one)


@pytest.mark.slow
@pytest.mark.parametrize("one", cover.every(), ids=cover.name)
def test_every_program_can_be_lowered(one):
    check(one)
