"""Schemathesis: valid and invalid bodies, generated from the request schemas, never cause a 5xx response."""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import httpx
from common import NAME, Report, pair
from openapi import ROUTES, document

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> None:
    """Run Schemathesis against a server, which must still answer afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemathesis", help="the program")
    parser.add_argument("--cases", type=int, default=5000)
    options, report = parser.parse_args(), Report()
    with tempfile.TemporaryDirectory() as folder, pair(["--max-length", "64"]) as (url, _):
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(document(NAME)))
        command = [options.schemathesis, "run", str(file), "--url", url, "--checks", CHECKS, "--workers", "4"]
        command += ["--max-examples", f"{options.cases // len(ROUTES)}", "--phases", "coverage,fuzzing", "--seed", "1"]
        command += ["--continue-on-failure", "--no-color"]
        said = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        health = httpx.get(f"{url}/health", timeout=60).status_code
    cases = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) generated", said.stdout)]
    if said.returncode or not cases:
        print(said.stdout[-6000:], said.stderr[-2000:])
    count = max(cases, default=0)
    report.tell(
        "Schemathesis, cases; status of the program, of /health afterwards",
        f"{count}; {said.returncode} {health}",
        count >= options.cases and not said.returncode and health == 200,
    )
    report.end()


if __name__ == "__main__":
    main()
