"""`pplab check`: find out what a text is, what the framework does with it, and what is wrong with
it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from ...builders import build, find
from ...errors import expect
from ...schedule import plural
from ...simulator import simulate, validate
from ..forms import CLASSES, read_csv
from ..planning import (
    Layout,
    empty_stages,
    has_rows_of,
    read_config,
    read_launch,
    read_titan,
    stages_of,
)
from .cli import JSON, Command, check_lowered, flag, write

_MOST = 2**18  # characters
_FORMS = (
    "a launch line of Megatron-LM, torchtitan's flags or configuration, a layout such as "
    "Et*3|(tt|)*29,m|L, a model's config.json, or a schedule, as CSV or as torch prints it"
)
_OF_A_MODEL = {"model_type", "architectures", "hidden_size", "n_embd", "text_config"}
_NOBODY = "what an environment variable, a data set or a kernel asks for"


class Checked(NamedTuple):
    """What `check` found: the form of a text, what the framework does with it, the first rule that
    it breaks, and what wasn't looked at. `status` is 0 if nothing is wrong, 1 if something is, and
    2 if the text couldn't be read.
    """

    form: str
    found: str
    wrong: str
    not_looked_at: tuple[str, ...]
    status: int

    def __str__(self) -> str:
        said = [f"{self.form}: {self.wrong or self.found}"]
        return "\n".join(
            said + ["not looked at: " + "; ".join(self.not_looked_at)] * bool(self.not_looked_at)
        )


def check(text: str, *, num_layers: int | None = None, gpus: int | None = None) -> Checked:
    """Check a launch line of Megatron-LM, torchtitan's flags or configuration, a layout, a model's
    config.json, or a schedule as CSV or as torch prints it.

    A layout may also be lists, as in Megatron Bridge's recipes. Give `num_layers` and `gpus` for a
    text that doesn't have them. Raises ValueError only for what is no text.

    >>> print(check("Et*3|(tt|)*29,m|L"))
    layout of Megatron-LM: 32 stages with 61 layers, for 2 or 4 or 8 or 16 or 32 ranks
    not looked at: --num-layers and --mtp-num-layers
    """
    expect(str, text=text)
    text = text.replace("\r\n", "\n")
    form, read = _form(text.strip())
    if read is None:
        return Checked("not read", "", f"{form}; pplab check reads {_FORMS}", (), 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found, unread = read(text, num_layers, gpus)
        except ValueError as error:
            wrong = str(error)
            return Checked(form, "", wrong, (), 2 if "doesn't say" in wrong else 1)
    return Checked(form, found, "", (*(str(each.message) for each in told), *unread), 0)


def _form(text: str) -> tuple[str, Any]:
    """The form of a text, and the function that reads it."""
    if "nccl:" in text or "pg_config" in text:
        return (
            "this is a dump of NCCL's flight recorder: give those of all ranks to pplab explain",
            None,
        )
    if len(text) > _MOST:
        return f"these are {len(text):,} characters, and at most {_MOST:,} are read", None
    if text.startswith("{") and '"' in text:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"this begins as JSON does, and isn't: {error}", None
        return (
            ("config.json", _config)
            if _OF_A_MODEL & {*fields}
            else ("this JSON has no model's fields", None)
        )
    if re.fullmatch(r"['\"]?E[EtmL|*()\d,\s'\"]*|\[.*\b(embedding|decoder)\b.*", text, re.DOTALL):
        return "layout of Megatron-LM", _layout
    if re.search(r"pipeline[-_]parallel[-_]degree|data[-_]parallel[-_]shard[-_]degree", text):
        return "torchtitan", _titan
    if re.search(r"micro[-_]batch[-_]size|model[-_]parallel[-_]size", text):
        many = text.count("torchrun ") > 1
        return (
            ("these are several launch lines: give one", None)
            if many
            else ("launch line of Megatron-LM", _launch)
        )
    if re.search(r"(?i)\b\d+[FBIW]\d+\b|\b[FBIW]\d+_s\d+\b", text):
        return "schedule", _schedule
    return "its form isn't known here", None


def _launch(text: str, num_layers: int | None, gpus: int | None) -> tuple[str, list[str]]:
    asked, ignored, _ = read_launch(text, num_layers=num_layers, gpus=gpus)
    layout, name = asked["layout"], asked["schedule"]
    M = asked["batch"] // layout.dp // asked["microbatch"]
    found = _step(layout, name, M, asked.get("stages_per_rank", 1))
    found += f", and {plural(sum(asked['cut'][:: layout.pp]), 'layer')}"
    if (
        layout.tp * layout.cp > 1
        and name != "paired-1F1B"
        and not re.search(r"MAX_CONNECTIONS=1\b", text)
    ):
        found += (
            "; before Blackwell Megatron-LM stops here unless CUDA_DEVICE_MAX_CONNECTIONS is 1 "
            "(arguments.py:1477)"
        )
    others = f"{', '.join(ignored[:9])}{' ...' * (len(ignored) > 9)}" if ignored else "other flags"
    return found, [f"{others}; {_NOBODY}"]


def _titan(text: str, num_layers: int | None, gpus: int | None) -> tuple[str, list[str]]:
    x = read_titan(text, num_layers, gpus)
    unread = ["a number of layers"] * (not num_layers) + [_NOBODY]
    if x.pp == 1:
        return f"{x.gpus} GPUs, tp {x.tp} cp {x.cp} dp {x.dp}, without a pipeline", unread
    if not x.whole:
        return f"{plural(x.M, 'microbatch')} on {plural(x.pp, 'rank')}", [
            "modules, or rows in a file",
            *unread,
        ]
    return _step(Layout(x.tp, x.pp, x.dp, cp=x.cp), x.name, x.M, x.V), unread


def _step(layout: Layout, name: str, M: int, V: int) -> str:
    """What the ranks do in a step, in a line."""
    if layout.pp * M * V > _MOST:
        raise ValueError(f"steps of up to {_MOST:,} forwards are checked: give a smaller batch")
    options = {"stages_per_rank": V} if "stages_per_rank" in find(name).options else {}
    rows = build(name, num_ranks=layout.pp, num_microbatches=M, **options)
    return (
        f"{layout.num_ranks} GPUs, tp {layout.tp} cp {layout.cp} pp {layout.pp} dp {layout.dp}; "
        f"{plural(M, 'microbatch')} in {name}, {plural(V, 'stage')} on each rank; bubble "
        f"{simulate(rows).bubble_fraction:.1%}; rank 0 has at most {rows.peak_in_flight[0]} in "
        "flight"
    )


def _layout(text: str, *_: object) -> tuple[str, list[str]]:
    stages = stages_of(text)
    n, layers = len(stages), "".join(stages).count("t")
    # it is on a rank's last stage
    last = next((at for at, stage in enumerate(stages) if "m" in stage), n)
    ranks = [str(P) for P in range(1 + (n > 1), n + 1) if n % P == 0 and last >= n - P]
    found = (
        f"{plural(n, 'stage')} with {plural(layers, 'layer')}, for {' or '.join(ranks)} rank"
        f"{'s' * (n > 1)}"
    )
    return found, [*empty_stages(stages), "--num-layers and --mtp-num-layers"]


def _config(text: str, *_: object) -> tuple[str, list[str]]:
    model, experts = read_config(json.loads(text), 4096)
    used = f", {model.used / 1e9:.4g} in use" * bool(experts)
    return (
        f"{plural(model.num_layers, 'layer')} ({model.pattern}), {model.parameters / 1e9:.4g} "
        f"billion parameters{used}, {model.counted}"
    ), ["norms, biases"]


def _schedule(text: str, *_: object) -> tuple[str, list[str]]:
    rows = read_csv(text + "\n")
    validate(rows)
    messages = check_lowered(text)
    name = next((name for name in CLASSES if has_rows_of(name, rows)), "rows of their own")
    step = simulate(rows)
    found = f"{name}: {repr(rows)[18:-1]}; bubble {step.bubble_fraction:.1%} if all take as long"
    return f"{found}; rank 0 holds at most {rows.peak_in_flight[0]}{messages}", ["times and shapes"]


def _run(given: argparse.Namespace) -> int:
    source = sys.stdin.buffer if given.file == "-" else Path(given.file).open("rb")
    with source as file:
        text = file.read(4 * _MOST + 1).decode("utf-8-sig", errors="replace")
    found = check(text, num_layers=given.layers, gpus=given.gpus)
    write(given, found._asdict(), [found])
    return found.status


COMMAND = Command(
    "check",
    "check what you hold when a run breaks",
    _run,
    lambda: [
        flag("file", "text file, or - for standard input", nargs="?", default="-", metavar="FILE"),
        flag("--layers", "number of layers, if a launch line doesn't have it", type=int),
        flag("--gpus", "number of GPUs, if a launch line doesn't have it", type=int),
        JSON,
    ],
    "pplab check [FILE] [options]",
    f"Check {_FORMS}. You learn what it is, what the framework does with it, the first rule that "
    "it breaks with a value that works, and what wasn't looked at. The exit status is 0 if "
    "nothing is wrong, 1 if something is, and 2 if it can't be read.",
    {
        "Does Megatron-LM take this line?": "pplab check train.sh",
        "What is in this model?": "pplab check config.json",
    },
)
