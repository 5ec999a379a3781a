"""The pair's cost ratio on this device: `python -m pair.cost`.

The ratio is c in Leviathan et al. 2023, section 3.3: the time of one draft step over that of one target step. Plain
decoding is timed with both models in turns, so that both run under the same machine conditions.
"""

import argparse
import os
import time

import jax
import numpy as np

import jspec

ROUNDS = 15
NEW_TOKENS = 128
PROMPT = "def main():\n"


def seconds(model: jspec.Llama, tokens: np.ndarray) -> float:
    """Return the wall time of decoding NEW_TOKENS greedily after ``tokens[1, P]``."""
    start = time.perf_counter()
    jax.block_until_ready(
        jspec.generate(
            model,
            tokens,
            np.array([tokens.shape[1]]),
            jax.random.split(jax.random.key(0), 1),
            max_new_tokens=NEW_TOKENS,
            sampling=jspec.SamplingParams(temperature=0.0),
        )
    )
    return time.perf_counter() - start


def main() -> None:
    """Print the median of the paired ratios, with quartiles, and the conditions."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    target, draft, tokenizer = jspec.demo_pair()
    tokens = np.array([tokenizer.encode(PROMPT)])
    times = np.array([[seconds(draft, tokens), seconds(target, tokens)] for _ in range(ROUNDS + 1)])[1:]
    low, middle, high = np.percentile(times[:, 0] / times[:, 1], [25, 50, 75])
    draft_step, target_step = np.median(times, axis=0) / NEW_TOKENS * 1e6
    print(
        f"cost ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {ROUNDS} pairs of {NEW_TOKENS} tokens, batch 1)"
    )
    print(f"draft {draft_step:.0f} us, target {target_step:.0f} us a token, median")
    device = jax.devices()[0].device_kind
    print(f"{device}, {os.cpu_count()} cores, jax {jax.__version__}, {target.dtype}")


if __name__ == "__main__":
    main()
