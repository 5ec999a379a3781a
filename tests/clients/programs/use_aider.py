"""aider's OpenAI path: one message to its command. Edits would need a larger model."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MOST_TOKENS, QUESTION, Program

program = Program("aider-chat")


def has_answered(*arguments: str) -> bool:
    """Run aider on one file, and return whether it reports the tokens that it has received."""
    command = [sys.executable, "-m", "aider", "--model", f"openai/{program.model}", "--yes-always", "--no-git"]
    command += ["--model-settings-file", "settings.yml"]
    where = {"OPENAI_API_BASE": f"{program.url}/v1", "OPENAI_API_KEY": "none", "AIDER_ANALYTICS_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        limit = {"name": f"openai/{program.model}", "extra_params": {"max_tokens": MOST_TOKENS}}
        (Path(folder) / "settings.yml").write_text(json.dumps([limit]))  # YAML contains JSON
        (Path(folder) / "main.py").write_text("def area(width, height):\n    return width\n")
        command += [*arguments, "main.py"]
        done = subprocess.run(command, cwd=folder, env=os.environ | where, capture_output=True, text=True, timeout=600)
    found = re.search(r"Tokens: [\d.,k]+ sent, [1-9][\d.,k]* received", done.stdout)
    assert not done.returncode and found, (done.stdout + done.stderr)[-500:]
    return True


@program.check("--message")
def _() -> None:
    assert has_answered("--message", QUESTION, "--chat-mode", "ask", "--no-stream")


@program.check("--message, streamed")
def _() -> None:
    assert has_answered("--message", QUESTION, "--chat-mode", "ask")


program.end()
