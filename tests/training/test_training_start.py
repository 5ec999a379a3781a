"""Training that continues from a drafter, and drafters that it cannot continue from."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.drafters import EagleDrafter
from jspec.training.target_states import fingerprint
from support import eagle_heads, toys
from support.trainings import LONG, TARGET, chats, chatty

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("kind", ["eagle", "hydra", "model"])
def test_training_continues_from_drafter(tmp_path, kind):
    data, options = chats(tmp_path / "chats.jsonl"), {"steps": 1, "depth": 2, "step_tokens": 512, "draft_vocab": 100}
    first = jspec.train_drafter(LONG, chatty(), kind, data, folder=tmp_path / "first", **options)
    options |= {"rate": 1e-9, "draft_vocab": 50, "folder": tmp_path / "next"}
    again = jspec.train_drafter(LONG, chatty(), kind, data, start=first, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, first)  # including what it may draft
    with pytest.raises(ValueError, match="next was started with another start"):
        jspec.train_drafter(LONG, chatty(), kind, data, **options)


@pytest.mark.parametrize(
    ("start", "options", "message"),
    [
        (lambda: LONG, {}, "start is of type ModelDrafter, but kind is 'eagle'; use kind='model'"),
        (lambda: jspec.NGramDrafter(), {}, "NGramDrafter, but kind is 'eagle'; use one of type EagleDrafter"),
        (lambda: LONG, {"kind": "model", "boost": 2}, "boost is 2, but only one drafter can be trained from start"),
        (
            lambda: jspec.HydraDrafter.untrained(LONG, 2, rngs=nnx.Rngs(0)),
            {"kind": "hydra"},
            "HydraDrafter has 2 heads, but a draft of 4 consecutive tokens needs one head per token",
        ),
        (
            lambda: jspec.PassDrafter.untrained(LONG, 2, rngs=nnx.Rngs(0)),
            {"kind": "pass"},
            "PassDrafter has 2 vectors, but depth is 4",
        ),
        (lambda: jspec.quantize(LONG), {"kind": "model"}, "The drafter is int8 and cannot be trained"),
        (
            lambda: toys.tiny_llama(0, 1, vocab_size=261, max_position_embeddings=256),
            {"kind": "model"},
            "start has 256 positions, but length is 512; reduce length",
        ),
        (
            lambda: EagleDrafter(eagle_heads.eagle(toys.tiny_llama(0, 3, vocab_size=261, hidden_size=32))),
            {},
            "was made for a target whose hidden size is 32",
        ),
        (lambda: TARGET, {"kind": "model"}, "The draft's vocabulary has 8 tokens and the target's 261"),
    ],
)
def test_incompatible_start_is_rejected(tmp_path, start, options, message):
    with pytest.raises(ValueError, match=message):
        jspec.train_drafter(LONG, chatty(), data="none.txt", folder=tmp_path / "run", start=start(), **options)
    assert not (tmp_path / "run").exists()


def test_new_config_field_changes_no_fingerprint(monkeypatch):
    """A run that was started before a field existed can be continued."""
    before, config = fingerprint(TARGET), TARGET.config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    more = dataclasses.make_dataclass("Config", [("window", int, 0)], bases=(type(config),), frozen=True)
    for window, is_same in ((0, True), (5, False)):
        monkeypatch.setattr(TARGET, "config", more(**fields, window=window))
        assert (fingerprint(TARGET) == before) is is_same


def test_fingerprint_includes_fixed_settings():
    """Drafters with the same weights but other fixed settings have different fingerprints."""
    head, target = eagle_heads.eagle(TARGET, 3, features=(1,)), fingerprint(TARGET)
    other = eagle_heads.eagle(TARGET, 3, features=(2,))
    assert len({fingerprint(EagleDrafter(one)) for one in (head, head, other)}) == 2
    exits = [jspec.KangarooDrafter.untrained(TARGET, layers, rngs=nnx.Rngs(0)) for layers in (1, 2)]
    assert len({*map(fingerprint, exits), target}) == 3
