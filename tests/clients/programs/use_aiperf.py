"""AIPerf: its command on every kind of endpoint, streamed and not."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import Program

program = Program("aiperf")


def profile(*options: str) -> dict[str, Any]:
    """Send three requests, and return the exported figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{Path(sys.executable).parent / 'aiperf'}", "profile", "-m", program.model, "-u", program.url]
        command += ["--tokenizer", program.tokenizer, "--request-count", "3", "--num-prompts", "3", "--isl", "32"]
        command += ["--osl", "16", "--ui", "none", "--output-artifact-dir", folder, *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        files = [*Path(folder).rglob("profile_export_aiperf.json")]
        assert not done.returncode and files, (done.stdout + done.stderr)[-600:]
        return json.loads(files[0].read_text())


for kind in ("chat", "completions", "responses"):
    for options in ([], ["--streaming"]):

        @program.check(f"{kind}{', streamed' * bool(options)}", kind, options)
        def _(kind: str, options: list[str]) -> None:
            found = profile("--endpoint-type", kind, *options)
            assert found["request_count"]["avg"] == 3 and not found.get("error_summary"), f"{found}"[:600]


@program.check("chat, streamed, with the server's token counts")
def _() -> None:
    found = profile("--streaming", "--use-server-token-count")
    assert found["output_sequence_length"]["avg"] > 0 and not found.get("error_summary")


program.end()
