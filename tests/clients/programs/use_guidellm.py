"""GuideLLM: its command on every kind of endpoint with synthetic prompts."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Program

program = Program("guidellm")


def successful(request_format: str) -> int:
    """Send three requests, and return how many have succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        backend = f"kind=openai_http,target={program.url},request_format={request_format}"
        command = [f"{Path(sys.executable).parent / 'guidellm'}", "run", "--backend", backend]
        command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={program.tokenizer}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
        command += ["--output", "kind=json,path=out.json", "--disable-console-interactive"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert not done.returncode, (done.stdout + done.stderr)[-600:]
        (benchmark,) = json.loads((Path(folder) / "out.json").read_text())["benchmarks"]
        return len(benchmark["requests"]["successful"])


for kind in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):

    @program.check(kind, kind)
    def _(kind: str) -> None:
        assert successful(kind) == 3


program.end()
