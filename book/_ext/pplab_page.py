"""Information about a page and its source: tags for previews, launch and edit buttons.

The repository's address is a single setting: the environment variable PPLAB_REPOSITORY (empty: none) or, without it,
`urls.Repository` in pyproject.toml. Without an address, a page has no button and no link that leads nowhere.
"""

from __future__ import annotations

import os
import re
import tomllib
from html import escape
from itertools import cycle
from pathlib import Path

from docutils import nodes
from sphinx.errors import ConfigError

HOSTS = ("github.com", "gitlab.com", "bitbucket.org")  # that the theme can make addresses for
CARD = "_static/social_card.png"
CARD_SIZE = (1200, 630)
CARD_ALT = "The 1F1B schedule on four ranks: forwards in blue, backwards in orange, idle time hatched"
SOURCE = "the repository that these pages come from"  # in a page, these words lead there
TABLE = re.compile(  # that the package writes
    r'<div class="pplab-table"(?P<head>[^>]*><table class="table"><thead>.*?</thead>)(?P<body>.*?</table>)', re.S
)
CARDS_FROM = 5  # columns: a phone has no room for so many
LONGEST = 200  # characters of a description; previews cut what is longer


def address_in(folder: Path) -> str:
    """The repository's address as it is set for the book in a folder, or nothing."""
    if (told := os.environ.get("PPLAB_REPOSITORY")) is not None:
        return told.strip()
    settings = folder / "pyproject.toml"
    project = tomllib.loads(settings.read_text())["project"] if settings.exists() else {}
    return project.get("urls", {}).get("Repository", "")


def link_repository(app, config) -> None:
    """Turn on the buttons that need the repository's address, where it is set.

    Raises ConfigError for an address that isn't one of a repository.
    """
    options = config.html_theme_options
    if options.get("repository_url"):
        raise ConfigError("repository: url in _config.yml stays empty: set urls.Repository in pyproject.toml")
    if not (address := address_in(Path(app.srcdir))):
        return
    host, owner, name = repository_parts(address)
    options["repository_url"] = f"https://{host}/{owner}/{name}"
    # The theme takes main for its edit button and master for its launch buttons when none is set.
    options["repository_branch"] = options.get("repository_branch") or "main"
    options.update(use_repository_button=True, use_edit_page_button=True, use_issues_button=host != "bitbucket.org")
    launch = {"notebook_interface": "jupyterlab", **options.get("launch_buttons", {})}
    launch["binderhub_url"] = "https://mybinder.org"
    if host == "github.com":  # Colab opens notebooks from there only
        launch["colab_url"] = "https://colab.research.google.com"
    options["launch_buttons"] = launch


def repository_parts(address: str) -> tuple[str, str, str]:
    """Host, owner and name of a repository's address. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(?:https?://)?([\w.-]+)/([\w./-]+)/([\w.-]+?)(?:\.git)?/?", address)
    if not found or found[1] not in HOSTS:
        raise ConfigError(
            f"the repository's address is {address!r}; expected https://HOST/OWNER/NAME with one of the hosts "
            f"{', '.join(HOSTS)}: set PPLAB_REPOSITORY, or urls.Repository in pyproject.toml, or neither"
        )
    return found[1], found[2], found[3]


def link_source(app, docname: str, source: list[str]) -> None:
    """Turn the words "the repository that these pages come from" into a link, where its address is set."""
    if address := app.config.html_theme_options.get("repository_url"):
        source[0] = source[0].replace(SOURCE, f"[{SOURCE}]({address})")


def fit_launch_buttons(app, pagename, templatename, context, doctree) -> None:
    """Keep the launch buttons on notebooks only, and put on Colab's what a fresh machine there lacks."""
    buttons = context.get("header_buttons", [])
    if not str(app.env.doc2path(pagename, base=False)).endswith(".ipynb"):
        context["header_buttons"] = [button for button in buttons if button.get("label") != "launch-buttons"]
        return
    address = app.config.html_theme_options.get("repository_url")
    for group in buttons:
        for button in group.get("buttons", []):
            if button.get("text") == "Colab":
                install = f"!git clone {address} course && pip install -e 'course[plot,run]'"
                button["tooltip"] = f"Open in Colab; first run there, and restart: {install}"


def name_logo(app, config) -> None:
    """Set the logo's alternative text, which the theme would make from a title that the first page leaves out."""
    if config.html_theme == "sphinx_book_theme":  # others may not know the option, and warn of it
        config.html_theme_options.setdefault("logo", {}).setdefault("alt_text", f"{config.html_title} - Home")


def describe_page(app, pagename, templatename, context, doctree) -> None:
    """Add the tags from which search engines and messengers make a preview."""
    if pagename == app.config.root_doc:
        context["docstitle"] = ""  # the book's title is already the page's
    title = re.sub(r"<[^>]*>", "", str(context.get("title") or escape(app.config.html_title)))
    text = description(doctree) if doctree is not None else ""
    lines = preview(app, pagename, title, text, context["pathto"](CARD, 1))
    context["metatags"] = context.get("metatags", "") + "\n    " + "\n    ".join(lines) + "\n"


