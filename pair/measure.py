"""The pair's loss and acceptance on the held-out modules: `python -m pair.measure --pair FOLDER`."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from pair.corpus import Document, load_corpus
from pair.distill import continuations, random_prompts
from pair.models import load_model
from pair.tokenizer import encode_documents, load_tokenizer

WINDOW = 512
PROMPT_TOKENS = 64
NEW_TOKENS = 192
SEED = 7
MEASURES = ("target", "draft", "argmax", "overlap", "entropy")


@dataclass
class Estimate:
    """A mean over `count` token positions, with the standard error over independent `groups` (windows)."""

    mean: float
    error: float
    count: int
    groups: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} +- {self.error:.4f} (N = {self.count} tokens in {self.groups} windows)"


def estimate(values: torch.Tensor) -> Estimate:
    """Summarise values [windows, positions]. Windows are nearly independent, but positions within a window are not."""
    means = values.double().mean(1)
    return Estimate(means.mean().item(), (means.std() / len(means) ** 0.5).item(), values.numel(), len(means))


@torch.no_grad()
def log_probabilities(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return float32 log-probabilities after each position except the last: [batch, time - 1, vocabulary]."""
    return model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)


def compare(target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: torch.Tensor, first: int) -> dict:
    """Return per-position measures [rows, positions] of both models' predictions of ids[:, first:]."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in MEASURES}
    for rows in ids.split(8):
        p, q = (log_probabilities(model, rows)[:, first - 1 :] for model in (target, draft))
        truth = rows[:, first:, None]
        parts["target"].append(-p.gather(-1, truth)[..., 0])
        parts["draft"].append(-q.gather(-1, truth)[..., 0])
        parts["argmax"].append((p.argmax(-1) == q.argmax(-1)).float())
        parts["overlap"].append(torch.minimum(p.exp(), q.exp()).sum(-1))
        parts["entropy"].append(-(p.exp() * p).sum(-1))
    return {name: torch.cat(pieces) for name, pieces in parts.items()}


def held_out_windows(stream: np.ndarray, count: int) -> torch.Tensor:
    """Return `count` windows spread evenly over the whole held-out stream, without overlap: [count, WINDOW]."""
    count = min(count, len(stream) // WINDOW)
    starts = np.linspace(0, len(stream) - WINDOW, count).astype(int)
    return torch.from_numpy(np.stack([stream[s : s + WINDOW] for s in starts]).astype(np.int64))


def bytes_per_token(documents: list[Document], stream: np.ndarray) -> float:
    """Return the mean number of UTF-8 text bytes per token of the held-out stream."""
    return sum(len(d.text.encode()) for d in documents) / len(stream)


def report_losses(measures: dict[str, torch.Tensor], ratio: float) -> None:
    """Print the models' losses in nats per token and bits per byte. `ratio` is bytes per token."""
    for name in [name for name in ("target", "draft") if name in measures]:
        loss = estimate(measures[name])
        print(f"{name} loss, nats/token: {loss}; bits/byte: {loss.mean / math.log(2) / ratio:.4f}")


def main() -> None:
    """Print all measurements for the pair in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path("jspec/bundled/pair_data"))
    parser.add_argument("--windows", type=int, default=200, help="number of held-out windows of 512 tokens")
    parser.add_argument("--prompts", type=int, default=96, help="number of held-out prompts to continue")
    options = parser.parse_args()
    torch.set_num_threads(2)
    target = load_model(options.pair / "target")
    _, documents = load_corpus()
    stream = encode_documents(load_tokenizer(options.pair / "target"), documents)
    print(f"held-out: {len(documents)} files, {len(stream)} tokens")

    windows, ratio = held_out_windows(stream, options.windows), bytes_per_token(documents, stream)
    if not (options.pair / "draft").exists():  # the draft is not trained yet
        return report_losses({"target": compare(target, target, windows, 1)["target"]}, ratio)
    draft = load_model(options.pair / "draft")
    text = compare(target, draft, windows, 1)
    report_losses(text, ratio)
    print(f"entropy of the target's distribution, nats: {estimate(text['entropy'])}")
    print(f"greedy agreement on held-out text: {estimate(text['argmax'])}")
    print(f"sum min(p, q) at temperature 1 on held-out text: {estimate(text['overlap'])}")
    prompts = random_prompts(stream, options.prompts, PROMPT_TOKENS, SEED)
    own = compare(target, draft, continuations(target, prompts, NEW_TOKENS, False, SEED), PROMPT_TOKENS)
    print(f"greedy acceptance on the target's greedy continuations: {estimate(own['argmax'])}")
    sampled = compare(target, draft, continuations(target, prompts, NEW_TOKENS, True, SEED), PROMPT_TOKENS)
    print(f"acceptance at temperature 1 on the target's samples: {estimate(sampled['overlap'])}")


if __name__ == "__main__":
    main()
