"""What the page makes of the notebooks beyond what any viewer shows: charts in its own colours, and what MyST adds.

The notebooks are plain Markdown, which JupyterLab, VS Code and code hosts show as it is meant. Here it becomes MyST:

    # Title, **a question**, *Reading time: ...*    the head of a chapter, as three paragraphs
    [ranks](../book/glossary.md "rank")             {term}`ranks <rank>`; without a title the words are the term
    [[Words](../book/references.bib "key")]         {cite}`key`
    $$ ... \\tag{name} $$ and $(\\text{name})$        a labelled equation, and {eq}`name`
    <details class="note"><summary>Words</summary>  a folded admonition
    ## Exercises                                    and below it, where one can answer them
    a cell tagged `explorer`                        the explorer with the settings of its call of `explore`, or the
                                                    level of the game that it gives to `play`; elsewhere it is a
                                                    frame with that, where the notebook is trusted (see frames.py
                                                    of pplab_course)
    <span>\\$</span>321                             a price: between two bare `\\$` JupyterLab sees a formula
    a text tagged `elsewhere`                       nothing: it says what others than the page show in its place
    cells tagged `answer`, and a text in            one fold around them all: the answer of a guess
    <details class="answer"><summary>...
    a cell with `hide-input` that only checks       a quiet line, "checked", which opens
    a cell's metadata {"figure": {"title": ...}}    below its figure "Figure 4.3", the title, a `caption`

What the page hides by a tag, JupyterLab folds by metadata, which tools/execute_notebooks.py sets from the tags.
Charts keep their page's form under a type of their own (see pplab_course.figures).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import PurePosixPath

from docutils import nodes
from myst_nb.core import render

PAGE = "application/vnd.pplab.page+html"
HEAD = (
    (re.compile(r"\A(# .+\n\n)\*\*(.+(?:\n.+)*)\*\*\n"), r"\1:::{div} question\n\2\n:::\n"),
    (re.compile(r"^\*(Reading time: .+(?:\n.+)*)\*$", re.M), r":::{div} meta\n\1\n:::"),
)
SHOW = "Show the answer"
ANSWER = re.compile(rf'<details class="answer"><summary>{SHOW}</summary>\n\n(.*)\n\n</details>\s*', re.S)
ANSWERS = """
**Answer** opens an editor, and **Check** judges what you wrote, here in the page ({doc}`/book/how_to_use`).

<p class="live-tally"></p>
"""
ANYWHERE = (
    (re.compile(r"^(## Exercises)$\n?", re.M), rf"\1\n{ANSWERS}"),
    (re.compile(r'\[([^][]+)\]\(\.\./book/glossary\.md "([^"]+)"\)'), r"{term}`\1 <\2>`"),
    (re.compile(r"\[([^][]+)\]\(\.\./book/glossary\.md\)"), r"{term}`\1`"),
    (re.compile(r'\[\[[^][]+\]\(\.\./book/references\.bib "([\w,]+)"\)\]'), r"{cite}`\1`"),
    (re.compile(r" ?\\tag\{([\w-]+)\}\n\$\$"), r"\n$$ (\1)"),
    (re.compile(r"\$\(\\text\{([\w-]+)\}\)\$"), r"{eq}`\1`"),
    (re.compile(r"<span>(\\\$)</span>"), r"\1"),
    (
        re.compile(r'<details class="note"><summary>(.+?)</summary>\n\n(.*?)\n\n</details>', re.S),
        r":::{admonition} \1\n:class: note dropdown\n\2\n:::",
    ),
)


def read(app, docname: str, source: list[str]) -> None:
    """Rewrite a notebook's text when it is read."""
    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        return
    notebook = json.loads(source[0])
    number_figures(notebook["cells"], PurePosixPath(docname).name.partition("_")[0].lstrip("0"))
    notebook["cells"] = list(fold_answers(made for cell in notebook["cells"] for made in on_the_page(cell)))
    source[0] = json.dumps(notebook)


def on_the_page(cell: dict) -> Iterator[dict]:
    """The cell for the page: Markdown as MyST, nothing for a text that is for other viewers, and an explorer or a level
    of the game before the cell that shows it elsewhere."""
    text, tags = "".join(cell["source"]), cell["metadata"].get("tags", ())
    if "elsewhere" in tags:
        return
    if cell.get("outputs"):  # elsewhere a fold shows its first line: one that doesn't tell
        cell = cell | {"outputs": [each for each in cell["outputs"] if each.get("metadata", {}) != {"pplab": "folded"}]}
    if cell["cell_type"] == "markdown":
        cell = cell | {"source": myst(text)}
    elif "explorer" in tags:
        shown = {"tags": ["answer"] if "answer" in tags else []}
        view = directive(text)
        if figure := cell["metadata"].get("figure"):
            link = f'<a href="#{anchor_of(figure)}" title="Link to this figure">Figure {figure["number"]}</a>'
            told = f'<p class="pplab-caption">{link} <strong>{curly(figure["title"])}</strong></p>'
            view = f'<span id="{anchor_of(figure)}"></span>\n\n{view}\n\n{told}'
        yield {"cell_type": "markdown", "id": f"{cell['id']}-page", "metadata": shown, "source": view}
        cell = cell | {"metadata": {"tags": [*tags, "remove-cell"]}}
    elif "hide-input" in tags and only_checks(cell):
        said = {"code_prompt_show": "checked ✓", "code_prompt_hide": "checked ✓"}
        shown = ["check", "hide-cell", *(tag for tag in tags if tag != "hide-input")]
        cell = cell | {"metadata": cell["metadata"] | {"tags": shown, "mystnb": said}}
    yield cell


