"""lm-evaluation-harness: log-likelihoods through /v1/completions against the model's own log-softmax."""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import NAME, Report, pair

import jspec
from bench.subject import held_out
from jspec.bundled import PAIR
from jspec.text import load_tokenizer

TASK = """task: direct
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def items(count: int) -> list[dict[str, Any]]:
    """Return pieces of held-out Python, each cut at two places, with its own continuation and another piece's."""
    tokenizer = load_tokenizer(PAIR / "target")
    whole = [tokenizer.decode(tokens) for kind in held_out(tokenizer, count).values() for tokens in kind]
    texts = [text[: len(text) - less] for less in (0, 40) for text in whole][:count]
    cuts = [(text[:-12].rstrip(), text[len(text[:-12].rstrip()) :]) for text in texts]
    others = [cuts[i - 1][1] for i in range(len(cuts))]
    return [{"text": text, "choices": [right, other]} for (text, right), other in zip(cuts, others, strict=True)]


def direct(context: str, continuation: str, target: Any, tokenizer: Any) -> tuple[float, int]:
    """Return a continuation's log-probability, computed from all logits at once, and its number of tokens.

    As in the harness, the context's own tokens are followed by the whole text's tokens after that many. A token across
    the border may make that a different text.
    """
    before, whole = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, context + continuation)
    )
    ids = before + whole[len(before) :]
    log_probs = jax.nn.log_softmax(target(jnp.array([ids]))[0].astype(jnp.float32))
    return sum(float(log_probs[i - 1, ids[i]]) for i in range(len(before), len(ids))), len(ids) - len(before)


def scored(program: str, url: str, folder: Path) -> list[dict[str, Any]]:
    """Run the harness and return its record of every item."""
    arguments = f"model={NAME},base_url={url}/v1/completions,tokenizer={PAIR / 'target'},num_concurrent=4"
    command = [program, "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "direct"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    said = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    files = [*folder.glob("out/**/samples_*.jsonl")]
    if said.returncode or not files:
        raise SystemExit(f"lm_eval has failed:\n{said.stdout[-2000:]}\n{said.stderr[-4000:]}")
    return [json.loads(line) for line in files[0].read_text().splitlines()]


def main() -> None:
    """Score with the harness, then directly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lm_eval", help="the program")
    parser.add_argument("--items", type=int, default=100)
    options, report = parser.parse_args(), Report()
    with tempfile.TemporaryDirectory() as name, pair(["--dtype", "float32"]) as (url, _):
        folder = Path(name)
        data = folder / "items.jsonl"
        data.write_text("".join(json.dumps(item) + "\n" for item in items(options.items)))
        (folder / "direct.yaml").write_text(TASK % data)
        samples = scored(options.lm_eval, url, folder)
    target, _, tokenizer = jspec.demo_pair()
    sums, means = [], []
    for sample in samples:
        for asked, (found, *_) in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            own, count = direct(asked["arg_0"], asked["arg_1"], target, tokenizer)
            sums.append(abs(float(found) - own))
            means.append(sums[-1] / count)
    report.tell(
        f"lm-eval local-completions, {len(samples)} items of two choices: farthest from the model's own",
        f"{max(means):.1e} a token, {max(sums):.1e} a sum of up to some 15",
        max(means) <= 1e-5 and len(samples) == options.items,
    )
    report.end()


if __name__ == "__main__":
    main()
