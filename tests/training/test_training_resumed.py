"""A stopped training run continues: its checkpoints, the target's stored states, and full disks."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from convert import CheckpointError
from jspec.training import batches, fit, kinds, target_states
from support.trainings import TARGET, some_rows

pytestmark = pytest.mark.usefixtures("quick_compile")


def run(folder, steps, stop_at=None, stored=False):
    """Run a short training, optionally stopped at a step."""
    trainee = kinds.trainee_of(kinds.of_eagle(TARGET, None, 2, 0))
    train, held = batches.Plan(some_rows(24), 64, 0), batches.Plan(some_rows(6, seed=1), 64, 0)
    source = fit.Source(train)
    if stored:
        store = target_states.StoredStates(folder / "states", train, trainee.features, "toy")
        store.write(TARGET, lambda *_: None)
        source = fit.Source(train, store)

    def say(progress):
        if progress == stop_at:
            raise KeyboardInterrupt

    return fit.fit(
        trainee, TARGET, source, fit.Source(held), fit.Schedule(steps, 2, rate=0.02, save_every=3), folder, say
    )


def test_resumed_run_makes_same_steps(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run(whole, 9)
    for stop in (2, 8):  # before the first checkpoint, and after one
        with pytest.raises(KeyboardInterrupt):
            run(parts, 9, stop)
    with (parts / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "loss"')  # a partly written line
    found = run(parts, 9)
    assert (parts / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()
    assert [one.step for one in fit.read_log(parts)] == [3, 6, 9]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_full_disk_keeps_previous_checkpoint(tmp_path, monkeypatch, caplog):
    """Orbax fails on a full disk like this: half a checkpoint remains, and it logs the error that it raises."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run(whole, 9)
    with pytest.raises(KeyboardInterrupt):
        run(parts, 9, 4)

    def full(_, step, *__, **___):
        (parts / "state" / f"{step}.orbax-checkpoint-tmp" / "d").mkdir(parents=True)
        logging.getLogger("absl").error("No space left on device, with a trace")
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nand more")

    told = r"after step 6 could not .* MB are free \(.* left on device\); check"
    with monkeypatch.context() as broken, pytest.raises(CheckpointError, match=told):
        broken.setattr(ocp.training.Checkpointer, "save", full)
        run(parts, 9)
    assert [state.name for state in (parts / "state").iterdir()] == ["3"] and not caplog.records
    jax.tree.map(np.testing.assert_array_equal, run(parts, 9), expected)
    assert (parts / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()


@pytest.mark.parametrize("few", [False, True])
def test_stored_states_equal_computed_states(tmp_path, few):
    """Stored states equal computed ones up to bfloat16 rounding, and they are not computed twice."""
    train = batches.Plan(some_rows(10), 64, 0)
    store = target_states.StoredStates(tmp_path, train, (0, 2), "toy", few)
    store.write(TARGET, lambda *_: None)
    again = target_states.StoredStates(tmp_path, train, (0, 2), "toy", few)
    again.write(None, lambda *_: None)
    for batch in train.in_order():
        found, expected = again.read(batch), target_states.run_target(TARGET, batch.tokens, (0, 2))
        stats = target_states.distribution_stats(TARGET, found.hidden.astype(jnp.float32))
        for number, row in enumerate(batch.numbers):
            size = len(train.rows[row].tokens) if row >= 0 else 0
            for ours, theirs in zip(found[:2], expected[:2], strict=True):
                np.testing.assert_allclose(ours[number, :size], theirs[number, :size], rtol=0.01)
            for ours, theirs in zip(found.stats or (), stats, strict=False):
                np.testing.assert_allclose(ours[number, :size], theirs[number, :size], rtol=1e-6)
    assert (found.stats is not None) == few
    run(tmp_path / "run", 3, stored=True)
    with pytest.raises(
        ValueError, match="holds the hidden states of other text or of another target; choose another folder"
    ):
        target_states.StoredStates(tmp_path, train, (0, 1), "toy", few)
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"is damaged .*; delete this file, and it will be written again"):
        target_states.StoredStates(tmp_path, train, (0, 2), "toy", few)


def test_deleted_shard_is_rewritten(tmp_path, monkeypatch):
    """Only the deleted shard is written again."""
    monkeypatch.setattr(target_states, "_SHARD_BYTES", 0)
    train = batches.Plan(some_rows(4), 64, 0)
    target_states.StoredStates(tmp_path, train, (0,), "toy").write(TARGET, lambda *_: None)
    shards = {file: file.read_bytes() for file in tmp_path.glob("*.safetensors")}
    assert len(shards) == 4
    min(shards).unlink()
    store = target_states.StoredStates(tmp_path, train, (0,), "toy")
    store.write(TARGET, lambda *_: None)
    assert {file: file.read_bytes() for file in tmp_path.glob("*.safetensors")} == shards
    for batch in train.in_order():
        store.read(batch)
