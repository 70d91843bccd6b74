"""The book's search goes through sections, not pages: their titles, their text, and the words that an `{index}` leads to.

A term of the glossary and a name of the package are sections, too. One script has all of them with their texts, so that
results are quoted also where pages are opened as files; book/_static/pplab_search.js ranks them, on the page that
book/_templates/search.html makes. Sphinx' own index, which knows pages and whole words only, isn't used.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

ASIDE = ("coverage", "sources", "bibliography", "reports", "published")  # they mention what other pages are about
ASIDE_TITLES = ("Exercises", "Further reading")
UNREAD = (nodes.raw, nodes.math_block, nodes.comment, addnodes.toctree)
HEADS = (nodes.title, nodes.term, addnodes.desc_signature)


class Section:
    """What a search can lead to: a section without those in it, a term, or a name of the package."""

    def __init__(self, node: nodes.Element) -> None:
        heads = [child for child in node.children if isinstance(child, HEADS)]
        self.anchor = next(chain(node["ids"], *(head["ids"] for head in heads)))
        self.title = ", ".join(readable(head) for head in heads)
        self.words: list[str] = []
        self.text: list[str] = []


def sections(tree: nodes.document) -> list[Section]:
    """A page's sections, in their order."""
    found: list[Section] = []
    leads: list[tuple[str, str]] = []  # words of the index, and the ids that they lead to
    holds: dict[str, Section] = {}

    def walk(node: nodes.Element, section: Section | None) -> None:
        if isinstance(node, nodes.section | addnodes.desc) or isinstance(node.parent.parent, addnodes.glossary):
            section = Section(node)
            found.append(section)
        is_text = isinstance(node, nodes.TextElement)
        for each in node.findall(nodes.Element) if is_text else [node]:
            holds.update(dict.fromkeys(each["ids"], section))
            if isinstance(each, addnodes.index):
                leads.extend((value, target) for _, value, target, *_ in each["entries"])
        if is_text:
            if not isinstance(node, HEADS):
                section.text.append(readable(node))
        elif not isinstance(node, UNREAD) and not {"cell_output", "tag_hide-input"} & {*node["classes"]}:
            for child in node.children:
                walk(child, section)

    for child in tree.children:
        walk(child, None)
    for word, target in leads:
        if (section := holds.get(target)) and word != section.title:
            section.words.append(word)
    return found


def readable(node: nodes.Element) -> str:
    """A node's text in a line, formulas as far as they are letters."""
    if isinstance(node, addnodes.desc_signature):
        return f"{node['module']}.{node['fullname']}"
    texts = (
        re.sub(r"\\(?:[a-z]+|.)|[{}]", "", text) if isinstance(text.parent, nodes.math) else str(text)
        for text in node.findall(nodes.Text)
        if not isinstance(text.parent, nodes.raw)
    )
    return " ".join("".join(texts).split())


def write(app, exception) -> None:
    """Write all sections' texts where the page of the search finds them."""
    if exception or app.builder.name != "html":
        return
    pages = []
    for docname in sorted(app.env.found_docs):
        numbers = app.env.toc_secnumbers.get(docname, {})
        rank = 0.5 if Path(docname).name in ASIDE else 1.25 if "" in numbers else 1
        found = sections(app.env.get_doctree(docname))
        rows = [
            [
                f"#{section.anchor}" if i else "",
                ".".join(map(str, numbers.get(f"#{section.anchor}" if i else "", ()))),
                section.title,
                rank / 2 if section.title in ASIDE_TITLES else rank,
                " ".join(section.text),
                section.words,
            ]
            for i, section in enumerate(found)
        ]
        pages.append([docname, rows])
    script = f"const pplabSections = {json.dumps(pages, ensure_ascii=False, separators=(',', ':'))};\n"
    Path(app.outdir, "_static/sections.js").write_text(script, encoding="utf-8")
    Path(app.outdir, "searchindex.js").unlink(missing_ok=True)  # of Sphinx' own search


def setup(app) -> dict:
    """Register the extension."""
    app.config.templates_path.append("book/_templates")
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
