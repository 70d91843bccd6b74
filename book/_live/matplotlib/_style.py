"""Colours, dashes, how wide text is, and the words for what the page lacks."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature

from pplab.lab.forms import LINES

# Of DejaVu Sans, from the blank to ~, in thousandths of the size:
_WIDTHS = [
    *map(int, "318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337".split()),
    *[636] * 10,
    *map(int, "337 337 838 838 838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787".split()),
    *map(int, "603 787 695 635 611 732 684 989 685 611 685 390 337 390 838 500 500 613 635 550 635 615".split()),
    *map(int, "352 635 634 278 278 579 278 974 634 612 635 635 411 521 392 634 592 818 592 592 525".split()),
    *map(int, "636 337 636 838".split()),
]
BOLDER, MONOSPACED = 1.11, 602
ASCENT, DESCENT = 0.76, 0.24  # of the size

CYCLE = LINES
_TAB = {
    "blue": "#1f77b4",
    "orange": "#ff7f0e",
    "green": "#2ca02c",
    "red": "#d62728",
    "purple": "#9467bd",
    "brown": "#8c564b",
    "pink": "#e377c2",
    "gray": "#7f7f7f",
    "olive": "#bcbd22",
    "cyan": "#17becf",
}
_LETTERS = {"k": "#000000", "w": "#ffffff", "r": "#ff0000", "g": "#008000", "b": "#0000ff"}
_NAMED = {
    "black": "#000000",
    "white": "#ffffff",
    "gray": "#808080",
    "grey": "#808080",
    "red": "#ff0000",
    "green": "#008000",
    "blue": "#0000ff",
    "orange": "#ffa500",
    "purple": "#800080",
    **_LETTERS,
    **{f"tab:{name}": colour for name, colour in _TAB.items()},
    **{f"C{number}": CYCLE[number % len(CYCLE)] for number in range(10)},  # matplotlib begins anew, too
}
_DASHES = {"--": (3.7, 1.6), ":": (1, 1.65), "-.": (6.4, 1.6, 1, 1.6)}
_DASHES |= {"dashed": _DASHES["--"], "dotted": _DASHES[":"], "dashdot": _DASHES["-."]}
SOLID, NO_LINE = (None, "-", "solid"), ("", " ", "none", "None")

_LONG = {
    "fc": "facecolor",
    "ec": "edgecolor",
    "lw": "linewidth",
    "ls": "linestyle",
    "c": "color",
    "ms": "markersize",
    "mfc": "markerfacecolor",
    "mec": "markeredgecolor",
    "mew": "markeredgewidth",
    "size": "fontsize",
    "weight": "fontweight",
    "fontfamily": "family",
    "horizontalalignment": "ha",
    "verticalalignment": "va",
    "linewidths": "linewidth",
    "colors": "color",
    "ncol": "ncols",
}


class Lacking(AttributeError, TypeError, ValueError):
    """What matplotlib has and the page's charts haven't."""


def lacking(what: str) -> Lacking:
    # Without an object, Python doesn't guess what else was meant: "Did you mean: 'show'?" after plt.imshow.
    return Lacking(f"the page's charts have no {what}: open the notebook for this one", obj=None)


class Told:
    """Attributes that are lacking are told in words, and so are a public method's keyword arguments."""

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if callable(method) and not isinstance(method, type) and not name.startswith("_"):
                setattr(cls, name, told(method))

    def __getattr__(self, name: str) -> object:
        raise lacking(name)


def told(function: Callable) -> Callable:
    known = signature(function).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
        return function  # `styled` looks at these

    @wraps(function)
    def call(*given: object, **named: object) -> object:
        for name in named.keys() - known.keys():
            raise lacking(f"{name}= for {function.__name__}")
        return function(*given, **named)

    return call


def styled(given: dict, known: str, what: str) -> dict:
    """The style with long names; `known` are those that `what` can have."""
    style = {_LONG.get(name, name): value for name, value in given.items()}
    for name in style.keys() - set(known.split()):
        raise lacking(f"{name}= for {what}")
    return style


def colour(given: object, alpha: float | None = None) -> tuple[str, float]:
    """A colour as #rrggbb, or "none", and its opacity. A ValueError names what it can't read."""
    opacity = 1 if alpha is None else alpha
    if given is None or isinstance(given, str) and given == "none":
        return "none", 1
    if isinstance(given, tuple | list) and len(given) == 2:
        return colour(given[0], given[1] if alpha is None else alpha)
    if isinstance(given, tuple | list) and len(given) in (3, 4):
        channels = "".join(f"{round(255 * channel):02x}" for channel in given[:3])
        return f"#{channels}", given[3] if len(given) == 4 and alpha is None else opacity
    if isinstance(given, str) and given.startswith("#") and len(given) == 7:
        return given.lower(), opacity
    if given in _NAMED:
        return _NAMED[given], opacity
    try:
        return "#" + f"{round(255 * float(given)):02x}" * 3, opacity  # "0.5": a grey
    except (TypeError, ValueError):
        raise lacking(f"colour {given!r}, but '#rrggbb', 'C0' to 'C9', 'tab:blue' and greys like '0.5'") from None


def dashes(linestyle: object, width: float) -> str:
    """Lengths of lines and gaps as SVG wants them; empty for a solid line."""
    if linestyle in SOLID:
        return ""
    if not isinstance(linestyle, tuple) and linestyle not in _DASHES:
        raise lacking(f"linestyle {linestyle!r}, but '-', '--', ':' and '-.'")
    lengths = linestyle[1] if isinstance(linestyle, tuple) else _DASHES[linestyle]
    return " ".join(number(length * width) for length in lengths)


def width_of(line: str, size: float, bold: bool = False, monospaced: bool = False) -> float:
    """Points that a line of text takes."""
    if monospaced:
        return len(line) * MONOSPACED * size / 1000
    units = sum(_WIDTHS[ord(c) - 32] if " " <= c <= "~" else 500 if c in "–’·" else 838 for c in line)
    return units * size / 1000 * (BOLDER if bold else 1)


def plain(text: object, parse_math: bool = True) -> str:
    """Text as it is shown: a formula between two dollars isn't."""
    text = str(text)
    dollars = text.count("$") - text.count(r"\$")
    if parse_math and dollars and dollars % 2 == 0:
        raise lacking(f"formulas between dollars, got {text!r} (parse_math=False leaves them as they are)")
    return text.replace(r"\$", "$") if parse_math else text


def number(x: float) -> str:
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def listed(given: object) -> list:
    """One or several as a list; text is one."""
    return list(given) if hasattr(given, "__iter__") and not isinstance(given, str) else [given]
