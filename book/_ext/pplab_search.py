"""The book's search goes through sections instead of pages: titles, texts, and the words that an `{index}` leads to.

A section lists the questions that it answers, in the words of people who ask, in a comment in its own file, which may
be a notebook: `<!-- asked: uneven pipeline, layers not divisible -->`.

A term of the glossary and a name of the package are sections, too. One script has all of them with their texts, so
results can be quoted even where pages are opened as files. book/_static/pplab_search.js ranks them, on the page that
book/_templates/search.html makes. Sphinx' own index isn't used, because it only knows pages and whole words.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

# They mention what other pages are about; and who types one word wants its chapter rather than a question with it.
WORTH = dict.fromkeys(("api", "coverage", "sources", "bibliography", "reports", "published"), 0.5) | {"questions": 0.75}
AT_THE_END = ("Exercises", "Further reading")  # these mention it, too
ASKED = re.compile(r"<!-- asked: (.+?) -->")  # in a section's file: words of those whom it answers
UNREAD = (nodes.raw, nodes.math_block, nodes.comment, nodes.topic, addnodes.toctree)  # a topic: a page's contents
HIDDEN = {"cell_output", "tag_hide-input", "tag_check"}  # classes of what cells printed, and of code that is folded
HEADS = (nodes.title, nodes.term, addnodes.desc_signature)


class Section:
    """A target of the search: a section without those inside it, a term, or a name of the package."""

    def __init__(self, node: nodes.Element) -> None:
        heads = [child for child in node.children if isinstance(child, HEADS)]
        self.anchor = next(chain(node["ids"], *(head["ids"] for head in heads)))
        self.title = ", ".join(readable(head) for head in heads)
        self.words: list[str] = []
        self.text: list[str] = []


def sections(tree: nodes.document) -> list[Section]:
    """The sections of a page, in their order."""
    found: list[Section] = []
    leads: list[tuple[str, str]] = []  # words of the index, and the ids that they lead to
    holds: dict[str, Section] = {}

    def walk(node: nodes.Element, section: Section | None) -> None:
        if isinstance(node, nodes.section | addnodes.desc) or isinstance(node.parent.parent, addnodes.glossary):
            section = Section(node)
            found.append(section)
        if isinstance(node, nodes.raw) and (asked := ASKED.search(node.astext())):
            section.words += asked[1].split(", ")
        if isinstance(node, UNREAD) or HIDDEN & {*node["classes"]}:
            return
        is_text = isinstance(node, nodes.TextElement)
        for each in node.findall(nodes.Element) if is_text else [node]:
            holds.update(dict.fromkeys(each["ids"], section))
            if isinstance(each, addnodes.index):
                leads.extend((value, target) for _, value, target, *_ in each["entries"])
        if not is_text:
            for child in node.children:
                walk(child, section)
        elif not isinstance(node, HEADS):
            section.text.append(readable(node))

    for child in tree.children:
        walk(child, None)
    for word, target in leads:
        if (section := holds.get(target)) and word != section.title:
            section.words.append(word)
    return found


def readable(node: nodes.Element) -> str:
    """The text of a node in one line, with formulas as far as they are letters."""
    if isinstance(node, addnodes.desc_signature):
        return f"{node['module']}.{node['fullname']}"
    texts = (
        letters(text) if isinstance(text.parent, nodes.math) else text
        for text in node.findall(nodes.Text)
        if not isinstance(text.parent, nodes.raw)
    )
    return " ".join("".join(texts).split())


def letters(formula: str) -> str:
    """A formula in TeX without its commands."""
    return re.sub(r"\\(?:[a-z]+|.)|[{}]", "", formula.replace(r"\cdot", "·"))


def write(app, exception) -> None:
    """Write all sections' texts where the page of the search finds them."""
    if exception or app.builder.name != "html":
        return
    pages = []
    for docname in sorted(app.env.found_docs):
        numbers = app.env.toc_secnumbers.get(docname, {})
        worth = 1.25 if "" in numbers else WORTH.get(Path(docname).name, 1)
        rows = []
        for section in sections(app.env.get_doctree(docname)):
            anchor = f"#{section.anchor}" if rows else ""
            number = ".".join(map(str, numbers.get(anchor, ())))
            rank = worth / 2 if section.title in AT_THE_END else worth
            rows.append([anchor, number, section.title, rank, " ".join(section.text), section.words])
        pages.append([docname, rows])
    script = f"const pplabSections = {json.dumps(pages, ensure_ascii=False, separators=(',', ':'))};\n"
    Path(app.outdir, "_static/sections.js").write_text(script, encoding="utf-8")
    Path(app.outdir, "searchindex.js").unlink(missing_ok=True)  # of Sphinx' own search


def setup(app) -> dict:
    app.config.templates_path.append("book/_templates")
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
