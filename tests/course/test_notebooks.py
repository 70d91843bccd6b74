"""The committed notebooks: executed from top to bottom, clean, described, with solutions that their checkers accept."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import re
import struct
from pathlib import Path

import nbformat
import pytest
from execute_notebooks import FIRST

from conftest import without_folds

ROOT = Path(__file__).parents[2]
PAGE = "application/vnd.pplab.page+html"  # a chart's form for the book's page
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAGS = re.compile(r"(hide|remove)-input|hide-output|answer|nbval-[\w-]+|explorer|elsewhere")
FOLDS = {
    **dict.fromkeys(("hide-input", "remove-input"), "source_hidden"),
    **dict.fromkeys(("hide-output", "answer"), "outputs_hidden"),
}
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    """Without what stands before the answers of guesses."""
    found = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]
    return [cell | {"outputs": without_folds(cell["outputs"])} for cell in found] if kind == "code" else found


def text(cell: dict) -> str:
    return "".join(cell["source"])


def outputs(path: Path) -> list[dict]:
    return [output for cell in cells(path, "code") for output in cell["outputs"]]


def test_it_was_executed_from_the_top(path):
    counts = [cell["execution_count"] for cell in cells(path, "code") if text(cell).strip()]
    assert counts == list(range(1, len(counts) + 1)), "not executed from the top: run `make notebooks`"
    assert not any(output["output_type"] == "error" for output in outputs(path)), "a cell ends in an error"
    assert "is there already" not in path.read_text(), "a reader's file was left there: delete it, and execute again"


def test_it_carries_nothing_that_changes_by_itself(path):
    notebook = json.loads(path.read_text())
    nbformat.validate(notebook)
    clean = f"run: python tools/execute_notebooks.py --clean notebooks/{path.name}"
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}, clean
    assert all(set(cell["metadata"]) <= {"figure", "jupyter", "tags"} for cell in notebook["cells"]), clean
    assert not any(output.get("name") == "stderr" for output in outputs(path)), "run `make notebooks`: it drops stderr"
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"]), "two cells have one id"


def test_what_the_page_hides_is_folded_in_jupyterlab(path):
    for cell in json.loads(path.read_text())["cells"]:
        tags = cell["metadata"].get("tags", [])
        assert all(map(TAGS.fullmatch, tags)), f"cell {cell['id']}: one of {tags} means nothing here"
        folded = {FOLDS[tag]: True for tag in tags if tag in FOLDS}
        how = f"run: python tools/execute_notebooks.py --clean notebooks/{path.name}"
        assert cell["metadata"].get("jupyter", {}) == folded, f"cell {cell['id']}: {how}"


def test_no_line_of_text_is_a_comment(path):
    for cell in cells(path, "markdown"):  # MyST leaves out a line that begins with %
        assert not re.search(r"^%", CODE.sub("", text(cell)), flags=re.M), text(cell)


def test_no_price_becomes_a_formula(path):
    """JupyterLab drops the backslash of `\\$`, and takes what is between two bare dollars of a paragraph for a formula,
    also between a price and a formula's dollar."""
    for cell in cells(path, "markdown"):
        bare = re.findall(r"(?:(?<!<span>)\\\$|\\\$(?!</span>)).*", CODE.sub("", text(cell)))
        assert not bare, f"write <span>\\$</span>321, not \\$321: {bare}"


def charts(path: Path) -> list[dict]:
    return [o for o in outputs(path) if "image/png" in o.get("data", {}) or PAGE in o.get("data", {})]


def test_every_figure_is_described(path):
    assert charts(path), "a chapter shows a chart: end a cell with a timeline, or with pp.compare([...])"
    for chart in charts(path):
        for figure in re.findall(r"<svg[^>]*>", "".join(chart["data"][PAGE])):
            label = re.search(r'role="img" aria-label="([^"]+)"', figure)
            assert label and len(label.group(1)) > 20, "describe the figure: pplab_course.figures says how"
        assert len("".join(chart["data"]["text/plain"])) > 20, "describe the figure: its text says what it shows"


