"""Train the pair from scratch: `python -m pair.train --out FOLDER`.

The target is trained in the stages of TARGET_STAGES, with few layers first. Then the draft is distilled from it. After
an interruption, the same command resumes from the checkpoints in the work folder; delete that folder to start afresh.
Matrix products are in bfloat16, which is fast on processors with bfloat16 arithmetic (AMX or AVX512-BF16) and very slow
on others.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from pair.corpus import load_corpus, load_packages
from pair.distill import acceptance_loss, divergence, sample_pool
from pair.models import MAX_POSITIONS, TARGET, cut, grow, load_model, new_model, save_model
from pair.optim import Optimiser
from pair.tokenizer import encode_documents, save_tokenizer, train_tokenizer

THREADS = 2
SEED = 20240607
TARGET_STEP_TOKENS = 4096
DRAFT_STEP_TOKENS = 4096
SAVE_EVERY = 50
LOG_EVERY = 10


@dataclass(frozen=True)
class Stage:
    """One stage of target training.

    Attributes:
        layers: the number of layers.
        steps: the number of optimiser steps.
        window: the window length, in tokens.
        rate_scale: the share of the peak rates.
        decay: the share of the steps over which the rates fall to zero.
        wide: the share of windows from the packages rather than the standard library.
    """

    layers: int
    steps: int
    window: int
    rate_scale: float
    decay: float
    wide: float


# The last stage has the final depth and the longest windows that the model will support.
TARGET_STAGES = (
    Stage(layers=2, steps=1500, window=256, rate_scale=1.0, decay=0.0, wide=0.75),
    Stage(layers=6, steps=1950, window=256, rate_scale=0.7, decay=0.0, wide=0.75),
    Stage(layers=6, steps=1000, window=MAX_POSITIONS, rate_scale=0.7, decay=0.9, wide=0.5),
)

# The loss is first the divergence, then the rejection probability. Every POOL_EVERY-th step uses the target's own text.
DRAFT_STEPS = 1700
DIVERGENCE_STEPS = 800
POOL_EVERY = 2


def windows(stream: np.ndarray, tokens: int, length: int, seed: int, step: int) -> torch.Tensor:
    """Return `tokens` ids as random windows of `stream`: int64 [tokens / length, length].

    The choice depends only on (seed, step), so a run can be repeated from any step.
    """
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, len(stream) - length, tokens // length)
    return torch.from_numpy(np.stack([stream[s : s + length] for s in starts]).astype(np.int64))


def run_steps(model: LlamaForCausalLM, optimiser: Optimiser, folder: Path, state_file: Path, loss_of: Callable) -> None:
    """Train on the scalar `loss_of(step)` for `optimiser.steps` steps, with periodic exports to `folder`.

    If `state_file` exists, the interrupted run that wrote it is resumed.
    """
    first = load_state(state_file, model, optimiser) if state_file.exists() else 0
    start, recent = time.time(), []
    for step in range(first, optimiser.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(step)
        optimiser.step(loss, step)
        recent.append(loss.item())
        done = step + 1
        if done % LOG_EVERY == 0:
            mean, seconds = sum(recent) / len(recent), time.time() - start
            print(f"{folder.name} step {done}/{optimiser.steps} loss {mean:.4f} {seconds:.0f} s", flush=True)
            recent.clear()
        if done % SAVE_EVERY == 0 or done == optimiser.steps:
            save_model(model, folder)
            save_state(state_file, model, optimiser, done)


def save_state(file: Path, model: LlamaForCausalLM, optimiser: Optimiser, step: int) -> None:
    """Write everything needed to continue at `step`."""
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": step}, file)


def load_state(file: Path, model: LlamaForCausalLM, optimiser: Optimiser) -> int:
    """Restore what `save_state` wrote, and return the step to continue from."""
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return state["step"]


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats, of the ids [batch, time] after the first."""
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train_target_stage(number: int, stream: np.ndarray, packages: np.ndarray, vocab_size: int, work: Path) -> None:
    """Train stage `number` from the previous stage's weights, and save the result in work/target-NUMBER."""
    stage = TARGET_STAGES[number]
    if number == 0:
        model = new_model(TARGET | {"num_hidden_layers": stage.layers}, vocab_size, SEED)
    else:
        model = grow(load_model(work / f"target-{number - 1}"), stage.layers)
    model.train()

    def loss_of(step: int) -> torch.Tensor:
        wide = int(stage.wide * TARGET_STEP_TOKENS)
        parts = [
            windows(source, tokens, stage.window, SEED + number, step)
            for source, tokens in ((packages, wide), (stream, TARGET_STEP_TOKENS - wide))
        ]
        return next_token_loss(model, torch.cat(parts))

    name = f"target-{number}"
    optimiser = Optimiser(model, stage.steps, stage.rate_scale, stage.decay)
    run_steps(model, optimiser, work / name, work / f"{name}.pt", loss_of)


def train_target(stream: np.ndarray, packages: np.ndarray, vocab_size: int, work: Path, folder: Path) -> None:
    """Run every target stage, then write the last one's weights to `folder`."""
    for number in range(len(TARGET_STAGES)):
        train_target_stage(number, stream, packages, vocab_size, work)
    save_model(load_model(work / f"target-{number}"), folder)


def train_draft(stream: np.ndarray, work: Path, target_folder: Path, folder: Path) -> None:
    """Distil the saved target into a draft cut from it, on the corpus and on text generated by the target."""
    target = load_model(target_folder)
    pool = sample_pool(target, stream, SEED)
    draft = cut(target).train()

    def loss_of(step: int) -> torch.Tensor:
        source = stream if (step + 1) % POOL_EVERY else pool
        ids = windows(source, DRAFT_STEP_TOKENS, MAX_POSITIONS, SEED + 100, step)
        with torch.no_grad():
            wanted = target(input_ids=ids, use_cache=False).logits.float()
        logits = draft(input_ids=ids, use_cache=False).logits.float()
        return (divergence if step < DIVERGENCE_STEPS else acceptance_loss)(logits, wanted)

    run_steps(draft, Optimiser(draft, DRAFT_STEPS), folder, work / "draft.pt", loss_of)


def main() -> None:
    """Parse the command line, then train the target and the draft."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument(
        "--work", type=Path, default=Path(__file__).parent / "work", help="folder for training checkpoints"
    )
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    options.work.mkdir(parents=True, exist_ok=True)
    target_folder, draft_folder = options.out / "target", options.out / "draft"
    train, held_out = load_corpus()
    tokenizer = train_tokenizer(d.text for d in train)
    for folder in (target_folder, draft_folder):
        save_tokenizer(tokenizer, folder)
    stream = encode_documents(tokenizer, train)
    packages = encode_documents(tokenizer, load_packages(held_out))
    print(f"{len(train)} files, {len(stream)} tokens; {len(packages)} more from packages", flush=True)
    train_target(stream, packages, tokenizer.get_vocab_size(), options.work, target_folder)
    train_draft(stream, options.work, target_folder, draft_folder)


if __name__ == "__main__":
    main()
