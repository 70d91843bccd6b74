"""Show the glossary where its terms are used.

A page carries the definitions of the terms that it links, and pplab_page.js shows them next to the links. Under each
term the glossary lists the pages that use it.
"""

from __future__ import annotations

import json

from docutils import nodes
from pplab_search import readable
from sphinx import addnodes

GLOSSARY = "book/glossary"


def look_up(app, env) -> None:
    """Note each term's definition, and for every page the first section that uses the term."""
    app.term_uses, app.term_texts = {}, {}
    if GLOSSARY not in env.found_docs:
        return
    for item in terms(env.get_doctree(GLOSSARY)):
        app.term_texts[item[0]["ids"][0]] = readable(item[-1])
    for docname in sorted(env.found_docs - {GLOSSARY}, key=lambda name: place(env, name)):
        for link in env.get_doctree(docname).findall(addnodes.pending_xref):
            if link["reftype"] == "term":
                app.term_uses.setdefault(link["reftarget"].lower(), {}).setdefault(docname, section_of(link))


def terms(tree: nodes.document) -> list[nodes.definition_list_item]:
    """The entries of the glossary, each a term and its definition."""
    return [
        item for glossary in tree.findall(addnodes.glossary) for item in glossary.findall(nodes.definition_list_item)
    ]


def place(env, docname: str) -> tuple:
    """The order of pages: chapters by number, then other pages by title."""
    number = env.toc_secnumbers.get(docname, {}).get("", ())
    return not number, number, env.titles[docname].astext()


def section_of(node: nodes.Node) -> str:
    """The address of the section that a node is in, or nothing in the page's own section."""
    while not isinstance(node, nodes.section):
        node = node.parent
    return f"#{node['ids'][0]}" if isinstance(node.parent, nodes.section) else ""


def say_where(app, tree: nodes.document, docname: str) -> None:
    """Add to each of the glossary's entries the pages that use it."""
    if docname != GLOSSARY:
        return
    for item in terms(tree):
        uses = app.term_uses.get(item[0].astext().lower(), {})
        if not uses:
            continue
        said = nodes.paragraph(classes=["pplab-used"])
        numbers = {user: app.env.toc_secnumbers.get(user, {}).get("", ()) for user in uses}
        chapters = sum(map(bool, numbers.values()))
        for i, (user, anchor) in enumerate(uses.items()):
            name = ".".join(map(str, numbers[user])) or app.env.titles[user].astext()
            said += nodes.Text(", " if i else f"In chapter{'s' * (chapters > 1)} " if chapters else "In ")
            address = app.builder.get_relative_uri(GLOSSARY, user) + anchor
            said += nodes.reference("", name, refuri=address, internal=True)
        item[-1] += said


def carry_definitions(app, pagename, templatename, context, doctree) -> None:
    """Give a page the definitions of the terms that it links."""
    if doctree is None:
        return
    links = [link.get("refuri", "") + "#" + link.get("refid", "") for link in doctree.findall(nodes.reference)]
    linked = {part for link in links for part in link.split("#") if part in app.term_texts}
    if linked:
        texts = json.dumps({anchor: app.term_texts[anchor] for anchor in sorted(linked)}, ensure_ascii=False)
        data = texts.replace("<", "\\u003c")
        context["body"] += f'<script type="application/json" id="pplab-terms">{data}</script>\n'


def setup(app) -> dict:
    app.connect("env-check-consistency", look_up)
    app.connect("doctree-resolved", say_where)
    app.connect("html-page-context", carry_definitions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
