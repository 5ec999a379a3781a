"""What the draft learns from: the target's distributions, on the corpus and on the target's own text."""

import numpy as np
import torch
from transformers import LlamaForCausalLM

POOL_ROUNDS = 6
POOL_BATCH = 256
PROMPT_TOKENS = 64
NEW_TOKENS = 256
SHARP = 4.0


def rejection(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean total variation, 1 - sum(min(p, q)), of logits [batch, time, vocabulary]: the rejection probability."""
    return 1 - torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).mean()


def divergence(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean KL(target || draft) of logits [batch, time, vocabulary]; its gradient is strong far from the goal."""
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def acceptance_loss(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The rejection probability at temperature 1 and, standing in for greedy decoding, at 1 / SHARP."""
    return (rejection(draft, target) + rejection(draft * SHARP, target * SHARP)) / 2


@torch.no_grad()
def continuations(
    target: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int, sample: bool, seed: int
) -> torch.Tensor:
    """`prompts` [batch, time] followed by `new_tokens` ids drawn at temperature 1, or greedily.

    An end-of-text id does not stop a row: the model simply starts another file, as in the corpus.
    """
    generator = torch.Generator().manual_seed(seed)
    pieces, cache, ids = [prompts], None, prompts
    for _ in range(new_tokens):
        output = target(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        if sample:
            ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        else:
            ids = logits.argmax(-1, keepdim=True)
        pieces.append(ids)
    return torch.cat(pieces, 1)


def random_prompts(stream: np.ndarray, count: int, length: int, seed: int) -> torch.Tensor:
    """`count` random windows of `stream`: int64 [count, length]."""
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, count)
    return torch.from_numpy(np.stack([stream[s : s + length] for s in starts]).astype(np.int64))


def sample_pool(target: LlamaForCausalLM, stream: np.ndarray, seed: int) -> np.ndarray:
    """Continuations of corpus prompts by the target, one after another: uint16 [tokens].

    Every second round is greedy, so that the draft also sees the loops greedy text falls into.
    """
    rounds = []
    for index in range(POOL_ROUNDS):
        prompts = random_prompts(stream, POOL_BATCH, PROMPT_TOKENS, seed + index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = continuations(target, prompts, NEW_TOKENS, index % 2 == 0, seed + index)
        rounds.append(rows.numpy().astype(np.uint16).ravel())
        print(f"pool round {index + 1}/{POOL_ROUNDS}", flush=True)
    return np.concatenate(rounds)
