"""The server's web page in a headless Chromium."""

import argparse
import subprocess
import sys

from common import pair


def main() -> None:
    """Run the script, which prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="with page.mjs and the packages that it needs")
    folder = parser.parse_args().folder
    with pair(["--max-length", "256"]) as (url, _):
        sys.exit(subprocess.run(["node", "page.mjs", url], cwd=folder, timeout=300).returncode)


if __name__ == "__main__":
    main()
