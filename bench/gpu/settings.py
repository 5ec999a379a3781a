"""Decoding in other settings (batches, long contexts, a tree, an EAGLE head, the engine), and a training step.

If a set of measurements fails or is cut short, the earlier sets remain in the record.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench.abstract import Setting
from bench.gpu.bandwidth import read_bandwidth
from bench.gpu.programs import Case, add_rows, compile_together, plain, shares, speculative, timed
from bench.gpu.record import Record
from bench.gpu.sizes import Sizes, sizes
from bench.gpu.weights import random_model
from bench.pairs import weight_bytes
from bench.passes import Pass, pass_seconds
from bench.synthetic import Synthetic
from bench.timing import in_turns, ratio, spread
from jspec import theory
from jspec.engine import Engine, Request
from jspec.training.batches import side_by_side
from jspec.training.dataset import of_answer
from jspec.training.eagle_training import new_head
from jspec.training.fit import Schedule, begin
from jspec.training.kinds import trainee_of

# How often the first, second and third child of a node is accepted. The rates add up to ACCEPTANCE.
_BY_RANK = (0.62, 0.12, 0.06)


def run(record: Record, rehearse: bool) -> None:
    """Run the sets of measurements in order. The set with the largest program runs last."""
    size = sizes(rehearse)
    bandwidth = read_bandwidth(record)
    target, draft = random_model(size.target, size.dtype, 0), random_model(size.draft, size.dtype, 1)
    sets: dict[str, Callable[[], None]] = {
        "batches": lambda: _batches(record, size, target, draft, bandwidth),
        "contexts": lambda: _contexts(record, size, target, bandwidth),
        "EAGLE": lambda: _over_plain(record, size, _eagle(target, size), bandwidth),
        "engine": lambda: _engine(record, size, draft),
        "training": lambda: _training(record, size, draft),
        "tree": lambda: _over_plain(record, size, _tree(target, draft, size), bandwidth),
    }
    for name, measure in sets.items():
        begin_ = time.monotonic()
        with record.attempt(name):
            measure()
        record.add(f"{name}: end", seconds=time.monotonic() - begin_)


def _batches(record: Record, size: Sizes, target: Any, draft: Any, bandwidth: float) -> None:
    """Measure plain decoding and K = 2 with every batch size."""
    programs = compile_together(
        record,
        [
            case
            for batch in size.batches
            for case in (
                plain(f"3B plain, batch {batch}", target, size, batch),
                speculative(f"3B, 1B drafts K=2, batch {batch}", target, draft, 2, size, batch),
            )
        ],
    )
    timings = timed(record, programs, size.lengths, size.repeats)
    for batch in size.batches:
        names = [name for name in timings if programs[name].case.setting.batch == batch]
        some = {name: timings[name] for name in names}
        add_rows(record, programs, some, f"3B plain, batch {batch}", bandwidth)


def _contexts(record: Record, size: Sizes, target: Any, bandwidth: float) -> None:
    """Measure one-token passes at each context.

    One program has room for the longest context and takes the context as an argument.
    """
    slots = max(size.contexts) + size.new_tokens
    passes = {f"3B pass, context {context}": Pass(target, 1, 1, context, slots) for context in size.contexts}
    times = in_turns(passes, size.repeats, warmup=1)
    config = target.config
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * target.dtype.itemsize
    for (name, seconds), context in zip(pass_seconds(passes, times).items(), size.contexts, strict=True):
        read = weight_bytes(target) + context * each
        record.add(
            name,
            context=context,
            slots=slots,
            ms=seconds * 1e3,
            tokens_per_s=1 / seconds,
            cache_mb=context * each / 1e6,
            **shares(read, seconds, bandwidth),
        )


def _over_plain(record: Record, size: Sizes, case: Case, bandwidth: float) -> None:
    """Time `case` in turns with plain decoding. The second set finds plain decoding in the compilation cache."""
    programs = compile_together(record, [plain("3B plain", case.target, size), case])
    add_rows(record, programs, timed(record, programs, size.lengths, size.repeats), "3B plain", bandwidth)


def _eagle(target: Any, size: Sizes) -> Case:
    drafter = jspec.EagleDrafter(eagle_head(target, size))
    return speculative("3B, EAGLE drafts K=4", target, drafter, 4, size)


def _tree(target: Any, draft: Any, size: Sizes) -> Case:
    tree = theory.best_tree(_BY_RANK, *size.tree)
    setting = Setting(1, size.width, size.new_tokens, tree.max_depth, Synthetic(_BY_RANK))
    worth = float(theory.tree_yield(tree, _BY_RANK))
    return Case(f"3B, 1B drafts a tree of {tree.size}", target, jspec.TreeDrafter(draft, tree), setting, worth)


def eagle_head(target: Any, size: Sizes) -> Any:
    """Return a random EAGLE-3 head for `target`, in the target's dtype, with a reduced vocabulary."""
    head = new_head(target, np.arange(size.draft_vocab), 0)
    return jax.tree.map(
        lambda leaf: leaf.astype(size.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, head
    )


def _engine(record: Record, size: Sizes, target: Any) -> None:
    """Measure twice as many requests as slots, in turns with two calls of one program with that many rows."""
    case = plain("1B plain, one program", target, size, size.slots)
    program = compile_together(record, [case])[case.name]
    prompts = np.random.default_rng(0).integers(1, target.config.vocab_size, (2 * size.slots, size.width)).tolist()
    requests = [Request(tuple(prompt), size.lengths[1]) for prompt in prompts]
    begin_ = time.monotonic()
    with Engine(target, slots=size.slots, max_length=size.width + size.lengths[1]) as engine:
        started = time.monotonic() - begin_
        calls = {
            "engine": lambda: [len(result.tokens) for result in engine.generate(requests)],
            "program": lambda: [program(size.lengths[1]).tokens for _ in range(2)],
        }
        times = in_turns(calls, size.repeats, warmup=1)
    tokens, share = 2 * size.slots * size.lengths[1], ratio(times["program"], times["engine"])
    record.add(
        f"1B engine, {size.slots} slots",
        tokens_per_s=tokens / spread(times["engine"]).median,
        program_tokens_per_s=tokens / spread(times["program"]).median,
        over_program=share.median,
        over_program_low=share.low,
        over_program_high=share.high,
        start_seconds=started,
    )


def _training(record: Record, size: Sizes, target: Any) -> None:
    """Measure training steps of an EAGLE head, including the target's forward pass over the batch."""
    rows, length, depth = size.trained
    texts = np.random.default_rng(0).integers(target.config.vocab_size, size=(rows, length)).tolist()
    batch = side_by_side([of_answer((), text) for text in texts], rows, length)
    head = new_head(target, np.arange(size.draft_vocab), 0)
    trainee = trainee_of(jspec.EagleDrafter(head))
    training = begin(trainee, Schedule(None, depth))
    state = jax.tree.map(jnp.copy, training.state)
    begin_ = time.monotonic()
    step = training.step.lower(state, target, batch.tokens, batch.learned, None).compile()
    compiled_in = time.monotonic() - begin_

    def call() -> Any:
        nonlocal state
        state, loss = step(state, target, batch.tokens, batch.learned, None)
        return loss

    taken = spread(in_turns({"step": call}, size.repeats, warmup=1)["step"])
    record.add(
        "1B: a step of training EAGLE",
        ms=taken.median * 1e3,
        ms_low=taken.low * 1e3,
        ms_high=taken.high * 1e3,
        tokens=batch.tokens.size,
        tokens_per_s=batch.tokens.size / taken.median,
        trained=sum(leaf.size for leaf in trainee.weights.values()),
        compile_or_load_seconds=compiled_in,
        temporary_mb=step.memory_analysis().temp_size_in_bytes / 1e6,
    )
