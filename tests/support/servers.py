"""A server for the tiny text pair, in this process and on a real port."""

import contextlib
import dataclasses
import functools
import shutil
import threading
from typing import Any

import openai
from flax import nnx

import jspec
from jspec.engine import Engine
from jspec.serve.app import Server
from jspec.serve.run import bound, run
from support import text_pair
from support.templates import TEMPLATE

OPTIONS = {"slots": 3, "max_length": 128, "chunks": (16, 64), "rounds": 3, "num_draft_tokens": 3}
NAME, WAITING = "tiny", 5
PROMPT = "in a thing, in a"
HELLO = [{"role": "user", "content": "the thing"}]


def tokenizer() -> Any:
    """Return the pair's tokenizer with a chat template."""
    made = text_pair.tokenizer()
    made.chat_template = TEMPLATE
    return made


@dataclasses.dataclass
class Running:
    """A running server, its engine, and its clients."""

    engine: Engine
    server: Server
    tokenizer: Any
    url: str

    @functools.cached_property
    def usual(self) -> openai.OpenAI:
        """The default client."""
        return self.client()

    def client(self, **options: Any) -> openai.OpenAI:
        """Return a client that does not retry."""
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "x", "max_retries": 0, "timeout": 60} | options
        )

    def complete(self, **fields: Any) -> Any:
        """Request a completion of 12 tokens with a seed, unless `fields` say otherwise."""
        usual = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "seed": 5}
        return self.usual.completions.create(**usual | fields)

    def chat(self, **fields: Any) -> Any:
        """Request a chat completion of 12 tokens with a seed, unless `fields` say otherwise."""
        usual = {"model": NAME, "messages": HELLO, "max_completion_tokens": 12, "seed": 5}
        return self.usual.chat.completions.create(**usual | fields)


@contextlib.contextmanager
def running(sources, keep_alive=75, max_length=OPTIONS["max_length"], template=TEMPLATE, **options):
    """Run a server for the pair in these folders."""
    target, draft = (jspec.load(folder) for folder in sources)
    with Engine(target, draft, max_waiting=3 + WAITING, **OPTIONS | {"max_length": max_length}) as engine:
        words = tokenizer()
        words.chat_template = template
        server = Server(engine, words, NAME, version="1.2", **{"max_waiting": WAITING} | options)
        listener = bound("127.0.0.1", 0)
        listener.listen(100)
        thread = threading.Thread(target=run, args=(server, listener, keep_alive))
        thread.start()
        try:
            yield Running(engine, server, words, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.is_draining = True
            thread.join()
            server.close()


def swapped(sources, folder):
    """Write a draft whose tokenizer has two ids exchanged, and return its folder."""
    made = folder / "swapped"
    shutil.copytree(sources[1], made)
    text_pair.tokenizer(swapped=40).save_pretrained(made)
    return made


def other_heads(folder):
    """Save heads for a target of another width."""
    wide = jspec.load(text_pair.write(folder / "wide", hidden_size=128))
    return jspec.HydraDrafter.untrained(wide, 2, rngs=nnx.Rngs(0)).save(folder / "heads")
