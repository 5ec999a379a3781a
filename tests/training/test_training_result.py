"""The results of a trained drafter: measurements during which nothing is compiled."""

import pytest

from jspec.drafters import EagleDrafter
from jspec.generation.generate import generate, speculative_generate
from jspec.training import evaluate as result
from jspec.training import fit
from support import eagle_heads, toys

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_prompts_of_all_lengths_share_one_program(monkeypatch):
    """Prompts of all lengths share one program.

    Each has another width if it is encoded alone, and compiling takes longer than the whole measurement.
    """
    target = toys.tiny_llama(0, 1)
    shapes = []

    def noted(decode):
        return lambda target, *request, **options: (
            shapes.append((decode.__name__, request[-3].shape, options["max_new_tokens"]))
            or decode(target, *request, **options)
        )

    monkeypatch.setattr(result, "_NEW_TOKENS", 6)
    for decode in (generate, speculative_generate):
        monkeypatch.setattr(result, decode.__name__, noted(decode))
    evaluation = fit.Progress(1, 0.0, [0.5, 0.25], [1.0, 1.0])
    drafter = EagleDrafter(eagle_heads.eagle(target, 3, features=(0, 1)))
    found = result.measure(target, drafter, [[1] * 10, [2] * 40, [3] * 100], evaluation, 2, 1.0)
    assert len(shapes) == 8 and len(set(shapes)) == 2
    assert found.foreseen == 1.625 and 1 <= found.tokens_per_round <= 3 and found.speedup > 0
