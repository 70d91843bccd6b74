"""The directives `explorer`, `play` and `stamp`: the page's interactive views, each around its version for paper.

    ```{explorer}
    :schedule: 1F1B
    :ranks: 4
    :microbatches: 8
    :compare: GPipe
    ```

The options are the explorer's settings (see `SETTINGS`). They are checked by building and simulating, and a wrong one
is a build error. pplab draws the picture when the book is built, for print and for readers without scripts.

    ```{play}
    :level: memory-line
    ```

is one level of the game (see pplab_course.levels) with a link to all of them; without the option it is the whole game.
`stamp` is the same for the levels in which one microbatch is scheduled, and stamped (see pplab_blocks). For print and
for readers without scripts a level is its question in words. A page loads the scripts, and what they know of schedules
and levels, only if it has one of these views.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from urllib.parse import parse_qsl, quote

import pplab_blocks
import pplab_schedules
from docutils import nodes
from docutils.parsers.rst import Directive, directives
from sphinx.util.docutils import SphinxDirective

from pplab.lab.forms import SCRIPTS, STATIC
from pplab_course import frames, levels

PAGE = "book/explorer"  # the page whose address holds the explorer's state
GAME = "book/play"  # the page with all levels, whose address holds the level
SCRIPTS = {
    "explorer": tuple(f"explorer/{name}" for name in SCRIPTS),
    "play": frames.GAME,
    "stamp": ("explorer/core.js", "play/stamp.js", "explorer/chart.js", "play/game.js", "play/stamp_view.js"),
}
STYLE = "explorer/explorer.css"


def _flag(text: str | None) -> bool:
    words = {"": True, "true": True, "false": False}
    if (text or "").strip() not in words:
        raise ValueError(f"expected true or false, got {text!r}")
    return words[(text or "").strip()]


def _duration(text: str) -> float | int:
    value = float(text)
    return int(value) if value == int(value) else value


def _durations(text: str) -> float | int | tuple[float | int, ...]:
    """One value for all stages, or one for each: 3,4,2."""
    return tuple(map(_duration, text.split(","))) if "," in text else _duration(text)


def _per(text: str) -> str:
    return directives.choice(text, ("rank", "stage", "batch"))


def _overlap(text: str) -> str:
    return directives.choice(text, ("sum", "max"))


SETTINGS: dict[str, tuple[Callable, object]] = {  # how an option reads, and what it is when left out, as settings.js
    "schedule": (directives.unchanged_required, "1F1B"),  # or "own": these rows
    "rows": (directives.unchanged_required, ""),  # as an address has them: 0F0.0B0~1F0.1B0
    "compare": (directives.unchanged_required, ""),
    "ranks": (directives.positive_int, 4),
    "microbatches": (directives.positive_int, 8),
    "stages-per-rank": (directives.positive_int, 2),
    "slices": (directives.positive_int, 2),  # of a microbatch, for schedules that cut them
    "attention": (_duration, 0),  # its share of a forward: of later slices it takes more
    "forward": (_durations, 1),
    "backward-input": (_durations, 1),
    "backward-weight": (_durations, 1),
    "overhead": (_durations, 0),
    "latency": (_duration, 0),
    "overlap": (_overlap, "sum"),  # a forward and a backward at once: as long as both, or as the longer one
    "pair": (_duration, 0),  # how long the two take; 0: as `overlap` says
    "more-in-flight": (directives.nonnegative_int, 0),  # than P-s on rank s, under 1F1B
    "per": (_per, "rank"),  # what the durations are for: a microbatch on a rank, on a stage, or the batch on a rank
    "until": (_duration, 0),  # where the time axis ends, at least
    "path": (_flag, False),
    "memory": (_flag, True),
    "tickets": (_flag, False),  # the loop of microbatches above the chart
    "time": (_duration, 0),  # where the playhead stands; 0: at the end
    "zoom": (directives.positive_int, 1),
}
ON_THE_PAGE = ("until", "path", "memory", "tickets", "time", "zoom")  # what doesn't change the timelines
FIRST = (
    "schedule",
    "compare",
    "ranks",
    "microbatches",
    "stages-per-rank",
    "slices",
    "more-in-flight",
)  # controls an embedded explorer shows at once


class view(nodes.General, nodes.Element):
    """A view, from its kind, its root element's attributes, and the HTML for readers without scripts."""


