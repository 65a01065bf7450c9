"""Looks at every page of the built site in a headless browser, and follows every link: what MkDocs
cannot check.

    mkdocs build && python -m tools.look_at_site [--pictures FOLDER] [--only TEXT] [--dark]

A page fails if it is wider than its window at one of `WIDTHS`, or if one of its links leads to a
file, a picture or an anchor that the site does not have. With ``--pictures`` each page is also
drawn, at both widths side by side, as FOLDER/PAGE.png. It needs Chromium and nothing else; links
are checked without it, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "outputs" / "site"
WIDTHS = (420, 1400)
HEIGHT = 2600
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TOGETHER = 6
"""Pages that the browser has open at once."""
HARNESS = f"looked_at_{os.getpid()}.html"
SECONDS, TRIES = 90.0, 3
"""Of a browser with its pages, and how often it may start: now and then a headless Chromium does
not end."""


class _Page(HTMLParser):
    """The links of a page and the names to which links can lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.names.add(value)


def broken_links(site: Path = SITE) -> list[str]:
    """Every link within the site that leads nowhere, as ``page: link``."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # its links begin at the root of the server
        for link in page.links
        if not _leads(site, path, link, pages)
    ]


def _leads(site: Path, path: Path, link: str, pages: dict[Path, _Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = path
    if parts.path:
        folder = site if parts.path.startswith("/") else path.parent
        target = (folder / unquote(parts.path).lstrip("/")).resolve()
    if target.is_dir():
        target = target / "index.html"
    if target.suffix != ".html" or not parts.fragment:
        return target.exists()
    return target in pages and unquote(parts.fragment) in pages[target].names


def _harness(pages: Sequence[str], dark: bool) -> str:
    """A page with a frame for each page and width; when all are there, it writes how wide each
    is."""
    scheme = "slate" if dark else "default"
    palette = {"index": int(dark), "color": {"scheme": scheme, "primary": "indigo"}}
    frames = "".join(
        f'<iframe src="{page}" style="width:{width}px" data-width="{width}"></iframe>'
        for page in pages
        for width in WIDTHS
    )
    return f"""<!doctype html><meta charset="utf-8"><style>body{{margin:0;background:#888;width:9999px}}
iframe{{border:0;height:{HEIGHT}px;vertical-align:top}}</style><script>
// Material keeps the colour scheme under the path of the site.
localStorage.setItem("/.__palette", {json.dumps(json.dumps(palette))});
window.onload = () => {{
  const found = [...document.querySelectorAll("iframe")].map(frame => {{
    const doc = frame.contentDocument, width = Number(frame.dataset.width);
    const wide = [...doc.querySelectorAll("article *")].filter(e => !e.closest(
      "pre, .md-typeset__scrollwrap, .highlight, svg") && e.getBoundingClientRect().right > width + 1);
    return [frame.getAttribute("src"), width, doc.documentElement.scrollWidth, wide.slice(0, 3).map(e =>
      e.tagName + " " + (e.getAttribute("src") || e.textContent.slice(0, 40)))];
  }});
  const said = document.createElement("pre");
  said.id = "found"; said.textContent = JSON.stringify(found); document.body.append(said);
}};
</script>{frames}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the browser has ended
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit(f"error: none of {', '.join(BROWSERS)} is installed")
    return found


def _browse(pages: Sequence[str], dark: bool, port: int, *options: str) -> str:
    """Open the harness for `pages`; returns its text at the end."""
    (SITE / HARNESS).write_text(_harness(pages, dark))
    try:
        for _ in range(TRIES - 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return _run_browser(port, *options)
        return _run_browser(port, *options)
    finally:
        (SITE / HARNESS).unlink(missing_ok=True)


def _run_browser(port: int, *options: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", *options, f"http://127.0.0.1:{port}/{HARNESS}"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout


def too_wide(pages: Sequence[str], dark: bool, port: int) -> Iterator[str]:
    """What is wider than its window, one line each."""
    for begin in range(0, len(pages), TOGETHER):
        text = _browse(pages[begin : begin + TOGETHER], dark, port, "--dump-dom")
        match = re.search(r'<pre id="found">(.*?)</pre>', text, re.DOTALL)
        if match is None:
            raise SystemExit(
                f"error: the browser ended before it had read the pages:\n{text[-500:]}"
            )
        for page, width, real, wide in json.loads(html.unescape(match[1])):
            if real > width or wide:
                yield f"{page} at {width} pixels: {real} wide; {'; '.join(wide)}"


def draw(page: str, folder: Path, dark: bool, port: int) -> Path:
    """Draw a page at all widths side by side."""
    path = folder / f"{page.removesuffix('.html').replace('/', '_')}{'_dark' * dark}.png"
    size = f"--window-size={sum(WIDTHS)},{HEIGHT}"
    _browse([page], dark, port, f"--screenshot={path}", size)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if something is too wide or a link is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="also draw each page there")
    parser.add_argument("--only", default="", help="pages whose path contains this text")
    parser.add_argument("--dark", action="store_true", help="the dark scheme")
    args = parser.parse_args(argv)
    broken = broken_links()
    out = sys.stdout
    out.write(f"{len(broken)} broken links\n" + "".join(f"  {link}\n" for link in broken))
    pages = [path.relative_to(SITE).as_posix() for path in sorted(SITE.rglob("*.html"))]
    ours = [page for page in pages if args.only in page and not page.startswith("repository/")]
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        wide = list(too_wide(ours, args.dark, port))
        out.write(
            f"{len(ours)} pages, {len(wide)} too wide\n" + "".join(f"  {line}\n" for line in wide)
        )
        if args.pictures:
            args.pictures.mkdir(parents=True, exist_ok=True)
            for page in ours:
                out.write(f"{draw(page, args.pictures, args.dark, port)}\n")
        server.shutdown()
    return int(bool(broken or wide))


if __name__ == "__main__":
    sys.exit(main())
