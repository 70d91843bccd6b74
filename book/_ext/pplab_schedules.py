"""What the page's explorer knows about the package's schedules, derived from the registry when the page is built.

The page makes the rows of a schedule itself, for any sizes, if core.js has a function for it. For other schedules the
page gets the package's rows, for some sizes, so a new schedule needs nothing here to show up. Where costs decide the
order, as in one that is searched for, these are the rows for equal times.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product

from pplab import validate
from pplab.builders import Builder, known
from pplab.lab.forms import STATIC, TOLD, in_script

SIZES = {"num_ranks": (2, 4, 8), "num_microbatches": (4, 8, 16, 32), "stages_per_rank": (2,)}


def script() -> str:
    """The script that core.js needs before it: the schedules, as a global."""
    return f"var pplabSchedules = {in_script(schedules())};"


def schedules() -> list[dict]:
    """What the page learns about each schedule, in the order of the registry. `rows` are only for those that it can't
    make."""
    made = in_javascript()
    builders = known()
    rows = [{} if builder.name in made else {"rows": package_rows(builder)} for builder in builders]
    return [
        {name: getattr(builder, name) for name in TOLD} | more for builder, more in zip(builders, rows, strict=True)
    ]


def in_javascript() -> set[str]:
    """The schedules whose rows core.js makes."""
    return set(re.findall(r'^  builders\["(.+?)"\] = ', (STATIC / "core.js").read_text(), re.M))


@cache
def package_rows(builder: Builder) -> dict[str, list[str] | str]:
    """By "P,M", or "P,M,V" in a loop, a text per rank, or why the package refuses. They are made once, because some are
    searched for."""
    options = [name for name in SIZES if name in {"num_ranks", "num_microbatches", *builder.options}]
    found: dict[str, list[str] | str] = {}
    for sizes in product(*(SIZES[name] for name in options)):
        try:
            schedule = builder(**dict(zip(options, sizes, strict=True)))
            validate(schedule)
            found[",".join(map(str, sizes))] = [" ".join(map(str, row)) for row in schedule.rows]
        except ValueError as error:
            found[",".join(map(str, sizes))] = str(error)
    return found
