"""Slots that do not fit into memory are refused before they are made, with what would fit."""

import re

import jax
import pytest
import toys

from jspec.acceptance import RULES
from jspec.engine import Engine
from jspec.engine import room as rooms
from jspec.engine.device import Device
from jspec.engine.room import free_bytes, slots_bytes
from jspec.engine.slots import Sizes
from jspec.footprint import LAWS

OPTIONS = {"slots": 8, "max_length": 2048, "num_draft_tokens": 4, "chunks": (16, 64)}


@pytest.fixture(scope="module")
def models():
    target = toys.tiny_llama(0, 3)
    return target, toys.tiny_llama(1, 1, related_to=target)


def told(models, monkeypatch, free, **changes):
    monkeypatch.setattr(rooms, "free_bytes", lambda: free)
    with pytest.raises(ValueError, match="would fit") as refused:
        Engine(*models, **(OPTIONS | changes))
    return str(refused.value)


def test_bytes_are_those_of_the_slots(models):
    sizes = Sizes(3, 40, 2, (4, 16), (0, 4), 2)
    device = Device(models[0], None, RULES["rejection"], sizes)
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(device._slots))
    assert slots_bytes(models[0], None, sizes) == own + LAWS * 4 * 3 * 6 * models[0].config.vocab_size


def test_what_would_fit_does_and_more_does_not(models, monkeypatch):
    free = 3_000_000
    text = told(models, monkeypatch, free)
    slots, length = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) slots or a max_length of ([\d,]+)", text)[0]
    )
    assert 0 < slots < 8 and 64 < length < 2048
    Engine(*models, **(OPTIONS | {"slots": slots}))
    Engine(*models, **(OPTIONS | {"max_length": length}))
    told(models, monkeypatch, free, slots=slots + 1)
    told(models, monkeypatch, free, max_length=length + 32)


def test_where_nothing_fits_that_is_said(models, monkeypatch):
    assert told(models, monkeypatch, 1000).endswith("; a smaller model would fit.")


def test_where_nobody_tells_it_is_tried(models, monkeypatch, tmp_path):
    monkeypatch.setattr(rooms, "_MEMORY", tmp_path / "none")
    assert jax.default_backend() != "cpu" or free_bytes() is None
    Engine(*models, **OPTIONS)


def test_the_machine_tells():
    assert free_bytes() > 10_000_000
