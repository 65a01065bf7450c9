"""Hooks of MkDocs for the site of the manual (mkdocs.yml, `make docs-site`).

- The navigation is read from docs/README.md, which lists the pages; a page that it does not list is
  an error.
- Pages link to files outside docs/, and to lines of them. Each of them becomes a page with its text
  and line numbers, so every link works without network.
- A click on a picture opens it in full.
- A page that would load anything from another host is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = "repository"
"""Folder of the site for files that are not in docs/."""

LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
LINE = re.compile(r"#L(\d+)")
ANCHOR = re.compile(r'id="(__codelineno-0-\d+)"')
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
LISTED = re.compile(r"^(?:- |\| )\[([^\]]+)\]\(([^)#\s]+)\)", re.MULTILINE)
PICTURE = re.compile(r"<img\b[^>]*\bsrc=\"(?P<src>[^\":]+)\"[^>]*>")
FOREIGN = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>"
)


def site_uri(path: Path) -> str:
    """The source name, relative to docs/, under which a file of the repository is in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    outside = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return outside if path.suffix == ".md" else f"{outside}.md"


def source_of(uri: str) -> Path:
    """The reverse of `site_uri`."""
    if not uri.startswith(f"{OUTSIDE}/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix(f"{OUTSIDE}/")
    return path if path.exists() else path.with_suffix("")


def targets(source: Path, text: str) -> Iterator[tuple[re.Match[str], Path]]:
    """The relative links of a page that lead to something in the repository."""
    for link in LINK.finditer(text):
        path = Path(os.path.normpath(source.parent / link[1]))
        if path.is_relative_to(ROOT) and path.exists():
            yield link, path


def text_of(path: Path) -> str:
    """A file outside docs/ as a page."""
    if path.suffix == ".md":
        return path.read_text()
    title = f"---\nsearch:\n  exclude: true\n---\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(
            f"- [{each.name}]({path.name}/{each.name})\n" for each in sorted(path.iterdir())
        )
    language = path.suffix.removeprefix(".") or "text"
    return f'{title}````{{.{language} linenums="1"}}\n{path.read_text()}````\n'


def navigation() -> list[dict[str, object]]:
    """The pages in the order in which docs/README.md lists them."""

    def listed(text: str) -> list[dict[str, object]]:
        found = [
            (title, site_uri(Path(os.path.normpath(DOCS / link))))
            for title, link in LISTED.findall(text)
        ]
        return [{title: uri} for title, uri in found]

    front = (DOCS / "README.md").read_text()
    sections = [(title, listed(text)) for title, text in SECTION.findall(front)]
    return [{"Home": "README.md"}, *({title: pages} for title, pages in sections if pages)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation()
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    ahead = [source_of(file.src_uri) for file in files.documentation_pages()]
    while ahead:
        source = ahead.pop()
        for _, path in targets(source, text_of(source)):
            uri = site_uri(path)
            if not path.is_relative_to(DOCS) and files.get_file_from_path(uri) is None:
                files.append(
                    File.generated(
                        config, uri, content=text_of(path), inclusion=InclusionLevel.NOT_IN_NAV
                    )
                )
                if path.suffix == ".md" or path.is_dir():
                    ahead.append(path)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = os.path.dirname(page.file.src_uri)
    source = source_of(page.file.src_uri)
    for link, path in reversed(list(targets(source, markdown))):
        place = LINE.sub(r"#__codelineno-0-\1", link[2] or "")
        new = f"]({os.path.relpath(site_uri(path), folder or '.')}{place})"
        markdown = markdown[: link.start()] + new + markdown[link.end() :]
    return markdown


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.present_anchor_ids is not None:  # MkDocs looks for those of headings only
        page.present_anchor_ids.update(ANCHOR.findall(html))
    return PICTURE.sub(
        r'<a class="figure" href="\g<src>" title="Open the picture in full">\g<0></a>', html
    )


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    if found := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")
    return output
