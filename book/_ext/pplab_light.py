"""Make pages load only what they need. This runs once the pages are written.

An icon becomes the drawing that the theme's font script would put there, so that script isn't loaded, and neither are
unused style sheets. What matplotlib has drawn loses what no reader sees: names that nothing refers to (used ones are
unique in the page), decimals below a hundredth of a point, and styles that are written out each time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from xml.etree import ElementTree

from pplab_drawings import SVG, dress

XLINK = "{http://www.w3.org/1999/xlink}"
GROUP = f"{SVG}g"

ICON = re.compile(r'<(i|span) class="([^"]*\bfa-[^"]*|fas [^"]*)"([^>]*)></\1>')
STYLES = ("fas", "fab", "fa-solid", "fa-brands", "fa-lg")
ICON_SCRIPT = re.compile(r'\s*<script src="[^"]*scripts/fontawesome\.js[^"]*"></script>')
UNUSED = re.compile(
    r"\s*<(?:link|script)\b[^>]*(?:sphinx-thebe\.css|sphinx-design\.min\.css|design-tabs\.js)[^>]*>(?:</script>)?"
)
DRAWING = re.compile(r'<svg role="img"(?:(?!</svg>).)*?<g id="figure_1">.*?</svg>', re.S)
RULE = re.compile(r"(?<=[{}])([^{}]+)\{[^{}]*\}")
FAMILY = re.compile(r"font-family: 'DejaVu Sans'[^;\"]*sans-serif(?:; )?")
REFERENCE = re.compile(r"url\(#([\w-]+)\)|^#([\w-]+)$")
NUMBER = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")


def lighten(app, exception) -> None:
    """Rewrite all pages, and the theme's style sheet."""
    if exception or app.builder.name != "html":
        return
    out = Path(app.outdir)
    script, sheet = out / "_static/scripts/fontawesome.js", out / "_static/styles/pydata-sphinx-theme.css"
    if not script.exists():
        return  # another theme
    drawn = script.read_text("utf-8")
    for page in out.rglob("*.html"):
        page.write_text(light(page.read_text("utf-8"), drawn), "utf-8")
    sheet.write_text(without_icons(sheet.read_text("utf-8")), "utf-8")


def light(page: str, drawn: str) -> str:
    """The page's HTML, lightened. `drawn` is the script that has the icons."""
    page = ICON.sub(lambda found: icon(found[2].split(), found[3], drawn), page)
    page = ICON_SCRIPT.sub("", page)
    if 'class="sd-' not in page:
        page = UNUSED.sub("", page)
    numbers = count(1)
    return DRAWING.sub(lambda found: drawing(found[0], f"d{next(numbers)}"), page)


@cache
def outline(name: str, drawn: str) -> tuple:
    """The script's outline of an icon. Each is searched for once, because the script is long."""
    key, other = (
        rf'[,{{]"?{re.escape(name)}"?:',
        rf':(?=\[\d+,\d+,\[[^\]]*"{re.escape(name)}")',
    )  # its name, or one more
    has = re.findall(rf'(?:{key}|{other})(\[\d+,\d+,\[[^\]]*\],"[0-9a-f]+","[^"]+"\])', drawn)
    if not has:
        raise ValueError(f"the theme's script has no icon {name!r}, which a page shows")
    return tuple(json.loads(has[-1]))  # the solid ones stand last


def icon(classes: list[str], more: str, drawn: str) -> str:
    """One icon as the theme's script draws it, given an element's classes that name it, and its other attributes."""
    name = next(each.removeprefix("fa-") for each in classes if each.startswith("fa-") and each not in STYLES)
    kept = " ".join(each for each in classes if each not in STYLES or each == "fa-lg")
    width, height, _, _, path = outline(name, drawn)
    title = re.search(r' title="([^"]*)"', more)
    said = f"<title>{title[1]}</title>" if title else ""
    attributes = re.sub(r' +(?:title|aria-hidden)="[^"]*"', "", more)
    return (
        f'<svg class="pplab-icon {kept}"{attributes} aria-hidden="true" viewBox="0 0 {width} {height}">'
        f'{said}<path fill="currentColor" d="{path}"/></svg>'
    )


def without_icons(sheet: str) -> str:
    """The style sheet without the icons' font and its thousands of names."""
    sheet = re.sub(r"/\*!\s*\* Font Awesome.*?\*/", "", sheet, flags=re.S)

    def kept(rule: re.Match) -> str:
        selectors = rule[1].split(",")
        is_icon = all(re.match(r"\.(fa|fa[srb]|fa-[\w-]+)\b", each) for each in selectors)
        return "" if is_icon or "@font-face" in rule[1] and "Font Awesome" in rule[0] else rule[0]

    return RULE.sub(kept, sheet)


