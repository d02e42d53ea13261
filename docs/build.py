"""Builds every page of the documentation as HTML, and checks its tables and links: python docs/build.py OUT."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("README.md", "docs/**/*.md", "plugins/*/README.md")
PAGE = '<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n<body>\n{body}</body>\n'


def pages(root: Path = ROOT) -> list[Path]:
    """Every page, relative to the repository."""
    return sorted({path.relative_to(root) for pattern in PATTERNS for path in root.glob(pattern)})


def anchor(title: str) -> str:
    """What a link to a heading says behind its #."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def inner(text: str) -> Iterator[Token]:
    for token in tokens(text):
        yield from token.children or ()


def anchors(text: str) -> set[str]:
    found = tokens(text)
    return {anchor(after.content) for token, after in pairwise(found) if token.type == "heading_open"}


def links(text: str) -> list[str]:
    return [str(token.attrs["href"]) for token in inner(text) if token.type == "link_open"]


def faults(root: Path = ROOT) -> list[str]:
    """Links that lead nowhere, tables that don't render, and pages that nothing leads to from the README."""
    found, reached = [], {Path("README.md")}
    known = pages(root)
    for page in known:
        text = (root / page).read_text(encoding="utf-8")
        for link in links(text):
            target, _, heading = link.partition("#")
            if "://" in link:
                continue
            path = (root / page).parent / target if target else root / page
            if not path.exists():
                found.append(f"{page}: {link} leads nowhere")
                continue
            reached.add(path.resolve().relative_to(root.resolve()))
            if heading and heading not in anchors(path.read_text(encoding="utf-8")):
                found.append(f"{page}: {link}: no such heading")
        written = len(re.findall(r"(?m)^\|(?=.*-)[-:| ]+\|$", re.sub(r"(?ms)^```.*?^```$", "", text)))
        rendered = sum(token.type == "table_open" for token in tokens(text))
        if written != rendered:
            found.append(f"{page}: {written} tables are written, {rendered} render")
        if text.count("\n```") % 2:
            found.append(f"{page}: a code block isn't closed")
    return found + [f"{page}: no page leads to it" for page in known if page not in reached and page.parts[0] == "docs"]


def build(out: Path, root: Path = ROOT) -> list[Path]:
    """Writes the pages below `out`; links between them lead from one to the other."""
    written = []
    for page in pages(root):
        text = (root / page).read_text(encoding="utf-8")
        body = MarkdownIt("commonmark").enable("table").render(text)
        body = re.sub(r'href="(?!\w+://)([^"#]+)\.md', r'href="\1.html', body)
        body = re.sub(r"<h(\d)>(.*?)</h\d>", lambda m: f'<h{m[1]} id="{anchor(re.sub("<.*?>", "", m[2]))}">{m[2]}</h{m[1]}>', body)
        path = (out / page).with_suffix(".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PAGE.format(title=text.splitlines()[0].lstrip("# "), body=body), encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    wrong = faults()
    print("\n".join([*wrong, f"{len(build(Path(sys.argv[1])))} pages in {sys.argv[1]}"]))
    sys.exit(1 if wrong else 0)
