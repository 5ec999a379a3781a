"""OpenAI's client on both APIs: streamed and complete responses agree, and `usage` and metrics count them."""

import argparse
import asyncio
from typing import Any

import numpy as np
from common import NAME, TEXTS, Report, client, metrics, pair


def body(number: int) -> tuple[bool, dict[str, Any]]:
    """Return whether the request is a chat, and its fields, all chosen at random."""
    rng = np.random.default_rng(number)
    is_chat, text = bool(number % 2), str(rng.choice(TEXTS))
    fields: dict[str, Any] = {"model": NAME, "max_tokens": int(rng.integers(1, 49)), "seed": number}
    fields["extra_body"] = {"return_token_ids": True}
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"n": 2},
        {"stop": ["\n"]},
        {"stop": ["e", "\n\n"]},
        {"frequency_penalty": 0.5},
        {"logit_bias": {"5": -100}},
        {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2},
    ]
    for extra in rng.choice(len(extras), int(rng.integers(0, 3)), replace=False):
        fields |= extras[extra]
    return is_chat, fields | ({"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text})


async def ask(api: Any, number: int, stream: bool) -> tuple[dict[int, Any], Any]:
    """Return each choice's text, ids, log-probabilities and finish reason, and the usage."""
    is_chat, fields = body(number)
    create = api.chat.completions.create if is_chat else api.completions.create
    if not stream:
        parts = [await create(**fields)]
    else:
        chunks = await create(**fields, stream=True, stream_options={"include_usage": True})
        parts = [chunk async for chunk in chunks]
    found: dict[int, Any] = {}
    for part in parts:
        for choice in part.choices:
            one = found.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "end": None})
            said = (choice.delta if stream else choice.message).content if is_chat else choice.text
            one["text"] += said or ""
            one["ids"] += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                one["logprobs"] += (
                    [token.logprob for token in choice.logprobs.content or []]
                    if is_chat
                    else choice.logprobs.token_logprobs
                )
            one["end"] = choice.finish_reason or one["end"]
    return found, parts[-1].usage


def differences(number: int, texts: dict[int, Any], streamed: dict[int, Any]) -> list[str]:
    """Return the differences between two responses to one request; log-probabilities may differ by rounding."""
    if texts.keys() != streamed.keys():
        return [f"request {number}: choices {[*texts]} and {[*streamed]}"]
    found = []
    for index, text in texts.items():
        other, which = streamed[index], f"request {number}, choice {index}"
        place = next((i for i, (a, b) in enumerate(zip(text["ids"], other["ids"], strict=False)) if a != b), None)
        if place is not None:
            found.append(f"{which}: other tokens from {place} on, of {len(text['ids'])}; {body(number)[1]}")
        elif {**text, "logprobs": 0} != {**other, "logprobs": 0}:
            found.append(f"{which}: {text} and {other}")
        elif len(gaps := np.abs(np.subtract(text["logprobs"], other["logprobs"]))) and gaps.max() > 1e-5:
            at = int(gaps.argmax())
            found.append(f"{which}: the log-probability {text['logprobs'][at]} and {other['logprobs'][at]}")
    return found


async def compare(url: str, requests: int, at_once: int = 16) -> dict[str, int]:
    """Return the numbers of requests that differ or are miscounted, and the sums of usage."""
    room, found = asyncio.Semaphore(at_once), {"differ": 0, "uncounted": 0, "prompt": 0, "completion": 0}
    async with client(url) as api:

        async def one(number: int) -> None:
            async with room:
                answers = [await ask(api, number, stream) for stream in (False, True)]
            (texts, usage), (streamed, counted) = answers
            same_usage = (usage.prompt_tokens, usage.completion_tokens) == (
                counted.prompt_tokens,
                counted.completion_tokens,
            )
            different = differences(number, texts, streamed)
            print(*different, sep="\n", end="\n" * bool(different))
            found["differ"] += bool(different) or not same_usage
            found["uncounted"] += usage.completion_tokens != sum(len(text["ids"]) for text in texts.values())
            found["prompt"] += usage.prompt_tokens + counted.prompt_tokens
            found["completion"] += usage.completion_tokens + counted.completion_tokens

        await asyncio.gather(*map(one, range(requests)))
    return found


def main() -> None:
    """Send the requests, compare the responses, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    requests, report = parser.parse_args().requests, Report()
    with pair(["--max-length", "256"]) as (url, _):
        before = metrics(url)
        found = asyncio.run(compare(url, requests))
        after = metrics(url)
    report.tell(
        f"{requests} requests, streamed and not, texts, ends, ids, log-probabilities or usage that differ",
        f"{found['differ']}",
        not found["differ"],
    )
    report.tell("answers whose usage is not the number of their ids", f"{found['uncounted']}", not found["uncounted"])
    for name, what in (("prompt_tokens_total", "prompt"), ("generation_tokens_total", "completion")):
        grown = after[name] - before[name]
        report.tell(f"{name} against usage", f"{grown:.0f} {found[what]}", grown == found[what])
    report.end()


if __name__ == "__main__":
    main()
