"""The editor of the book's pages, by itself: its keys, what it tells, and colours."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("playwright")

import pin_python  # noqa: E402

import browser as chromium  # noqa: E402

CODE = "def f(x):\n    return x"
# Of the page's theme, in the dark: what live.css takes from it.
THEME = "--pst-color-text-base: #ced6dd; --pst-color-surface: #29313d; --pst-color-primary: #528fe4"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editor")
    (folder / "editor.js").write_bytes(pin_python.unpacked(pin_python.PINNED.read_bytes())["editor.js"])
    (folder / "live.css").write_text((pin_python.PINNED.parent / "live.css").read_text())
    (folder / "page.html").write_text(f"""<!DOCTYPE html><html lang="en" data-theme="dark" style="{THEME}">
<meta charset="utf-8"><title>An editor</title><link rel="stylesheet" href="live.css"><script src="editor.js"></script>
<body><div class="live-editor"></div><button>After it</button><script>
told = [];
pplabEditor.edit(document.querySelector(".live-editor"), {json.dumps(CODE)}, {{
  label: "A cell", onRun: (ahead) => told.push(["run", ahead]), onLeave: () => told.push(["leave"]),
  onChange: (text) => told.push(text),
}}).focus();
</script>""")
    return (folder / "page.html").as_uri()


@pytest.fixture
def tab(place):
    with chromium.launched_or_skipped() as started, chromium.watched_tabs(started) as new_tab:
        opened = new_tab(390)
        opened.goto(place)
        yield opened


def test_it_says_what_a_reader_does(tab):
    assert tab.get_by_role("textbox", name="A cell").inner_text() == CODE
    assert tab.get_by_text("def", exact=True).evaluate("(it) => getComputedStyle(it).color") == "rgb(220, 198, 224)"
    for keys in ("Control+End", "Enter", "y", "Tab", "Shift+Enter", "Control+Enter", "Escape"):
        tab.keyboard.press(keys)
    typed = [f"{CODE}\n    ", f"{CODE}\n    y", f"{CODE}\n        y"]  # a line is indented as the one above it
    assert tab.evaluate("told") == [*typed, ["run", True], ["run", False], ["leave"]]
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_selection_can_be_read_in_the_dark(tab):
    """Contrast as WCAG 2.1 defines it, of the text over what is drawn below it."""
    tab.keyboard.press("Control+a")
    below = tab.wait_for_selector(".cm-selectionBackground", state="attached")
    *colour, alpha = (
        float(part) for part in re.findall(r"[\d.]+", below.evaluate("(it) => getComputedStyle(it).backgroundColor"))
    )
    surface, text = (bytes.fromhex(each) for each in ("29313d", "ced6dd"))
    mixed = [alpha * over + (1 - alpha) * under / 255 for over, under in zip(colour, surface, strict=True)]
    light, dark = luminance([part / 255 for part in text]), luminance(mixed)
    assert (light + 0.05) / (dark + 0.05) > 4.5


def luminance(colour: list[float]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
