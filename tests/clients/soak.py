"""A server under load for a while: its resident memory, and whether its metrics add up."""

import argparse
import asyncio
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import NAME, TEXTS, Report, client, metrics, pair

CLIENTS = 12


def resident(process: Any) -> float:
    """Return the process's resident memory in MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def one(api: Any, rng: np.random.Generator, until: float, counts: dict[str, int]) -> None:
    """Run a client that sends requests of many kinds and disconnects from some of them."""
    while time.monotonic() < until:
        fields: dict[str, Any] = {
            "model": NAME,
            "prompt": str(rng.choice(TEXTS)) * int(rng.integers(1, 40)),
            "max_tokens": int(rng.integers(1, 200)),
            "stream": True,
        }
        if rng.random() < 0.5:
            fields["seed"] = int(rng.integers(2**32))
        if rng.random() < 0.3:
            fields["logprobs"] = 5
        leaves = int(rng.integers(1, 6)) if rng.random() < 0.2 else None
        counts["asked"] += 1
        chunks = await api.completions.create(**fields)
        pieces = 0
        async for _ in chunks:
            pieces += 1
            if pieces == leaves:
                counts["left"] += 1
                await chunks.close()
                break


async def soak(url: str, process: Any, seconds: float) -> tuple[list[float], dict[str, int]]:
    """Return memory over time, and the numbers of requests sent and abandoned."""
    until, counts, sizes = time.monotonic() + seconds, {"asked": 0, "left": 0}, []
    async with client(url) as api:
        clients = [asyncio.create_task(one(api, np.random.default_rng(i), until, counts)) for i in range(CLIENTS)]
        while time.monotonic() < until:
            await asyncio.sleep(min(5.0, seconds / 40))
            sizes.append(resident(process))
        await asyncio.gather(*clients)
    while (now := metrics(url))["num_requests_running"] + now["num_requests_waiting"]:
        await asyncio.sleep(0.05)
    return sizes, counts


def main() -> None:
    """Run the soak and report the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    minutes, report = parser.parse_args().minutes, Report()
    with pair() as (url, process):
        before = metrics(url)
        sizes, counts = asyncio.run(soak(url, process, 60 * minutes))
        after = metrics(url)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    quarter = len(sizes) // 4
    second, last = (float(np.median(part)) for part in (sizes[quarter : 2 * quarter], sizes[-quarter:]))
    tenths = [f"{np.median(part):.0f}" for part in np.array_split(sizes, 10)]
    print(f"MiB resident by tenths of the time: {' '.join(tenths)}", flush=True)
    report.tell(
        f"{minutes:g} minutes, {counts['asked']} requests, of which {counts['left']} were left: MiB resident "
        "in the second quarter and the last",
        f"{second:.0f} {last:.0f}",
        last <= 1.01 * second,
    )
    report.tell(
        "requests ended", f"{grown['request_success_total']:.0f}", grown["request_success_total"] == counts["asked"]
    )
    for counter, size in (
        ("prompt_tokens_total", "request_prompt_tokens_sum"),
        ("generation_tokens_total", "request_generation_tokens_sum"),
    ):
        report.tell(f"{counter} and {size}", f"{grown[counter]:.0f} {grown[size]:.0f}", grown[counter] == grown[size])
    report.end()


if __name__ == "__main__":
    main()
