"""Documentation that cannot rot unseen: links that resolve, pictures that parse, words that the project uses."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.MULTILINE)
BANNED = re.compile(
    r"\b(off-?load\w*|on-?board\w*|swap\w*|serde\w*|tier[ -]?[0-9]|L[1-4] (?:tier|cache)|G[1-4] tier)\b", re.IGNORECASE
)


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    found = set()
    for heading in HEADING.findall(page.read_text(encoding="utf-8")):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One head\n[a](gone.md) [b](#one-head) [c](#two) [d](https://example.org/x) ![e](page.md#one-head)\n"
    )
    assert broken_links(page) == ["gone.md", "#two"]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_words_that_the_project_does_not_use(page: Path) -> None:
    assert [found.group() for found in BANNED.finditer(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("text", ["offloading", "Swapped out", "tier 2", "an L2 cache", "onboard", "serde"])
def test_a_banned_word_is_found(text: str) -> None:
    assert BANNED.search(text)


def test_every_decision_is_listed() -> None:
    listed = LINK.findall((ROOT / "docs/adr/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs/adr").glob("0*.md"))


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/**/*.svg")), ids=names)
def test_pictures_parse_and_describe_themselves(picture: Path) -> None:
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert root.tag == f"{svg}svg"
    assert root.findtext(f"{svg}title")
    assert root.findtext(f"{svg}desc")
    assert "prefers-color-scheme: dark" in (root.findtext(f"{svg}style") or "")
