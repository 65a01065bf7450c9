"""Serves the site of the manual on this machine until Ctrl-C: `make docs-site`.

python -m tools.serve_site [PORT]
"""

from __future__ import annotations

import errno
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from tools.architecture import ROOT

__all__ = ["main"]

SITE = ROOT / "outputs" / "site"


def main(port: int) -> int:
    """Serve; 1 if something else has the port."""
    try:
        server = ThreadingHTTPServer(
            ("127.0.0.1", port), partial(SimpleHTTPRequestHandler, directory=str(SITE))
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        sys.stderr.write(
            f"error: port {port} is in use. If another `make docs-site` serves there, it serves "
            f"this build too: http://127.0.0.1:{port}/. Otherwise take another port: make "
            f"docs-site PORT={port + 1}\n"
        )
        return 1
    with server:
        sys.stdout.write(f"http://127.0.0.1:{server.server_port}/ until Ctrl-C\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000))
