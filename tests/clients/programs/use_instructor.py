"""Instructor: structured objects in its modes, partial objects and lists of objects."""

from typing import Any

import instructor
from checks import QUESTION, Program
from openai import OpenAI
from pydantic import BaseModel

program = Program("instructor")
messages: Any = [{"role": "user", "content": f"{QUESTION} Describe it."}]


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


def client(**mode: Any) -> instructor.Instructor:
    """Return a client; the default mode is that of tools."""
    return instructor.from_openai(OpenAI(base_url=f"{program.url}/v1", api_key="none"), **mode)


@program.check("create")
def _() -> None:
    assert isinstance(client().create(model=program.model, messages=messages, response_model=City), City)


@program.check("from_provider")
def _() -> None:
    api: Any = instructor.from_provider(f"openai/{program.model}", base_url=f"{program.url}/v1", api_key="none")
    assert isinstance(api.create(messages=messages, response_model=City), City)


@program.check("create_partial")
def _() -> None:
    *_, last = client().create_partial(model=program.model, messages=messages, response_model=City)
    assert isinstance(last.name, str) and isinstance(last.is_large, bool)


@program.check("create_iterable")
def _() -> None:
    for city in client().create_iterable(model=program.model, messages=messages, response_model=City):
        assert isinstance(city, City)


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT, instructor.Mode.RESPONSES_TOOLS):

    @program.check(f"create, mode {mode.name}", mode)
    def _(mode: instructor.Mode) -> None:
        assert isinstance(client(mode=mode).create(model=program.model, messages=messages, response_model=City), City)


program.end()
