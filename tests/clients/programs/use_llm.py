"""Simon Willison's llm: its command with a prompt, a stream, a schema and a tool, and a conversation in Python."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llm
from checks import BEGINNING, MOST_TOKENS, QUESTION, TOOL_QUESTION, Program, weather

program = Program("llm")
folder = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = f"{folder}"
(folder / "extra-openai-models.yaml").write_text(f"""
- model_id: served
  model_name: {program.model}
  api_base: {program.url}/v1
  api_key_name: served
  supports_tools: true
  supports_schema: true
- model_id: completed
  model_name: {program.model}
  api_base: {program.url}/v1
  api_key_name: served
  completion: true
""")
(folder / "keys.json").write_text(json.dumps({"served": "none"}))
(folder / "tools.py").write_text("def weather(city: str, days: int) -> str:\n    return f'{city}: sunny.'\n")


def said(*arguments: str, model: str = "served") -> str:
    """Run the command and return its output."""
    command = [sys.executable, "-m", "llm", "-m", model, "-o", "max_tokens", f"{MOST_TOKENS}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return done.stdout


@program.check("a prompt, streamed and whole")
def _() -> None:
    cold = (QUESTION, "-o", "temperature", "0")
    assert said(*cold).strip() and said(*cold) == said(*cold, "--no-stream")


@program.check("--schema")
def _() -> None:
    found = json.loads(said(QUESTION, "--schema", "name, is_large bool"))
    assert isinstance(found["name"], str) and isinstance(found["is_large"], bool)


@program.check("--functions")
def _() -> None:
    assert said(TOOL_QUESTION, "--functions", f"{folder / 'tools.py'}", "--chain-limit", "3", "--td") is not None


@program.check("a conversation in Python, with a tool")
def _() -> None:
    conversation = llm.get_model("served").conversation(tools=[weather])
    assert conversation.prompt(QUESTION, max_tokens=MOST_TOKENS).text()
    assert conversation.prompt(TOOL_QUESTION, stream=False, max_tokens=MOST_TOKENS).json()


@program.check("completions")
def _() -> None:
    assert said(BEGINNING, model="completed").strip()


program.end()
