"""The book builds without a warning, and its pages need nothing from elsewhere."""

from __future__ import annotations

import gzip
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(book) -> dict[str, str]:
    made = (path.relative_to(book) for path in book.rglob("*.html"))
    return {str(path): (book / path).read_text() for path in made if path.parts[0] != "_static"}


class Loaded(HTMLParser):
    """What a page loads by itself, and its images."""

    def __init__(self, page: str):
        super().__init__()
        self.addresses: list[str] = []
        self.images: list[dict] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        found = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "video") and "src" in found:
            self.addresses.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "shortcut icon"):
            self.addresses.append(found["href"])
        if tag == "img":
            self.images.append(found)
        self.ids += filter(None, [found.get("id")])


@pytest.fixture(scope="module")
def loads(pages) -> dict[str, Loaded]:
    return {name: Loaded(page) for name, page in pages.items()}


def test_every_page_is_there(pages):
    toc = (ROOT / "_toc.yml").read_text()
    files = re.findall(r"(?:file|root): (\S+)", toc)
    assert len(files) >= 10
    assert {f"{name}.html" for name in files} | {"index.html", "search.html"} <= pages.keys()
    assert not any(name.startswith(("README", "CONTRIBUTING", ".")) for name in pages)


def test_pages_load_nothing_from_elsewhere(pages, loads):
    for name, page in pages.items():
        away = [a for a in loads[name].addresses if re.match(r"(https?:)?//", a)]
        assert not away, (name, away)
        assert "THEBE" not in page
    assert 'src="../_static/mathjax/es5/startup.js' in pages["notebooks/01_bubble_math.html"]


def test_what_pages_load_is_in_the_book(loads, book):
    for name, loaded in loads.items():
        for address in loaded.addresses:
            assert ((book / name).parent / address.partition("?")[0]).exists(), (name, address)


MOST_BYTES, MOST_ZIPPED, MOST_HTML = 2_700_000, 650_000, 800_000
LETTERS = (
    "Main-Regular",
    "Math-Italic",
    "Size1-Regular",
    "Size2-Regular",
    "Size3-Regular",
    "Size4-Regular",
    "AMS-Regular",
)
PACKED = (".woff", ".woff2", ".png", ".zip")  # what a server doesn't compress once more


@cache
def weight(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    return len(content), len(content if path.suffix in PACKED else gzip.compress(content, 6))


def test_pages_are_light(loads, book):
    """All that a page asks for before a reader does anything. MathJax loads its parts and its letters by itself: all of
    its scripts, and of the letters those that formulas here are set in."""
    mathjax = book / "_static" / "mathjax" / "es5"
    letters = [f"output/chtml/fonts/woff-v2/MathJax_{name}.woff" for name in LETTERS]
    by_itself = [*mathjax.rglob("*.js"), *(mathjax / name for name in letters)]
    for name, loaded in loads.items():
        files = {(book / name).parent / address.partition("?")[0] for address in loaded.addresses} | {book / name}
        files = {path.resolve() for path in files}
        if any("mathjax" in str(path) for path in files):
            files.update(path.resolve() for path in by_itself)
        heavy = sorted(((*weight(path), path.name) for path in files), reverse=True)
        assert sum(size for size, *_ in heavy) <= MOST_BYTES, (name, heavy[:9])
        assert sum(zipped for _, zipped, _ in heavy) <= MOST_ZIPPED, (name, heavy[:9])
        assert weight(book / name)[0] <= MOST_HTML, (name, weight(book / name))


def test_no_id_stands_twice(loads):
    for name, loaded in loads.items():
        twice = {each for each in loaded.ids if loaded.ids.count(each) > 1}
        assert not twice, (name, sorted(twice)[:9])


def test_every_picture_is_described(pages, loads):
    for name, page in pages.items():
        for image in loads[name].images:
            assert image.get("alt"), (name, image)
        for svg in re.findall(r"<svg[^>]*>", page):
            assert 'aria-label="' in svg or 'aria-hidden="true"' in svg, (name, svg)


def test_chapters_show_what_they_computed(pages):
    page = pages["notebooks/04_1f1b.html"]
    assert "1F1B, simulated: makespan 33" in page and "pipe_1f1b, measured: makespan" in page
    assert "deadlock" in page and "not answered" in page
    assert "Traceback" not in page