class state_link(nodes.Inline, nodes.TextElement):
    """A link to the explorer's page in a state."""


class ExplorerDirective(SphinxDirective):
    """An explorer that starts from the options' settings. `controls` are those that aren't folded away. `page` marks
    the one whose state is in the address, with all controls."""

    option_spec = {  # noqa: RUF012
        **{name: read for name, (read, _) in SETTINGS.items()},
        "controls": directives.unchanged_required,
        "page": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        """Check the options and draw the picture."""
        state = {name: self.options.get(name, default) for name, (_, default) in SETTINGS.items()}
        shown = self.options.get("controls", "" if "page" in self.options else " ".join(FIRST))
        for name in shown.split():
            if name not in SETTINGS:
                raise self.error(f"explorer: no control is named {name!r}: choose from {', '.join(SETTINGS)}")
        try:
            picture = _picture(state)
        except (ValueError, ZeroDivisionError) as error:
            raise self.error(f"explorer: {_said(self.options)}: {error}") from error
        attributes = {"data-state": encode(state), "data-controls": shown}
        if "page" in self.options:
            attributes |= {"data-page": "", "id": "explorer"}
        return [view(kind="explorer", attributes=attributes, picture=picture)]


class PlayDirective(Directive):
    """The game: schedules built by hand. With `level` it is that one level."""

    option_spec = {"level": directives.unchanged_required}  # noqa: RUF012
    shown_levels = levels.LEVELS
    anchor: dict[str, str] = {}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """The game, with its questions in words inside."""
        only = self.options.get("level")
        shown = [level for level in self.shown_levels if only in (None, level.id)]
        if not shown:
            known = ", ".join(level.id for level in self.shown_levels)
            raise self.error(f"{self.name}: no level is named {only!r}: choose from {known}")
        questions = "".join(
            f"<p><strong>{html.escape(level.title)}.</strong> {html.escape(level.on_paper())}</p>" for level in shown
        )
        note = "<p>With scripts, a browser shows this as a game. It can be solved on paper, too.</p>"
        attributes = {"data-level": only} if only else self.anchor
        return [view(kind=self.name, attributes=attributes, picture=questions + note)]


class StampDirective(PlayDirective):
    """The game's levels in which one microbatch is scheduled, as a block that the page stamps."""

    shown_levels = pplab_blocks.LEVELS
    anchor = {"id": "stamp"}  # noqa: RUF012 (what a level's link to all of them leads to)


def explore(name: str, rawtext: str, text: str, lineno: int, inliner, options=None, content=None) -> tuple[list, list]:
    """The role `explore`: {explore}`words <schedule=GPipe&ranks=6>` links to the explorer in that state, checked."""
    words, _, said = text.rpartition(" <")
    try:
        given = dict(parse_qsl(said.removesuffix(">"), strict_parsing=True))
        for key in given.keys() - SETTINGS.keys():
            raise ValueError(f"no setting is named {key!r}: choose from {', '.join(SETTINGS)}")
        state = {key: read(given[key]) if key in given else default for key, (read, default) in SETTINGS.items()}
        timelines(state)
    except (ValueError, ZeroDivisionError) as error:
        message = inliner.reporter.error(f"explore: {said}: {error}", line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]
    return [state_link("", words, state=encode(state))], []


def encode(state: dict[str, object]) -> str:
    """The state as the fragment of an address: all that differs from the defaults."""

    said = {k: v for k, v in state.items() if k == "schedule" or v != SETTINGS[k][1]}
    return "&".join(f"{name}={quote(frames.text_of(value), safe='')}" for name, value in said.items())


def timelines(state: dict[str, object]) -> list:
    """The timelines that the explorer shows for a state, made by pplab. ValueError names a setting that can't be."""
    return frames.explored(**{name.replace("-", "_"): state[name] for name in SETTINGS if name not in ON_THE_PAGE})


def _picture(state: dict[str, object]) -> str:
    import matplotlib

    matplotlib.use("Agg")  # a build has no screen
    from matplotlib import pyplot as plt

    from pplab_course.figures import figure_html

    figure = frames.picture(**{name.replace("-", "_"): value for name, value in state.items() if name != "zoom"})
    made = figure_html(figure)
    plt.close(figure)
    return made


def _said(options: dict) -> str:
    return ", ".join(f":{name}: {value}" for name, value in options.items()) or "no options"


def visit_html(self, node: nodes.Element) -> None:
    """Write the root element, with the address of the view's own page, and the picture in it."""
    attributes = {"class": f"pplab-{node['kind']}", **node["attributes"]}
    builder, here = self.builder, self.builder.current_docname
    there = PAGE if node["kind"] == "explorer" else GAME
    if there in builder.env.found_docs and there != here:
        if node["kind"] == "explorer" and "data-page" not in attributes:
            attributes["data-open"] = builder.get_relative_uri(here, there) + "#explorer"
        elif "data-level" in attributes:
            attributes["data-open"] = builder.get_relative_uri(here, there) + "#stamp" * (node["kind"] == "stamp")
    written = " ".join(f'{name}="{html.escape(str(value), quote=True)}"' for name, value in attributes.items())
    self.body.append(f'<div {written}><div class="pplab-static">{node["picture"]}</div></div>\n')
    raise nodes.SkipNode


def visit_link(self, node: nodes.Element) -> None:
    """Open the link. A script adds the state to its address (see explorer.js)."""
    to = self.builder.get_relative_uri(self.builder.current_docname, PAGE).partition("#")[0]
    self.body.append(f'<a href="{to}#explorer" data-state="{html.escape(node["state"], quote=True)}">')


def depart_link(self, node: nodes.Element) -> None:
    """Close the link."""
    self.body.append("</a>")


def skip(self, node: nodes.Element) -> None:
    """Other formats have no views."""
    raise nodes.SkipNode


def load_scripts(app, pagename, templatename, context, doctree) -> None:
    """Load a page's scripts for the views that it has."""
    kinds = {node["kind"] for node in doctree.findall(view)} if doctree else set()
    if doctree and next(doctree.findall(state_link), None):
        kinds.add("explorer")
    scripts = dict.fromkeys(script for kind in sorted(kinds) for script in SCRIPTS[kind])
    for script in scripts:
        app.add_js_file(script, loading_method="defer")
    known = [pplab_schedules.script()] * bool(kinds) + [levels.script()] * ("play" in kinds)
    known += [pplab_blocks.script()] * ("stamp" in kinds)
    if known:
        app.add_js_file(None, body="\n".join(known))  # runs before the scripts above, which are deferred
        app.add_css_file(STYLE)
        context["body"] += "".join(map(frames.template, sorted(kinds)))


def take_files(app, config) -> None:
    """Take the files of explorer and game from the package: there is one copy of them, which notebooks use, too."""
    config.html_static_path += [str(STATIC.parent), str(frames.OWN)]


def setup(app) -> None:
    app.connect("config-inited", take_files)
    app.add_node(view, html=(visit_html, None), **{name: (skip, None) for name in ("latex", "text", "man", "texinfo")})
    app.add_node(state_link, html=(visit_link, depart_link))
    app.add_role("explore", explore)
    app.add_directive("explorer", ExplorerDirective)
    app.add_directive("play", PlayDirective)
    app.add_directive("stamp", StampDirective)
    app.connect("html-page-context", load_scripts)
