"""What pages say about themselves, and the buttons that lead to the repository: a small book with the real settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import build_book
import pytest
import yaml
from sphinx.errors import ConfigError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOK = {"cells": [], "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}}, "nbformat": 4}
QUESTION = "# A chapter\n\n**Who waits, & for whom?**\n\n*Reading time: a minute.*\n\nA first paragraph.\n"
CLONE = "the repository that these pages come from"


def build(folder: Path, repository: str, **html: str) -> tuple[str, str, str]:
    """Build a book of two pages and one notebook with the course's own settings; returns the HTML of the three.

    `repository` goes into the environment.
    """
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())
    settings["html"] |= html
    settings["execute"] = {"execute_notebooks": "off"}
    del settings["bibtex_bibfiles"], settings["sphinx"]["config"]["bibtex_reference_style"]
    (folder / "notebooks").mkdir(parents=True)
    shutil.copytree(ROOT / "book" / "_ext", folder / "book" / "_ext")
    shutil.copytree(ROOT / "book" / "_static", folder / "book" / "_static", ignore=shutil.ignore_patterns("mathjax"))
    (folder / "_config.yml").write_text(yaml.safe_dump(settings))
    files = {"root": "book/index", "chapters": [{"file": "book/how_to_use"}, {"file": "notebooks/chapter"}]}
    (folder / "_toc.yml").write_text(yaml.safe_dump({"format": "jb-book", **files}))
    (folder / "book" / "index.md").write_text("# Pipeline Parallelism, Measured\n\n" + "Of [pages](how_to_use). " * 30)
    (folder / "book" / "how_to_use.md").write_text(f"# A page\n\n- an item\n\nIts text. Clone {CLONE}.\n")
    cells = [
        {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}
        for name, text in (("a", QUESTION), ("b", "## Exercises\n\nTwo of them."))
    ]
    (folder / "notebooks" / "chapter.ipynb").write_text(json.dumps(NOTEBOOK | {"nbformat_minor": 5, "cells": cells}))
    start = "from jupyter_book.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "build", ".", "-W", "-n", "--keep-going"],
        cwd=folder,
        env={**os.environ, "PPLAB_REPOSITORY": repository, "PYTHONPATH": str(ROOT / "src")},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    made = folder / "_build" / "html"
    index, page, chapter = (made / f"{n}.html" for n in ("book/index", "book/how_to_use", "notebooks/chapter"))
    return index.read_text(), page.read_text(), chapter.read_text()


def tags(page: str) -> dict[str, str]:
    found = re.findall(r'<meta (?:name|property)="((?:og|twitter):[^"]+|description)" content="([^"]*)"', page)
    assert len(dict(found)) == len(found), "a tag twice"
    return {name: unescape(content) for name, content in found}


def outside(page: str) -> list[str]:
    return [unescape(address) for address in re.findall(r'href="(https?://[^"]+)"', page)]


def test_without_an_address_no_button_leads_nowhere(book):
    names = "book/index", "book/gpu", "notebooks/02_naive"
    index, page, chapter = ((book / f"{name}.html").read_text() for name in names)
    for html in (index, page, chapter):
        head = html[: html.index("<article")]
        assert not {"launch-buttons", "source-buttons", "btn-source-edit-button"} & set(re.findall(r"[\w-]+", head))
        assert not [a for a in outside(head) if "git" in a or "binder" in a or "colab" in a]
    assert "btn-download-source-button" in chapter
    seen = tags(chapter)
    assert seen["description"] == seen["og:description"] and seen["description"].endswith("?")
    assert seen["og:title"] == "2. The naive pipeline: send, recv, backward"
    assert seen["og:image"] == "../_static/social_card.png"
    assert "og:url" not in seen and seen["twitter:card"] == "summary_large_image"
    assert "<title>Pipeline Parallelism, Measured</title>" in index
    assert 'alt="Pipeline Parallelism, Measured - Home"' in index
    front = (book / "index.html").read_text()
    assert "url=book/index.html" in front and tags(front) == tags(index) | {"og:image": "_static/social_card.png"}
    card = (book / "_static" / "social_card.png").read_bytes()
    assert card[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", card[16:24]) == (1200, 630)
    assert (seen["og:image:width"], seen["og:image:height"]) == ("1200", "630")


def test_with_an_address_buttons_lead_to_the_files(tmp_path):
    repository = "https://github.com/someone/some.course"
    index, page, chapter = build(tmp_path, f"{repository}.git/", baseurl="https://example.org/book/")
    file = "notebooks/chapter.ipynb"
    colab = f"https://colab.research.google.com/github/someone/some.course/blob/main/{file}"
    binder = f"https://mybinder.org/v2/gh/someone/some.course/main?urlpath=lab/tree/{file}"
    assert {repository, colab, binder, f"{repository}/edit/main/{file}"} <= set(outside(chapter))
    assert f"!git clone {repository} course && pip install -e 'course[plot,run]'" in unescape(chapter)
    assert f"{repository}/edit/main/book/how_to_use.md" in outside(page)
    for html in (index, page, chapter):  # in the head
        assert repository in outside(html[: html.index("<article")])
    assert re.search(rf'href="{repository}"[^>]*>{CLONE}</a>', page)  # and from the words for it
    assert re.search(r'<h2>Exercises.*Answer.*href="../book/how_to_use.html".*Two of them', chapter, re.S)
    for html in (index, page):  # pages without cells have nothing to launch
        assert "launch-buttons" not in html and not [a for a in outside(html) if "binder" in a or "colab" in a]
    assert tags(chapter)["og:image"] == "https://example.org/book/_static/social_card.png"
    assert tags(chapter)["og:url"] == "https://example.org/book/notebooks/chapter.html"
    assert tags(chapter)["description"] == "Who waits, & for whom?" and tags(page)["description"].startswith(
        "Its text. Clone the repository"
    )
    described = tags(index)["description"]
    assert described.startswith("Of pages. Of pages.") and described.endswith("…") and 150 < len(described) <= 200


@pytest.fixture
def link_repository(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book" / "_ext"))
    monkeypatch.delenv("PPLAB_REPOSITORY", raising=False)
    from pplab_page import link_repository

    return link_repository


def test_an_address_in_the_settings(link_repository, tmp_path):
    """That of the package does the same; other hosts get the buttons that work there."""
    (tmp_path / "pyproject.toml").write_text('[project]\nurls.Repository = "https://gitlab.com/a/b"\n')
    options = {"repository_url": ""}
    link_repository(SimpleNamespace(srcdir=tmp_path), SimpleNamespace(html_theme_options=options))
    assert options["repository_url"] == "https://gitlab.com/a/b" and options["use_edit_page_button"]
    assert options["launch_buttons"].keys() == {"notebook_interface", "binderhub_url"}


def test_an_address_of_no_repository_is_refused(link_repository, monkeypatch):
    """Sphinx reads the settings first of all: what is raised there ends every build."""
    monkeypatch.setenv("PPLAB_REPOSITORY", "ftp://x/y")
    with pytest.raises(ConfigError, match="'ftp://x/y'; expected https://HOST/OWNER/NAME"):
        link_repository(SimpleNamespace(srcdir=ROOT), SimpleNamespace(html_theme_options={}))


def test_the_address_has_one_place(link_repository):
    """What jupyter-book's own setting would say could differ from the package's metadata."""
    assert yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"] == ""
    with pytest.raises(ConfigError, match="set urls.Repository in pyproject.toml"):
        link_repository(None, SimpleNamespace(html_theme_options={"repository_url": "https://github.com/a/b"}))


@pytest.mark.parametrize(("address", "warns"), [("https://github.com/a/b", False), ("", True)])
def test_who_builds_the_book_is_told_that_it_leads_nowhere(address, warns, monkeypatch, capsys):
    monkeypatch.setenv("PPLAB_REPOSITORY", address)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert build_book.main() == 0
    said = capsys.readouterr().err
    assert said.count("\n") == warns and warns == said.startswith("== WARNING: NO ADDRESS")


def test_every_page_of_the_book_has_a_preview(book):
    described = {}
    for path in book.rglob("*.html"):
        name = path.relative_to(book)
        if name.parts[0] not in ("book", "notebooks"):
            continue
        seen = tags(path.read_text())
        described[str(name)] = seen["description"]
        assert seen["og:title"] and (path.parent / seen["og:image"]).is_file(), name
    assert described["notebooks/04_1f1b.html"] == "GPipe runs out of memory. Can I keep its speed?"
    assert len(set(described.values())) == len(described), "two pages with one description"
