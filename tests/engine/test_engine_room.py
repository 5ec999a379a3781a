"""Slots that do not fit into memory are rejected before allocation, with the sizes that would fit."""

import dataclasses
import re
import types

import jax
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.engine import Engine
from jspec.engine import memory_budget as rooms
from jspec.engine.memory_budget import fit_length, free_bytes, slots_bytes
from jspec.engine.runner import Runner
from jspec.engine.slots import Sizes
from jspec.planning.memory import PROB_ARRAYS
from support import toys

CPU = jax.devices("cpu")[0]
OPTIONS = {"slots": 8, "max_length": 2048, "num_draft_tokens": 4, "chunks": (16, 64)}


@pytest.fixture(scope="module")
def models():
    target = toys.tiny_llama(0, 3)
    return target, toys.tiny_llama(1, 1, related_to=target)


def told(models, monkeypatch, free, **changes):
    monkeypatch.setattr(rooms, "free_bytes", lambda _: free)
    with pytest.raises(ValueError, match="would fit") as refused:
        Engine(*models, **(OPTIONS | changes))
    return str(refused.value)


def test_slots_bytes_match_allocation(models):
    sizes = Sizes(3, 40, 2, (4, 16), (0, 4), 2)
    tree = jspec.TreeDrafter(jspec.ModelDrafter(models[1]), jspec.Tree.branching((3, 2)))
    for drafter, laws in ((None, 2), (jspec.ModelDrafter(models[1]), 4 + 2), (tree, 3 + 6 + 2)):
        runner = Runner(models[0], drafter, RULES["rejection"], sizes)
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(runner._slots))
        assert slots_bytes(models[0], drafter, sizes) == own + PROB_ARRAYS * 4 * 3 * laws * models[0].config.vocab_size


def test_suggested_sizes_fit_and_larger_ones_do_not(models, monkeypatch):
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


def test_error_suggests_smaller_model_if_nothing_fits(models, monkeypatch):
    assert told(models, monkeypatch, 1000).endswith("; a smaller model would fit.")


def test_unknown_free_memory_is_not_checked(models, monkeypatch, tmp_path):
    monkeypatch.setattr(rooms, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(rooms, "_GROUP", tmp_path)
    assert free_bytes(CPU) is None
    Engine(*models, **OPTIONS)


@pytest.mark.parametrize("limit, free", [("max", 2048_000), ("1500000", 500_000), ("9000000", 2048_000)])
def test_free_memory_respects_machine_and_container_limits(monkeypatch, tmp_path, limit, free):
    monkeypatch.setattr(rooms, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(rooms, "_GROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    2000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert free_bytes(CPU) == free


def test_cached_file_pages_of_container_count_as_free(monkeypatch, tmp_path):
    """Cached file pages, such as a checkpoint's, count as free because the kernel reclaims them when needed."""
    monkeypatch.setattr(rooms, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(rooms, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1500000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_anon 5\ninactive_file 300000\nactive_file 100000\n")
    assert free_bytes(CPU) == 900_000


@pytest.mark.parametrize(
    "stats, free", [({"bytes_limit": 9, "bytes_in_use": 4}, 5), ({"bytes_in_use": 4}, None), (None, None)]
)
def test_free_memory_of_device_comes_from_its_statistics(stats, free):
    assert free_bytes(types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)) == free


@pytest.mark.parametrize("known, length", [(40, 40), (2048, 1024)])
def test_default_length_is_limited_by_model(known, length):
    target = toys.tiny_llama(0, 1, max_position_embeddings=known)
    assert Engine(target, slots=1).device.sizes.length == length


@pytest.mark.parametrize(
    "known, share, length",
    [(16384, 2.1, 8192), (16384, 1.9, 4096), (16384, 0.01, 1024), (3000, 1.0, 1500), (700, 0, 700)],
)
def test_auto_length_takes_at_most_half_of_free_memory(monkeypatch, known, share, length):
    """`share` is the free memory, relative to the slots at the longest possible length."""
    target = toys.tiny_llama(0, 1, max_position_embeddings=known)
    sizes = Engine(target, slots=2, max_length=min(known, 8192)).device.sizes
    most = slots_bytes(target, None, sizes)
    monkeypatch.setattr(rooms, "free_bytes", lambda _: share * most)
    found = fit_length(target, None, sizes)
    assert found == dataclasses.replace(sizes, length=length)
    monkeypatch.setattr(rooms, "free_bytes", lambda _: None)
    assert Engine(target, slots=2, max_length="auto").device.sizes == sizes
