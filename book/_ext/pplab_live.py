"""Cells that run in their page. They are marked by their notebook's ids, and what they need is in _static/live.

On a page in Markdown these are the cells tagged `live`. Each of them runs alone, and its id is made from its text.

Before its reader asks, a page loads only page.js and live.css. Then it loads the sources of the chapter's cells
(CHAPTER.js), Python with the package of this commit, in pieces (python-N.js), and the editor (editor.js). All of these
are scripts, since a page opened as a file can load nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docutils import nodes
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.errors import ExtensionError

LIVE = Path(__file__).parents[1] / "_live"
ROOT = LIVE.parents[1]
PINNED = LIVE / "pinned.zip"  # Python, its library and the editor: tools/pin_python.py makes it
IN_THE_WORKER = ("pyodide.asm.js", "pyodide.js", "pyodide.asm.wasm", "stdlib.zip", "pyodide-lock.json")
PIECE = 1 << 20  # characters of a script
ASKS = re.compile(r"^exercise\.\w+\([^)]*\.\.\.", re.M)  # an exercise with the dots that the answer replaces
NOT_PACKED = {"sample", "play"}  # data that need torch; the game, which has a page
HIDDEN = {"remove-cell", "explorer", "elsewhere"}
_WHEN = (1980, 1, 1, 0, 0, 0)  # of every file in an archive, so that the same files are the same bytes


@cache
def needs() -> dict[str, dict[str, str]]:
    """What the page lacks, by chapter and cell, as tests/pages/test_live.py writes it."""
    return json.loads((LIVE / "needs.json").read_text())


def mark(app, docname: str, source: list[str]) -> None:
    """Note each code cell's id in the page's doctree."""
    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and not HIDDEN & set(cell["metadata"].get("tags", ())):
            cell["metadata"]["live"] = {"id": cell["id"], "asks": bool(ASKS.search("".join(cell["source"])))}
    source[0] = json.dumps(notebook)


def dress(app, doctree: nodes.document) -> None:
    """Give the marked cells an id and classes, by which page.js finds them."""
    for node in doctree.findall(nodes.container):
        if node.get("nb_element") != "cell_code":
            continue
        told = node["cell_metadata"].get("live")
        if "live" in node["cell_metadata"].get("tags", ()):
            told = {"id": named(next(node.findall(nodes.literal_block)).astext()), "asks": False}
        if told:
            node["ids"].append(f"cell-{told['id']}")
            node["classes"] += ["live", *["live-asks"] * told["asks"]]
            if what := needs().get(Path(app.env.docname).name, {}).get(told["id"]):
                node["classes"].append(f"live-needs-{what}")
            for code in node.findall(nodes.literal_block):
                if code.astext().startswith("%%writefile"):  # a file's colours are those of Python
                    code["language"] = "python3"


def add_scripts(app, pagename: str, templatename: str, context: dict, doctree: nodes.document | None) -> None:
    """Add what a page with such cells loads at once."""
    if doctree is not None and any("live" in node["classes"] for node in doctree.findall(nodes.container)):
        app.add_css_file("live/live.css")
        app.add_js_file("live/page.js", loading_method="defer", **{"data-cells": cells_file(app.srcdir, pagename)[0]})


def cells_file(folder: str | Path, pagename: str) -> tuple[str, str]:
    """Name and text of the script with a chapter's cells. Its name changes with its text, like those of the pieces."""
    place = next(place for place in Path(folder).glob(f"{pagename}.*") if place.suffix in (".ipynb", ".md"))
    beside = place.parent / "measured" / f"{place.stem}.json"
    measured = json.loads(beside.read_text()) if beside.exists() else {}
    cells = [
        {
            "id": cell["id"],
            "source": (source := "".join(cell["source"])),
            "asks": bool(ASKS.search(source)),
            "measured": measured.get(cell["id"]),
        }
        for cell in code_cells(place)
    ]
    text = json.dumps({"pieces": list(pieces()), "cells": cells}, ensure_ascii=False)
    return f"{place.stem}-{_hash(text.encode())}.js", f"pplabChapter = {text};\n"


