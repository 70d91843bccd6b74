"""What the book needs from Sphinx beyond its settings."""

from __future__ import annotations


def drop_thebe(app, pagename, templatename, context, doctree) -> None:
    """Leave out sphinx-thebe's scripts: the theme loads them twice on every page, which is an error in the browser, and
    the book's cells run without them (pplab_live)."""
    context["script_files"] = [
        script
        for script in context.get("script_files", [])
        if "thebe" not in str(getattr(script, "filename", "")) and "THEBE" not in _body(script)
    ]


def _body(script) -> str:
    return str(getattr(script, "attributes", {}).get("body", ""))


def setup(app) -> dict:
    app.connect("html-page-context", drop_thebe, priority=900)
    app.setup_extension("pplab_page")
    app.setup_extension("pplab_explorer")
    app.setup_extension("pplab_front")
    app.setup_extension("pplab_live")
    app.setup_extension("pplab_notebooks")
    app.setup_extension("pplab_recorded")
    app.setup_extension("pplab_search")
    app.setup_extension("pplab_terms")
    app.setup_extension("pplab_light")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
