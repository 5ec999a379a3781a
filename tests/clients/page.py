"""The server's web page, and pages of other origins, in a headless Chromium."""

import argparse
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from common import pair


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer with an almost empty page."""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><link rel=icon href=data:,><title>Another origin</title>")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def another_origin() -> Iterator[str]:
    """Serve a page on a port of its own, and yield its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main() -> None:
    """Run the script, which prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="with page.mjs and the packages that it needs")
    folder = parser.parse_args().folder
    with (
        another_origin() as allowed,
        another_origin() as other,
        pair(["--max-length", "256", "--allow-origin", allowed]) as (url, _),
    ):
        sys.exit(subprocess.run(["node", "page.mjs", url, allowed, other], cwd=folder, timeout=300).returncode)


if __name__ == "__main__":
    main()
