"""Clients that disconnect, crowds, slow readers, and a server's shutdown under load."""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
from common import NAME, SLOTS, TEXTS, Report, client, metrics, pair

LONG: dict[str, Any] = {"model": NAME, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
WAITING = 8


async def stream(api: Any, number: int, times: list[float] | None = None, most: int | None = None) -> int:
    """Stream a completion and return its number of tokens; disconnect after `most` pieces, if given."""
    fields = LONG | {"prompt": TEXTS[number % len(TEXTS)], "seed": number, "stream": True}
    chunks, tokens, pieces = await api.completions.create(**fields, stream_options={"include_usage": True}), 0, 0
    async for chunk in chunks:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        elif times is not None:
            times.append(time.perf_counter())
        pieces += 1
        if pieces == most:
            await chunks.close()
            break
    return tokens


async def disconnects(url: str, count: int) -> float:
    """Return the most seconds from a client's disconnect until no request runs or waits."""
    worst = 0.0
    async with client(url) as api:
        for number in range(count):
            await stream(api, number, most=1 + number % 5)
            left = time.perf_counter()
            while (now := metrics(url))["num_requests_running"] + now["num_requests_waiting"]:
                await asyncio.sleep(0.005)
            worst = max(worst, time.perf_counter() - left)
    return worst


async def crowd(url: str, count: int) -> tuple[int, int, int]:
    """Send `count` requests at once; count full answers, rejections with 429 and Retry-After, and anything else."""
    async with client(url) as api:

        async def one(number: int) -> str:
            try:
                return "full" if await stream(api, number) == LONG["max_tokens"] else "else"
            except openai.RateLimitError as error:
                return "refused" if "retry-after" in error.response.headers else "else"

        found = await asyncio.gather(*(one(number) for number in range(count)), return_exceptions=True)
    return found.count("full"), found.count("refused"), count - found.count("full") - found.count("refused")


@contextlib.contextmanager
def deaf(url: str, count: int) -> Iterator[None]:
    """Hold connections open that request a stream and read nothing of it."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for number in range(count):
            fields = {
                "model": NAME,
                "max_tokens": 900,
                "ignore_eos": True,
                "prompt": TEXTS[0],
                "seed": number,
                "stream": True,
                "logprobs": 20,
            }
            sent = json.dumps(fields).encode()
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect((host, int(port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
            one.sendall(head.encode() + sent)
        yield


async def gaps(url: str, readers: int) -> list[float]:
    """Return the seconds between pieces of three streams, while `readers` other streams are read."""
    async with client(url) as api:
        every: list[list[float]] = [[], [], []]
        fields = LONG | {"prompt": TEXTS[0], "max_tokens": 900, "stream": True, "logprobs": 20}

        async def other(number: int) -> None:
            async for _ in await api.completions.create(**fields, seed=number):
                pass

        others = [asyncio.create_task(other(number)) for number in range(readers)]
        await asyncio.gather(*(stream(api, number, times) for number, times in enumerate(every)))
        await asyncio.gather(*others)
    return [gap for times in every for gap in np.diff(times)]


def slow_readers(url: str, turns: int, readers: int = 4) -> float:
    """Return the p99 gap beside clients that read nothing, relative to as many that read; the median over turns."""
    ratios = []
    for _ in range(turns):
        usual = np.percentile(asyncio.run(gaps(url, readers)), 99)
        with deaf(url, readers):
            beside = np.percentile(asyncio.run(gaps(url, 0)), 99)
        while metrics(url)["num_requests_running"]:
            time.sleep(0.05)
        ratios.append(beside / usual)
    return float(np.median(ratios))


async def ended(url: str, process: Any) -> tuple[int, int]:
    """Send SIGTERM under load; return how many accepted requests are answered in full, and a later one's status."""
    async with client(url) as api:
        begun = [asyncio.create_task(stream(api, number)) for number in range(SLOTS + 4)]
        while (now := metrics(url))["num_requests_running"] + now["num_requests_waiting"] < SLOTS + 4:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        late = httpx.post(f"{url}/v1/completions", json={"model": NAME, "prompt": "x"}, timeout=60)
        found = await asyncio.gather(*begun, return_exceptions=True)
    return found.count(LONG["max_tokens"]), late.status_code


def main() -> None:
    """Run all checks, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disconnects", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    options, report = parser.parse_args(), Report()
    with pair(["--max-waiting", str(WAITING)]) as (url, process):
        worst = asyncio.run(disconnects(url, options.disconnects))
        report.tell(
            f"{options.disconnects} disconnects, seconds until the slot is back, at most", f"{worst:.3f}", worst <= 1
        )
        room = SLOTS + WAITING
        full, refused, other = asyncio.run(crowd(url, 10 * room))
        report.tell(
            f"{10 * room} at once where there is room for {room}: answered in full, refused with 429, else",
            f"{full} {refused} {other}",
            full >= room and not other,
        )
        ratio = slow_readers(url, options.turns)
        report.tell(
            "p99 of others beside 4 who read nothing, over that beside 4 who read", f"{ratio:.2f}", ratio <= 1.1
        )
        complete, status = asyncio.run(ended(url, process))
        code = process.wait(timeout=60)
        report.tell(
            f"SIGTERM under {SLOTS + 4} requests: answered in full, status of a later one, of the process",
            f"{complete} {status} {code}",
            (complete, status, code) == (SLOTS + 4, 503, 0),
        )
    report.end()


if __name__ == "__main__":
    main()
