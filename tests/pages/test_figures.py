"""Charts and text in the forms in which notebooks keep them, and what the page makes of those."""

from __future__ import annotations

import base64
import re
import struct
import sys
from pathlib import Path

import pytest

import pplab as pp

pytest.importorskip("matplotlib").use("Agg")

from pplab import lab  # noqa: E402
from pplab.lab.forms import Table, alternative_text  # noqa: E402
from pplab_course import frames  # noqa: E402
from pplab_course.figures import PAGE, timeline_bundle  # noqa: E402
from pplab_course.frames import explored  # noqa: E402
from pplab_course.notebook import Slider, explore, play  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch):
    """The book's extension that reads notebooks."""
    pytest.importorskip("myst_nb")
    monkeypatch.syspath_prepend(str(ROOT / "book" / "_ext"))
    import pplab_notebooks

    yield pplab_notebooks
    del sys.modules["pplab_notebooks"]


def size(data: dict) -> tuple[int, int]:
    return struct.unpack(">II", base64.b64decode(data["image/png"])[16:24])


def test_a_timeline_shows_itself_in_every_form():
    from matplotlib import pyplot as plt

    plt.close("all")  # what other tests have left
    t = pp.simulate(pp.build("1F1B", num_ranks=4, num_microbatches=8))
    data, metadata = timeline_bundle(t)
    assert not plt.get_fignums(), "the notebook would show the figure twice"
    assert set(data) == {PAGE, "image/png", "text/plain"}
    assert data["text/plain"] == metadata["image/png"]["alt"] and "makespan 33" in data["text/plain"]
    assert "currentColor" in data[PAGE] and size(data)[0] == pytest.approx(1.5 * metadata["image/png"]["width"], abs=1)
    assert (data, metadata) == timeline_bundle(t), "executed again, a notebook would change"


def test_a_slider_is_all_its_charts_where_nothing_moves():
    timelines = {m: pp.simulate(pp.build("GPipe", num_ranks=2, num_microbatches=m)) for m in (1, 2, 4)}
    data, _ = Slider("slices", {m: pp.gantt(t) for m, t in timelines.items()})._repr_mimebundle_()
    one = size(timeline_bundle(timelines[1])[0])
    assert size(data)[1] > 3 * one[1] and data[PAGE].count("<svg") == 3
    said = data["text/plain"].splitlines()
    assert [line.partition(":")[0] for line in said] == ["slices 1", "slices 2", "slices 4"]


def test_charts_of_a_page_share_no_hatching():
    """A browser draws no pattern that lies in a chart which a slider or a fold hides."""
    pages = [timeline_bundle(pp.simulate(pp.build("GPipe", num_ranks=2, num_microbatches=m)))[0][PAGE] for m in (2, 3)]
    defined, used = ([set(re.findall(how, page)) for page in pages] for how in (r'id="(h\w+)"', r"url\(#(h\w+)\)"))
    assert defined == used and len(defined[0]) == 3 and not defined[0] & defined[1]


def test_a_cell_explores_what_the_page_does(page):
    t = pp.simulate(pp.build("1F1B", num_ranks=3, num_microbatches=8), pp.Costs(latency=1))
    assert explored(ranks=3, latency=1)[0].makespan == t.makespan
    assert "ZB-H2" in alternative_text(frames.picture(schedule="ZB-H1", compare="ZB-H2", ranks=3))
    with pytest.raises(ValueError, match="2F2B"):
        explore("2F2B")
    with pytest.raises(ValueError, match="no level is named 'nineteen': choose from .*eighteen"):
        play("nineteen")


def test_plain_markdown_becomes_what_myst_has(page):
    plain = """# T

**Why, for $M$
of them?**

*Reading time: a minute.*

[ranks](../book/glossary.md "rank") and [stage](../book/glossary.md): [[A, 2019](../book/references.bib "a2019b")]

$$
x \\tag{an-x}
$$ follows; $(\\text{an-x})$ in [a chapter](02_naive.ipynb)

<details class="note"><summary>In torch</summary>

body

</details>"""
    made = page.myst(plain)
    for part in (
        "# T\n\n:::{div} question\nWhy, for $M$\nof them?\n:::\n\n:::{div} meta\nReading time: a minute.\n:::\n",
        "{term}`ranks <rank>` and {term}`stage`: {cite}`a2019b`",
        "x\n$$ (an-x) follows; {eq}`an-x` in [a chapter](02_naive.ipynb)",
        ":::{admonition} In torch\n:class: note dropdown\nbody\n:::",
    ):
        assert part in made, made
    untouched = "<details><summary>Hint</summary>\n\n**not a question**\n\n</details>"
    assert page.myst(untouched) == untouched


def test_a_price_is_plain_on_the_page(page):
    assert page.myst(r"**<span>\$</span>25.2** of <span>\$</span>92, $P$") == r"**\$25.2** of \$92, $P$"