def preview(app, pagename: str, title: str, text: str, card: str) -> list[str]:
    """A preview's tags, for a `title` in HTML, a plain `text` or none, and the picture's address seen from the page.

    Addresses are absolute where `html_baseurl` or a GitHub repository is set, otherwise relative to the page.
    """
    base = (app.config.html_baseurl or "").rstrip("/")
    tags = {"og:type": "article", "og:site_name": escape(app.config.html_title), "og:title": title}
    if text:
        tags |= {"description": escape(text), "og:description": escape(text)}
    if base:
        tags["og:url"] = f"{base}/{pagename}.html"
    tags |= {
        "og:image": f"{base}/{CARD}" if base else raw_address(app, f"book/{CARD}") or card,
        "og:image:width": CARD_SIZE[0],
        "og:image:height": CARD_SIZE[1],
        "og:image:alt": CARD_ALT,
        "twitter:card": "summary_large_image",
    }
    return [
        f'<meta {"property" if name.startswith("og:") else "name"}="{name}" content="{value}"/>'
        for name, value in tags.items()
    ]


def describe_front(app, exception) -> None:
    """Give the file that leads on to the first page the preview of that page, because it is the address that people
    share."""
    front = Path(app.outdir) / "index.html"
    if exception or app.builder.name != "html" or app.config.root_doc == "index" or not front.exists():
        return
    root = app.config.root_doc
    title = app.config.html_title
    lines = preview(app, root, escape(title), description(app.env.get_doctree(root)), CARD)
    front.write_text(
        "\n".join(
            [
                '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
                f"<title>{escape(title)}</title>",
                *lines,
                f'<meta http-equiv="refresh" content="0; url={root}.html"/>\n</head>',
                f'<body><a href="{root}.html">{escape(title)}</a></body>\n</html>\n',
            ]
        ),
        encoding="utf-8",
    )


def raw_address(app, path: str) -> str:
    """The address from which a file of the repository can be fetched, or nothing where that isn't known."""
    options = app.config.html_theme_options
    if not (options.get("repository_url") or "").startswith("https://github.com/"):
        return ""
    _, owner, name = repository_parts(options["repository_url"])
    return f"https://raw.githubusercontent.com/{owner}/{name}/{options['repository_branch']}/{path}"


def description(doctree: nodes.document) -> str:
    """The page's question, or its first paragraph, in at most LONGEST characters."""
    questions = [box for box in doctree.findall(nodes.container) if "question" in box["classes"]]
    paragraphs = questions or [p for p in doctree.findall(nodes.paragraph) if not isinstance(p.parent, nodes.list_item)]
    text = " ".join(paragraphs[0].astext().split()) if paragraphs else ""
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 1].rpartition(" ")[0].rstrip(",;:") + "…"


def name_cells(app, doctree: nodes.document) -> None:
    """On a phone, turn a row of the ledger into a card, whose cells have to name their column."""
    for node in [*doctree.findall(nodes.raw)]:
        if (told := node.astext()) != (named := TABLE.sub(as_cards, told)):
            node.replace_self(nodes.raw("", named, **{**node.attributes}))


def as_cards(table: re.Match) -> str:
    """The table with each cell's column in its `data-of`, or as it is where a phone has room for its columns."""
    names = [" ".join(re.sub("<[^>]*>", " ", name).split()) for name in re.findall("<th>(.*?)</th>", table["head"])]
    if len(names) < CARDS_FROM:
        return table[0]
    columns = cycle(names)
    body = re.sub("<td", lambda cell: f'{cell[0]} data-of="{next(columns)}"', table["body"])
    return f'<div class="pplab-table pplab-cards" tabindex="0"{table["head"]}{body}'


def keep_together(app, doctree: nodes.document) -> None:
    """Keep a formula and what touches it ("V-th", "P - 1.") on one line: a browser may break lines at a formula."""
    for formula in [*doctree.findall(nodes.math)]:
        line, before, after = formula.parent, "", ""
        at = last = line.index(formula)
        if at and isinstance(line[at - 1], nodes.Text):
            at, before = at - 1, line[at - 1].astext()
        if last + 1 < len(line) and isinstance(line[last + 1], nodes.Text):
            last, after = last + 1, line[last + 1].astext()
        begins, ends = re.search(r"\S*$", before).start(), re.match(r"\S*", after).end()
        word = [nodes.Text(before[begins:]), formula, nodes.Text(after[:ends])]
        line[at : last + 1] = [
            nodes.Text(before[:begins]),
            nodes.inline("", "", *word, classes=["pplab-word"]),
            nodes.Text(after[ends:]),
        ]


def speak_plainly(app, pagename, templatename, context, doctree) -> None:
    """Remove what a screen reader would say instead of a fold's own words, and roles that are no longer valid."""
    for said in (' aria-label="Toggle hidden content"', ' role="doc-biblioentry"', ' role="list"'):
        context["body"] = context.get("body", "").replace(said, "")


def load_playhead(app, pagename, templatename, context, doctree) -> None:
    """Load the script that plays charts of time on a page that has some."""
    if 'class="pplab-figure"' in context.get("body", ""):
        for script in ("explorer/clock.js", "playhead.js"):
            app.add_js_file(script, loading_method="defer")


def setup(app) -> dict:
    app.connect("config-inited", link_repository)
    app.connect("config-inited", name_logo)
    app.connect("doctree-read", name_cells)
    app.connect("doctree-read", keep_together)
    app.connect("source-read", link_source, priority=900)  # after pplab_notebooks has written some of it
    app.connect("html-page-context", fit_launch_buttons, priority=800)  # after the theme has made them
    app.connect("html-page-context", describe_page)
    app.connect("html-page-context", speak_plainly)
    app.connect("html-page-context", load_playhead, priority=800)  # after the explorer, whose scripts come first
    app.connect("build-finished", describe_front, priority=900)  # after sphinx-external-toc has written it
    app.add_js_file("pplab_page.js")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
