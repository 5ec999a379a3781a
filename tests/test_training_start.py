"""A training that goes on with a drafter, and with which it cannot."""

import jax
import numpy as np
import pytest
from flax import nnx
from test_training import LONG, TARGET, chats, chatty

import jspec

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("kind", ["eagle", "hydra", "model"])
def test_a_training_goes_on_with_a_drafter(tmp_path, kind):
    data, options = chats(tmp_path / "chats.jsonl"), {"steps": 1, "depth": 2, "step_tokens": 512, "draft_vocab": 100}
    first = jspec.train_drafter(LONG, chatty(), kind, data, folder=tmp_path / "first", **options)
    options |= {"rate": 1e-9, "draft_vocab": 50, "folder": tmp_path / "next"}
    again = jspec.train_drafter(LONG, chatty(), kind, data, start=first, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, first)  # whatever it may guess, too
    with pytest.raises(ValueError, match="next was begun with another start"):
        jspec.train_drafter(LONG, chatty(), kind, data, **options)


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [(lambda: LONG, {}, "start is of type ModelDrafter, and kind is 'eagle'; use kind='model'"),
     (lambda: jspec.NGramDrafter(), {}, "NGramDrafter, and kind is 'eagle'; use one of type EagleDrafter"),
     (lambda: LONG, {"kind": "model", "boost": 2}, "boost is 2, and with start a training is of that drafter"),
     (lambda: jspec.HydraDrafter.untrained(LONG, 2, rngs=nnx.Rngs(0)), {"kind": "hydra"},
      "HydraDrafter drafts at most 2 tokens in a row, and depth is 4; use depth=2"),
     (lambda: TARGET, {"kind": "model"}, "The draft's vocabulary has 8 tokens and the target's 261")],
)  # fmt: skip
def test_what_a_training_cannot_go_on_with(tmp_path, start, options, message):
    with pytest.raises(ValueError, match=message):
        jspec.train_drafter(LONG, chatty(), data="none.txt", folder=tmp_path / "run", start=start(), **options)
    assert not (tmp_path / "run").exists()
