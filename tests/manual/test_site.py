"""The site of the manual: what MkDocs cannot check by itself. `make check` builds it in strict
mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tools import architecture, front_picture, step_picture, stream_picture

site = pytest.importorskip(
    "tools.manual_site", reason="MkDocs is not installed: the extra `docs` has it"
)


def pages_of(entries: list) -> list[str]:
    found: list[str] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append(entry)
        else:
            for inner in entry.values():
                found += pages_of(inner) if isinstance(inner, list) else [inner]
    return found


def test_the_navigation_has_every_page_once() -> None:
    listed = [uri for uri in pages_of(site.navigation()) if not uri.startswith(site.OUTSIDE)]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("docs/results/gpu.md", "results/gpu.md"),
        ("CONTRIBUTING.md", "repository/CONTRIBUTING.md"),
        ("examples/train.py", "repository/examples/train.py.md"),
        ("configs/cluster", "repository/configs/cluster.md"),
    ],
)
def test_files_of_the_repository_have_a_place(path: str, uri: str) -> None:
    assert site.site_uri(ROOT / path) == uri
    assert site.source_of(uri) == ROOT / path


def test_links_to_files_are_found_and_links_to_hosts_are_not() -> None:
    text = "[a](../examples/train.py) [b](https://x.org/y) [c](#here) [d](gpu.md#tests) `x[0](y)`"
    found = [path for _, path in site.targets(ROOT / "docs" / "README.md", text)]
    assert found == [ROOT / "examples/train.py", ROOT / "docs/gpu.md"]


@pytest.mark.parametrize(
    ("tag", "is_foreign"),
    [
        ('<script src="https://cdn.x.org/a.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.x.org/css">', True),
        ('<img alt="x" src="http://x.org/a.png">', True),
        ('<a href="https://x.org">', False),
        ('<script src="assets/a.js"></script>', False),
    ],
)
def test_what_a_browser_would_load_from_another_host_is_found(tag: str, is_foreign: bool) -> None:
    assert (site.FOREIGN.search(tag) is not None) == is_foreign


def test_pictures_of_steps_are_current() -> None:
    for each in (step_picture, stream_picture):
        assert each.PICTURE.read_text() == each.picture(), "run `make docs`"


@pytest.mark.parametrize(
    "picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name
)
def test_letters_of_pictures_are_large_enough_for_a_telephone(picture: Path) -> None:
    """A window of 420 pixels leaves 390 for a picture; letters of 10 pixels can be read there."""
    text = picture.read_text()
    (width,) = re.findall(r'<svg [^>]*viewBox="0 0 ([\d.]+) ', text)
    sizes = [float(size) for size in re.findall(r"font-size[=:] ?[\"']?([\d.]+)", text)]
    assert min(sizes) * min(1.0, 390 / float(width)) >= 10


def test_the_front_picture_is_current_and_names_nothing_of_the_code() -> None:
    text = front_picture.picture()
    assert front_picture.PICTURE.read_text() == text, "run `make docs`"
    assert f"]({front_picture.PICTURE.name})" in (ROOT / "docs" / "README.md").read_text()
    words = {word for line in re.findall(r">([^<]+)</text>", text) for word in line.split()}
    assert len(words) > 10
    assert not words & set(architecture.folders())