def test_what_is_for_elsewhere_is_not_on_the_page(page):
    text = {"cell_type": "markdown", "id": "a", "source": ["*The chart is on the page.*"]}
    assert not [*page.on_the_page(text | {"metadata": {"tags": ["elsewhere"]}})]


def test_the_cell_beside_an_explorer_gives_it_its_settings(page):
    call = 'explore("1F1B", "GPipe", ranks=4,\n        stages_per_rank=2, path=True, controls="ranks latency")'
    code = f"from pplab_course.notebook import explore\n\n{call}"
    cell = {"cell_type": "code", "id": "a", "metadata": {"tags": ["explorer"]}}
    shown, hidden = page.on_the_page(cell | {"source": [code]})
    assert shown["source"].splitlines() == [
        "```{explorer}",
        *(":schedule: 1F1B", ":compare: GPipe", ":ranks: 4", ":stages-per-rank: 2", ":path: true"),
        ":controls: ranks latency",
        "```",
    ]
    assert hidden["metadata"]["tags"] == ["explorer", "remove-cell"] and hidden["source"] == [code]
    shown, _ = page.on_the_page(cell | {"source": ['play("eighteen")']})
    assert shown["source"] == "```{play}\n:level: eighteen\n```"


def test_the_answer_of_a_guess_is_one_fold(page):
    """Of cells and a text, which JupyterLab folds one by one; nothing else is folded with them."""
    fold = '<details class="answer"><summary>Show the answer</summary>\n\nIt *takes* 33.\n\n</details>'
    named = {
        "a": "Guess.",
        "c": fold,
        "d": "So it takes 33.",
        "e": "<details><summary>Hint</summary>\n\nx\n\n</details>",
    }
    cells = [{"cell_type": "markdown", "id": name, "metadata": {}, "source": text} for name, text in named.items()]
    cells.insert(1, {"cell_type": "code", "id": "b", "metadata": {"tags": ["answer"]}, "source": ["t = 33\n", "t"]})
    made = [cell["source"] for cell in page.fold_answers(cells)]
    opened = '<details class="answer"><summary>Show the answer</summary>'
    assert made == ["Guess.", opened, "t = 33\nt", "It *takes* 33.", "</details>", "So it takes 33.", named["e"]]


@pytest.mark.parametrize(
    ("code", "said", "quiet"),
    [
        ("assert t == 33", "checked: 33\n", True),
        ("assert t == 33", "", True),
        ("assert t == 33", "t 33\nchecked: 33\n", False),
        ("print('checked')", "checked", False),
    ],
)
def test_a_cell_that_only_checks_is_a_quiet_line(page, code, said, quiet):
    outputs = [{"output_type": "stream", "name": "stdout", "text": [said]}] if said else []
    cell = {"cell_type": "code", "id": "a", "metadata": {"tags": ["hide-input"]}, "source": [code], "outputs": outputs}
    (made,) = page.on_the_page(cell)
    assert ({"check", "hide-cell"} <= {*made["metadata"]["tags"]}) == quiet


@pytest.mark.slow
def test_every_figure_of_a_page_has_a_number_and_an_anchor(book):
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        html = (book / "notebooks" / f"{path.stem}.html").read_text()
        captions = re.findall(
            r'class="pplab-caption"><a [^>]*href="#(fig-\d+-\d+)"[^>]*>Figure ([\d.]+)</a> <strong>', html
        )
        chapter = int(path.stem[:2])
        assert captions == [(f"fig-{chapter}-{n}", f"{chapter}.{n}") for n in range(1, len(captions) + 1)]
        assert all(html.count(f'id="{anchor}"') == 1 for anchor, _ in captions)
        for output in re.split('<div class="cell_output docutils container"', html)[1:]:
            if re.search(r'class="output text_html"><div class="pplab-(figure|slider)', output):
                assert output.startswith(' id="fig-'), output[:300]
        assert f">{chapter}. " in html, "the chapter has another number in the book's contents"


def test_a_phone_is_told_the_columns_of_the_ledger(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book" / "_ext"))
    import pplab_page

    ledger = lab.Ledger(lab.Case())
    ledger.add("GPipe", 8)
    said = pplab_page.TABLE.sub(pplab_page.as_cards, ledger._repr_html_())
    cells = dict(re.findall('<td[^>]* ?data-of="([^"]*)"[^>]*>(.*?)</td>', said))
    assert [*cells] == [*ledger.table.columns] and "pplab-cards" in said
    assert cells["M"] == "8" and "no" in cells["fits in 80 GB"] and "$114" in cells["a billion tokens"]
    narrow = Table([("a", "b")])
    narrow.columns = ("one", "two")
    assert pplab_page.TABLE.sub(pplab_page.as_cards, narrow._repr_html_()) == narrow._repr_html_()