def only_checks(cell: dict) -> bool:
    """Whether a cell only asserts, and prints no more than that it did."""
    if any(output["output_type"] != "stream" for output in cell["outputs"]):
        return False
    said = "".join("".join(output["text"]) for output in cell["outputs"])
    return "assert " in "".join(cell["source"]) and (not said or said.startswith("checked"))


def number_figures(cells: Iterable[dict], chapter: str) -> None:
    """Note in the metadata of each cell with a figure its number in the chapter. An explorer is a figure if it has a
    title."""
    drawn = (cell for cell in cells if any(PAGE in output.get("data", ()) for output in cell.get("outputs", ())))
    shown = (cell["metadata"] for cell in drawn)
    figures = (each for each in shown if "explorer" not in each.get("tags", ()) or "figure" in each)
    for number, metadata in enumerate(figures, 1):
        metadata["figure"] = metadata.get("figure", {}) | {"number": f"{chapter}.{number}"}


def anchor_of(figure: dict[str, str]) -> str:
    return f"fig-{figure['number'].replace('.', '-')}"


def curly(text: str) -> str:
    """The text with the apostrophes that the page's other texts have."""
    return text.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}")


def fold_answers(cells: Iterable[dict]) -> Iterator[dict]:
    """The cells, where each run of those that answer a guess is inside one fold."""
    for is_answer, run in groupby(cells, lambda cell: bool(answered(cell))):
        inside = [*run]
        if not is_answer:
            yield from inside
            continue
        end = {"cell_type": "markdown", "metadata": {}}
        name = inside[0]["id"]
        yield end | {"id": f"{name}-opens", "source": f'<details class="answer"><summary>{SHOW}</summary>'}
        yield from (cell | {"source": answered(cell)} for cell in inside)
        yield end | {"id": f"{name}-closes", "source": "</details>"}


def answered(cell: dict) -> str:
    """The words of a cell that is, or belongs to, the answer of a guess."""
    said = "".join(cell["source"])
    found = ANSWER.fullmatch(said) if cell["cell_type"] == "markdown" else None
    return found[1] if found else said * ("answer" in cell["metadata"].get("tags", ()))


def caption_figures(app, doctree: nodes.document) -> None:
    """Give each figure an anchor, and put below it its number, which links there, and its title."""
    for node in [*doctree.findall(nodes.container)]:
        if node.get("nb_element") != "cell_code" or not (told := node["cell_metadata"].get("figure")):
            continue
        node.children[-1]["ids"].append(anchor_of(told))
        link = nodes.reference("", f"Figure {told['number']}", refid=anchor_of(told), reftitle="Link to this figure")
        caption = nodes.paragraph("", "", link, classes=["pplab-caption"])
        if title := told.get("title"):
            caption += [nodes.Text(" "), nodes.strong("", curly(title))]
        if more := told.get("caption"):
            caption += nodes.Text(f" {curly(more)}")
        node += caption


def myst(text: str) -> str:
    """A Markdown cell's text with the roles and directives that its Markdown means."""
    if text.startswith("# "):
        for pattern, made in HEAD:
            text = pattern.sub(made, text)
    for pattern, made in ANYWHERE:
        text = pattern.sub(made, text)
    return text


def directive(code: str) -> str:
    """The explorer with the settings of `explore(...)`, or the level of `play(...)`, which is at the end of the
    code."""
    call = ast.parse(code).body[-1].value
    name, places = {"explore": ("explorer", ("schedule", "compare")), "play": ("play", ("level",))}[call.func.id]
    given = dict(zip(places, call.args, strict=False)) | {key.arg: key.value for key in call.keywords}
    options = {name.replace("_", "-"): str(ast.literal_eval(value)) for name, value in given.items()}
    flags = {"True": "true", "False": "false"}
    return "\n".join(
        [f"```{{{name}}}", *(f":{name}: {flags.get(said, said)}" for name, said in options.items()), "```"]
    )


class Charts:
    """A plugin of myst-nb that renders the page's form of a chart, and prefers it in HTML."""

    mime_priority_overrides = (("html", PAGE, 1),)

    @staticmethod
    def handle_mime(renderer, data, inline: bool) -> list[nodes.Element] | None:
        """The chart as it was made, where there is one."""
        if data.mime_type != PAGE:
            return None
        return [nodes.raw(text=data.string, format="html", classes=["output", "text_html"])]


def setup(app) -> dict:
    """Register everything. myst-nb finds plugins among installed packages only, and the book's extensions aren't
    installed."""
    installed = render.load_mime_renders
    render.load_mime_renders = lambda: [Charts, *installed()]
    app.connect("source-read", read)
    app.connect("doctree-read", caption_figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