def not_counted(sentence: str, path: Path) -> set[str]:
    """A sentence's numbers that no output and no check of the chapter has."""
    counted = "\n".join("".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in outputs(path))
    counted += "\n".join(text(cell) for cell in cells(path, "code") if "hide-input" in cell["metadata"].get("tags", ()))
    numbers = re.findall(r"(?<![\w.+-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w+])", sentence)
    return {*numbers} - {*re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", counted)}


def test_its_head_has_the_chapter_in_five_lines(path):
    head = text(cells(path, "markdown")[0])
    said = re.search(r"<summary>The chapter in five lines</summary>\n\n((?:- .+\n(?:  .+\n)*){5})\n</details>", head)
    assert said, "below the head's three paragraphs: a folded note, a list of five"
    assert not not_counted(said[1], path), f"no output and no check has {not_counted(said[1], path)}"


def test_below_them_it_leads_to_the_sections_for_one_question(path):
    prose = "\n\n".join(map(text, cells(path, "markdown")))
    said = re.search(r"\n</details>\n\n(Only .+(?:\n.+)*)\n\n", prose)
    assert said, "below the folded note: a paragraph such as `Only the hang: [Run it](#run-it)`"
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = re.findall(r"\]\(#(.+?)\)", said[1])
    assert linked and {*linked} <= anchors, f"no section is called { ({*linked} - anchors) }"


def test_every_figure_says_what_it_shows(path):
    """The page prints it below the figure. What it counts, an output or a check of the chapter has counted."""
    for cell in cells(path, "code"):
        told, tags = cell["metadata"].get("figure", {}), cell["metadata"].get("tags", ())
        shown = any(PAGE in output.get("data", {}) for output in cell["outputs"])
        assert bool(told) == shown or "explorer" in tags, (
            f"cell {cell['id']}: its metadata say of a figure {{'figure': {{'title': ...}}}}"
        )
        assert set(told) <= {"title", "caption"}
        for sentence in told.values():
            assert re.fullmatch(r"[^$\n]{20,140}[.?]", re.sub(r"\$(?=\d)", "", sentence)), (
                f"one line, no formula: {sentence}"
            )
            unknown = not_counted(sentence, path)
            assert not unknown, f"cell {cell['id']}: no output and no check has {unknown}"


def test_every_figure_is_seen_in_every_viewer(path):
    """JupyterLab takes text/html before a picture, and from a notebook that nobody trusts yet it drops the drawing."""
    for chart in charts(path):
        assert set(chart["data"]) == {PAGE, "image/png", "text/plain"}
        picture = base64.b64decode("".join(chart["data"]["image/png"]))
        width, height = struct.unpack(">II", picture[16:24])
        assert picture.startswith(b"\x89PNG") and len(picture) < 100e3
        shown = chart["metadata"]["image/png"]
        assert 200 < shown["width"] < width <= 2 * shown["width"] and shown["height"] < height
    for output in outputs(path):
        assert not re.search(r"<(svg|script|img)", "".join(output.get("data", {}).get("text/html", "")))
        assert not {"image/svg+xml", "application/javascript"} & output.get("data", {}).keys()


def test_its_text_is_plain_markdown(path):
    """What the page makes of it, book/_ext/pplab_notebooks.py says."""
    prose = "\n".join(map(text, cells(path, "markdown")))
    roles = re.findall(r"\{[\w:+-]+\}`|^:::.*|^```\{.*|^\([\w-]+\)=$|\$\$ *\([\w-]+\)", prose, flags=re.M)
    assert not roles, f"JupyterLab shows MyST as it stands, {roles}: write as book/_ext/pplab_notebooks.py says"
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", prose):
        assert (path.parent / target).is_file(), f"a link leads to {target}, which isn't there"
    names = re.findall(r"\\tag\{([\w-]+)\}", prose)
    named = set(re.findall(r"\$\(\\text\{([\w-]+)\}\)\$", prose))
    assert named <= set(names) and len(set(names)) == len(names), f"equations are {names}, and text names {named}"
    for words, key in re.findall(r'\[\[([^][]+)\]\(\.\./book/references\.bib "(\w+)"\)\]', prose):
        entry = re.search(rf"@\w+{{{key},.*?\n}}", (path.parents[1] / "book/references.bib").read_text(), flags=re.S)[0]
        author, year = words.split()[0].rstrip(","), words[-4:]
        assert re.search(rf"author = {{{{*{author}\b", entry) and f"year = {{{year}}}" in entry, (words, key)


def test_it_says_where_the_page_has_more(path):
    """Elsewhere than on the page, a sentence stands beside a chart to point at. The page leaves it out, and no other
    text tells its readers that they should see the page."""
    views, said = sum('class="pplab-frontier"' in "".join(o.get("data", {}).get(PAGE, "")) for o in outputs(path)), 0
    for cell in cells(path, "markdown"):
        if tags := cell["metadata"].get("tags"):
            assert tags == ["elsewhere"]
            assert re.fullmatch(r"\*[^*]+\.\*", text(cell)), "not one paragraph in italics"
            way = f"`make book` and open `_build/html/notebooks/{path.stem}.html`"
            assert way in text(cell), f"the text that is tagged `elsewhere` says: {way}"
            said += 1
        else:
            assert not re.search(r"book's\s+page", text(cell)), "the page says so, too"
    assert said == bool(views), "where the page has a chart to point at, one text tagged `elsewhere` says so"


def test_explorers_and_the_game_are_frames_and_what_is_there_without(path):
    """A picture is an output of its own: a viewer that drops the frame takes no other output with it."""
    for cell in cells(path, "code"):
        if "explorer" not in cell["metadata"].get("tags", ()):
            assert not re.search(r"^(explore|play)\(", text(cell), flags=re.M), "tag the cell `explorer`"
            continue
        *pictures, frame = (output["data"] for output in cell["outputs"])
        assert ["image/png" in picture for picture in pictures] == [True] * ("explore(" in text(cell))
        frame, sentence = re.fullmatch(
            r"(<iframe .*</iframe>)\n<p>(.*)</p>\n", "".join(frame["text/html"]), re.S
        ).groups()
        assert len(frame) < 100e3 and not re.search(r"(src|href)=", frame), "too much for a frame, or not all of it"
        assert sentence.startswith("The explorer shows here" if pictures else "The game shows here")
        assert not pictures or "picture" in sentence


def test_a_folded_answer_does_not_tell_itself(path):
    """JupyterLab shows the first line of a folded output."""
    for cell in json.loads(path.read_text())["cells"]:
        for tag in FIRST.keys() & cell["metadata"].get("tags", ()) if cell["cell_type"] == "code" else ():
            assert "".join(cell["outputs"][0]["data"]["text/plain"]) == FIRST[tag], "run --clean"


def test_cells_are_short(path):
    for cell in cells(path, "code"):
        lines = text(cell).splitlines()
        most = 100 if text(cell).startswith("%%writefile") else 24  # a file of the reader's is as long as it is
        assert len(lines) <= most, f"{len(lines)} lines, at most {most} fit beside their text: split\n{text(cell)}"
        longest = max(lines, key=len, default="")
        assert len(longest) <= 90, f"{len(longest)} columns, at most 90 fit on the page: break the line {longest!r}"


def test_it_has_the_skeleton_of_a_core_chapter(path):
    prose = "\n".join(map(text, cells(path, "markdown")))
    code = "\n".join(map(text, cells(path, "code")))
    head = re.match(r"# .+\n\n\*\*[^*]+\?\*\*\n\n\*Reading time: ", prose)
    assert head, "begin with three paragraphs: # Title, **the chapter's question?**, *Reading time: N minutes ...*"
    for part in ("\\tag{", "## What goes wrong", "## Exercises", "## Further reading"):
        assert part in prose, f"no text of this chapter has {part!r}: notebooks/README says what a chapter must have"
    for part in ("assert ", ".gradients.equal", "pp.compare(", "Pool("):
        assert part in code, f"no code of this chapter has {part!r}: notebooks/README says what a chapter must have"


def solutions(path: Path) -> list[str]:
    found = []
    for cell in cells(path, "markdown"):
        for body in re.findall(r"<summary>Solution</summary>(.*?)</details>", text(cell), flags=re.S):
            found += re.findall(r"```python\n(.*?)```", body, flags=re.S)
    return found


def test_what_takes_gpus_has_a_size_for_them(path):
    """A layer of width 128 is done on a GPU before its host has started the next kernel."""
    code = [*map(text, cells(path, "code")), *solutions(path)]
    taking = [each for each in code if re.search(r"\b(Pool|measure_layers)\((?![^)]*\bdevice=)", each)]
    assert all("devices[0]" in each for each in taking), (
        'say device="cpu", or give GPUs a wider model, as chapter 14 does'
    )
    head, *_ = (ROOT / "book" / "gpu.md").read_text().partition("## Before")
    assert bool(taking) == (f"notebooks/{path.stem}`" in head), "book/gpu.md lists the chapters that use GPUs"


def test_there_are_enough_exercises(path):
    asked = [text(cell) for cell in cells(path, "code") if text(cell).startswith("exercise.") and "(...)" in text(cell)]
    assert len(asked) >= 5, f"{len(asked)} exercises, five at least: cells like exercise.my_question(...)"
    assert len(solutions(path)) == len(asked), f"{len(solutions(path))} solutions of {len(asked)} exercises"
    said = ["".join(o["data"]["text/plain"]) for o in last_outputs(path, "exercise.", "(...)")]
    assert all("… not answered" in each for each in said), "commit exercises unanswered: their cells end with (...)"


def test_every_exercise_has_a_hint_and_a_solution(path):
    """Folded, between the exercise before it and the cell that takes its answer."""
    prose, folded = "", []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            prose += text(cell)
        elif text(cell).startswith("exercise.") and "(...)" in text(cell):
            parts = [prose.count(f"<details><summary>{part}</summary>") for part in ("Hint", "Solution")]
            folded.append((text(cell), *parts))
            prose = ""
    wrong = [source for source, *counts in folded if counts != [1, 1]]
    assert not wrong, f"before each, one folded Hint and one folded Solution are wanted: {wrong}"


def test_colours_are_of_the_palette(path):
    """tests/pages/test_palette.py measures whether those stay apart for everybody."""
    found = re.findall(r"#[0-9a-fA-F]{6}\b", "\n".join(map(text, cells(path, "code"))))
    assert not found, f"take colours from pplab.palette in place of {found}"


def last_outputs(path: Path, start: str, end: str) -> list[dict]:
    code = [(text(cell).strip(), cell) for cell in cells(path, "code")]
    found = [cell for source, cell in code if source.startswith(start) and source.endswith(end)]
    assert all(cell["outputs"] for cell in found), f"a cell {start}...{end} has no output: run `make notebooks`"
    return [cell["outputs"][-1] for cell in found]


def checkers(path: Path) -> str:
    """The module that a notebook imports as `exercise`."""
    code = "\n".join(map(text, cells(path, "code")))
    names = re.findall(r"^from pplab_course import (\w+) as exercise$", code, re.M)
    assert len(names) == 1, f"write once: from pplab_course import CHECKERS as exercise; there: {names}"
    return names[0]


@pytest.mark.slow
@pytest.mark.timed
def test_its_solutions_are_right(path, tmp_path, monkeypatch):
    import torch

    import pplab as pp
    from pplab import lab

    monkeypatch.chdir(tmp_path)  # a solution may write a file
    for code in solutions(path):
        exercise = importlib.import_module(f"pplab_course.{checkers(path)}")
        *statements, last = ast.parse(code).body
        names = {"pp": pp, "lab": lab, "exercise": exercise, "torch": torch}
        exec(compile(ast.Module(statements, []), "solution", "exec"), names)
        verdict = eval(compile(ast.Expression(last.value), "solution", "eval"), names)
        assert verdict.right is True, (code, verdict)
