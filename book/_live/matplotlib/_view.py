"""One direction of axes: its limits, its scale and where its ticks are. Axes that share a direction share its view."""

from math import ceil, floor, inf, log10

from ._style import lacking


class View:
    def __init__(self) -> None:
        self.axes: list = []
        self.limits: tuple[float, float] | None = None  # where somebody set them
        self.grown: list[float] = []  # ticks that the limits have to reach
        self.log, self.base, self.margin, self.inverted, self.minor = False, 10, 0.05, False, True
        self.ticks: list[float] | None = None
        self.names: list[str] | None = None
        self._found: tuple = (None, None)

    def range(self, at: int) -> tuple[float, float]:
        """The limits: set, or what is drawn with a margin; at a bar's foot there is none."""
        if self.limits:
            return self.limits
        low, high, found = self._reach(at)
        if low == high and not self.log:
            low, high = (low - 0.05 * abs(low or 1), high + 0.05 * abs(high or 1))
        elif low == high:
            low, high = low / self.base, high * self.base
        feet = {foot for ax in self.axes for foot in ax.feet[at]}
        if self.log:
            air = (high / low) ** self.margin
            low, high = low / air, high * air
        elif found:
            air = (high - low) * self.margin
            low, high = low if low in feet else low - air, high if high in feet else high + air
        low, high = min([low, *self.grown]), max([high, *self.grown])
        return (high, low) if self.inverted else (low, high)

    def _reach(self, at: int) -> tuple[float, float, bool]:
        """Least and most of what is drawn, found once for all, and whether anything is."""
        count = sum(len(ax.artists) for ax in self.axes), self.log
        if self._found[0] != count:
            all_ = [point[at] for ax in self.axes for artist in ax.artists for point in artist.points]
            found = [x for x in all_ if x is not None and abs(x) < inf and (x > 0 or not self.log)]
            low, high = (min(found), max(found)) if found else (1, 10) if self.log else (0, 1)
            self._found = count, (low, high, bool(found))
        return self._found[1]

    def limit(self, low: object, high: object, at: int) -> None:
        if isinstance(low, tuple | list):
            low, high = low
        old = self.range(at)
        self.limits = old[0] if low is None else low, old[1] if high is None else high

    def share(self, x: float, at: int) -> float:
        """How far x lies from the first limit (0) to the second (1)."""
        low, high = self.range(at)
        if self.log:
            return log10(max(x, 1e-300) / low) / log10(high / low)
        return (x - low) / (high - low)

    def major(self, at: int, room: float) -> list[tuple[float, str]]:
        """Places and names of ticks; `room`: how many there can be."""
        low, high = sorted(self.range(at))
        places, names = self.ticks, self.names
        if places is None:
            places = self._powers(low, high, room) if self.log else even(low, high, room)
        inside = [p for p in places if low - 1e-9 * (high - low) <= p <= high + 1e-9 * (high - low)]
        if names is None:
            texts = [f"{self.base}^{round(log10(p) / log10(self.base))}" for p in inside] if self.log else named(inside)
            return list(zip(inside, texts, strict=True))
        return [(p, name) for p, name in zip(places, names, strict=False) if p in inside]

    def _powers(self, low: float, high: float, room: float) -> list[float]:
        unit = log10(self.base)
        first, last = ceil(log10(low) / unit - 1e-9), floor(log10(high) / unit + 1e-9)
        step = max(1, ceil((last - first + 1) / max(2, min(9, room + 1))))
        return [float(self.base) ** k for k in range(first, last + 1, step)]

    def small(self, at: int) -> list[float]:
        """Ticks without names, on a logarithmic scale."""
        if not (self.log and self.minor):
            return []
        low, high = sorted(self.range(at))
        unit = log10(self.base)
        powers = range(floor(log10(low) / unit), ceil(log10(high) / unit) + 1)
        found = [k * float(self.base) ** power for power in powers for k in range(2, self.base)]
        return [x for x in found if low <= x <= high]

    def rescale(self, name: str, base: int = 10) -> None:
        if name not in ("linear", "log"):
            raise lacking(f"scale {name!r}")
        self.log, self.base = name == "log", base


def even(low: float, high: float, room: float) -> list[float]:
    """At least two places at 1, 2, 2.5 or 5 times a power of ten, as many as there is room for."""
    least = (high - low) / max(1, min(9, int(room)))
    power = 10.0 ** floor(log10(least))
    steps = [unit * scale for scale in (power / 10, power) for unit in (1, 2, 2.5, 5)] + [10 * power]
    for step in reversed(
        [each for each in steps if each < least * (1 - 1e-9)] + [next(s for s in steps if s >= least * (1 - 1e-9))]
    ):
        places = [k * step for k in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]
        if len(places) > 1:
            return places
    return places


def named(places: list[float]) -> list[str]:
    """With as many decimals as it takes to tell them apart."""
    reach = max(places, default=1) - min(places, default=0) or abs(places[0]) or 1
    for digits in range(12):
        texts = [f"{place:.{digits}f}" for place in places]
        if all(abs(float(text) - place) < reach / 1000 for text, place in zip(texts, places, strict=True)):
            break
    return [text.replace("-", "−") if float(text) else text.lstrip("-") for text in texts]
