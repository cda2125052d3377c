"""Links inside the README and the pages of docs/ lead to a file and, where they say so, to a heading of it."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_OTHER_SITE = re.compile(r"[a-z]+:")


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(text: str) -> str:
    """The text without its code, in which nothing is a link or a heading."""
    return _CODE.sub(lambda found: found[0].strip("`") if "](" not in found[0] else "", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The headings as GitHub and MkDocs make anchors of them."""
    return {
        re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in _HEADING.findall(plain(text))
    }


def links(text: str) -> list[str]:
    return [link for link in _LINK.findall(plain(text)) if not _OTHER_SITE.match(link)]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The pages as the site has them."""
    made = hooks()
    return {path: made.whole((DOCS / path).read_text(), path) for path in PAGES}


def test_those_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    there = anchors(text)
    found = links(text)
    assert "#your-nodes" in found
    for link in found:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert path or anchor in there, link


def test_the_readmes_chapters_are_where_the_pages_look_for_them(pages: dict[str, str]) -> None:
    readme = anchors((ROOT / "README.md").read_text())
    for chapter, target in hooks().CHAPTERS.items():
        path, _, anchor = target.partition("#")
        assert chapter.removeprefix("#") in readme
        assert not anchor or anchor in anchors(pages[path])


@pytest.mark.parametrize("path", PAGES)
def test_those_of_a_page(path: str, pages: dict[str, str]) -> None:
    text = pages[path]
    for link in links(text):
        page, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), page)) if page else path
        assert target in pages, (path, link)
        assert not anchor or anchor in anchors(pages[target]), (path, link)
    assert "--8<--" not in text


def test_nobody_is_sent_to_a_title_that_is_no_link(pages: dict[str, str]) -> None:
    everything = "\n".join([(ROOT / "README.md").read_text(), *pages.values()])
    assert re.findall(r'[Ss]ee\s"[^"]*"', everything) == []


def test_every_page_is_in_the_navigation() -> None:
    def paths(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        below = entry.values() if isinstance(entry, dict) else entry
        return [path for each in below for path in paths(each)]

    assert sorted(paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == PAGES