def code_cells(page: Path) -> list[dict]:
    """A notebook's code cells, or those of a page in Markdown that are tagged `live`."""
    if page.suffix == ".ipynb":
        return [cell for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "code"]
    cells = read_myst_markdown_notebook(page.read_text(), path=page).cells if page.suffix == ".md" else []
    return [{**cell, "id": named(cell["source"])} for cell in cells if "live" in cell["metadata"].get("tags", ())]


def named(source: str) -> str:
    """An id for a cell that has none."""
    return _hash(source.strip().encode())


_pieces: dict[str, str] = {}


def pieces() -> dict[str, str]:
    """Python and the package as scripts, by name, with the pieces of an archive in base64."""
    if not _pieces:
        with zipfile.ZipFile(io.BytesIO(pinned())) as given:
            files = {name: given.read(name) for name in IN_THE_WORKER}
        app = _zip(dict(app_files()), zipfile.ZIP_STORED)  # so that the archive around it is smaller
        files |= {"worker.js": (LIVE / "worker.js").read_bytes(), "app.zip": app}
        text = base64.b64encode(_zip(files, zipfile.ZIP_DEFLATED)).decode()
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            name = f"python-{len(_pieces)}-{_hash(piece.encode())}.js"
            _pieces[name] = f'(globalThis.pplabPieces ??= {{}})["{name}"] = "{piece}";\n'
    return _pieces


def pinned() -> bytes:
    """The pinned file. Raises ExtensionError if it isn't the one that the repository names."""
    found, expected = PINNED.read_bytes(), PINNED.with_suffix(".sha256").read_text().split()[0]
    if (got := hashlib.sha256(found).hexdigest()) != expected:
        raise ExtensionError(
            f"{PINNED.relative_to(ROOT)} has the checksum {got}, expected {expected}: restore it from the repository, "
            "or make it anew with tools/pin_python.py"
        )
    return found


def app_files() -> Iterator[tuple[str, bytes]]:
    """The files of the page's folder /app, laid out like the repository: the package, the exercises, recordings, the
    kernel.

    They include the explorer's own files, because `lab.explore` in a reader's cell shows its frame in the page, too.
    """
    for top in ("pplab", "pplab_course"):
        for path in sorted((ROOT / "src" / top).rglob("*")):
            if path.suffix in (".py", ".pyi", ".json", ".gz", ".html", ".css", ".js") and not NOT_PACKED & {
                *path.parts
            }:
                yield str(path.relative_to(ROOT)), path.read_bytes()
    others = [LIVE.rglob("*.py"), (ROOT / "results").glob("*.json"), (ROOT / "notebooks").glob("*.py")]
    for path in [ROOT / "pyproject.toml", *(path for found in others for path in sorted(found))]:
        yield str(path.relative_to(ROOT)), path.read_bytes()
    yield "book/_live/pplab_drawings.py", Path(__file__).with_name("pplab_drawings.py").read_bytes()


def _zip(files: dict[str, bytes], packed: int) -> bytes:
    """An archive of files by name, the same bytes for the same files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _WHEN), content, packed, 9)
    return made.getvalue()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def write(app, builder) -> None:
    """Write the scripts next to the page's other static files."""
    if builder.format != "html":
        return
    chapters = [name for name in app.env.found_docs if code_cells(Path(app.env.doc2path(name)))]
    if not chapters:
        return
    place = Path(app.outdir) / "_static" / "live"
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    for name in ("page.js", "live.css"):
        (place / name).write_bytes((LIVE / name).read_bytes())
    with zipfile.ZipFile(io.BytesIO(pinned())) as given:
        for name in ("editor.js", "LICENSES.txt"):
            (place / name).write_bytes(given.read(name))
    for name, text in [*pieces().items(), *(cells_file(app.srcdir, chapter) for chapter in chapters)]:
        (place / name).write_text(text, encoding="utf-8")


def setup(app) -> dict:
    app.connect("source-read", mark, priority=400)  # before pplab_notebooks takes cells away
    app.connect("doctree-read", dress)
    app.connect("html-page-context", add_scripts)
    app.connect("write-started", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