def drawing(svg: str, name: str) -> str:
    """A drawing of matplotlib's; its own names begin with `name`."""
    root = ElementTree.fromstring(svg)
    dress(root)
    used = {
        made[1] or made[2] for each in root.iter() for said in each.attrib.values() for made in REFERENCE.finditer(said)
    }
    names = {old: f"{name}-{number}" for number, old in enumerate(sorted(used))}
    for each in root.iter():
        clean(each, names)
    unwrap(root)
    share_styles(root, name)
    root.set("font-family", "DejaVu Sans, Verdana, Arial, Helvetica, sans-serif")
    return ElementTree.tostring(root, "unicode")


def clean(element: ElementTree.Element, names: dict[str, str]) -> None:
    """Shorten the names and numbers of one element."""
    if element.tag != f"{SVG}text":
        element.text = (element.text or "").strip() or None
    element.tail = None
    for key, said in [*element.attrib.items()]:
        del element.attrib[key]
        if key == "id" and said not in names or key == "transform" and said.startswith("rotate(-0 "):
            continue
        said = REFERENCE.sub(lambda made: f"url(#{names[made[1]]})" if made[1] else f"#{names[made[2]]}", said)
        if key == "id":
            said = names[said]
        if key == "style":
            said = FAMILY.sub("", said).strip().rstrip(";")
        elif key in ("d", "x", "y", "transform", "width", "height"):
            said = NUMBER.sub(lambda made: f"{float(made[0]):.2f}".rstrip("0").rstrip("."), said)
        if key == "d":
            said = straight(re.sub(r" ?([A-Za-z]) ?", r"\1", " ".join(said.split())))
        element.set("href" if key == f"{XLINK}href" else key, said)


def straight(path: str) -> str:
    """A path whose horizontal and vertical lines have one number instead of two, because most shapes are bars."""
    made, at = [], None
    for letter, given in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        to = given.split()
        is_line = letter == "L" and len(to) == 2 and at is not None
        if is_line and to[0] == at[0]:
            made.append(f"V{to[1]}")
        elif is_line and to[1] == at[1]:
            made.append(f"H{to[0]}")
        else:
            made.append(letter + given)
        at = to[-2:] if letter in "MLCQ" else None
    return "".join(made)


def unwrap(element: ElementTree.Element) -> None:
    """Remove groups that have no effect, and join neighbours that are clipped alike, such as labels or bars."""
    children: list[ElementTree.Element] = []
    for child in element:
        unwrap(child)
        for each in child if child.tag == GROUP and not child.attrib else [child]:
            if not children or not alike(children[-1], each):
                children.append(each)
            elif each.tag == GROUP:
                children[-1].extend(each)
            else:
                children[-1].set("d", children[-1].get("d") + each.get("d"))
    element[:] = children


def alike(one: ElementTree.Element, other: ElementTree.Element) -> bool:
    """Whether both are clipped groups, or clipped closed shapes, that differ only in their content or place."""
    if one.tag != other.tag or "clip-path" not in one.attrib or {**one.attrib, "d": ""} != {**other.attrib, "d": ""}:
        return False
    return one.tag == GROUP or one.get("d", "").endswith("z") and other.get("d", "").endswith("z")


def share_styles(root: ElementTree.Element, name: str) -> None:
    """Give repeated styles of texts a class of the drawing's own."""
    texts = [*root.iter(f"{SVG}text")]
    often = [style for style, times in Counter(each.get("style") for each in texts).items() if style and times > 1]
    classes = {style: f"{name}{letter}" for style, letter in zip(often, letters(), strict=False)}
    for each in texts:
        if made := classes.get(each.get("style", "")):
            del each.attrib["style"]
            each.set("class", made)
    sheet = root.find(f"{SVG}defs/{SVG}style")
    if sheet is not None:  # the one of matplotlib's, which is the same in each drawing, is in pplab.css
        sheet.text = "".join(f".{made}{{{style}}}" for style, made in classes.items())


def letters() -> Iterator[str]:
    """a to z, then a1, b1, ..."""
    for round_ in count():
        for letter in "abcdefghijklmnopqrstuvwxyz":
            yield f"{letter}{round_ or ''}"


def setup(app) -> dict:
    """Register the extension, as the last one, since it rewrites what others have written."""
    app.connect("build-finished", lighten, priority=950)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
