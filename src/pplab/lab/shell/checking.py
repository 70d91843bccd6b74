"""`pplab check`: what somebody holds when it breaks; what it is, what the framework does with it, and what is wrong."""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import expect
from ...schedule import plural
from ...simulator import simulate, validate
from ..forms import CLASSES, read_csv
from ..planning import empty_stages, formulas, has_rows_of, read_config, read_launch, stages_of
from .cli import JSON, Command, check_lowered, flag, write

_MOST = 2**18  # characters
_FORMS = (
    "a launch line of Megatron-LM, a layout such as Et*3|(tt|)*29,m|L, a model's config.json, or a schedule, as CSV or "
    "as torch prints it"
)
_OF_A_MODEL = {"model_type", "architectures", "hidden_size", "n_embd", "text_config"}
_HELD = {
    "1F1B": formulas.one_f_one_b_peak_in_flight,
    "Interleaved1F1B": formulas.interleaved_peak_in_flight,
    "paired-1F1B": formulas.paired_peak_in_flight,
}


class Checked(NamedTuple):
    """What `check` says: which form a text has, what the framework does with it, the first rule that it breaks, and
    what wasn't looked at. `status`: 0 nothing is wrong, 1 something is, 2 it wasn't read."""

    form: str
    found: str
    wrong: str
    not_looked_at: tuple[str, ...]
    status: int

    def __str__(self) -> str:
        said = [f"{self.form}: {self.wrong or self.found}"]
        return "\n".join(said + ["not looked at: " + "; ".join(self.not_looked_at)] * bool(self.not_looked_at))


def check(text: str, *, num_layers: int | None = None, gpus: int | None = None) -> Checked:
    """Check a launch line of Megatron-LM, a layout, a model's config.json, or a schedule as CSV or as torch prints it.

    `num_layers` and `gpus` are for a line that doesn't say them. Raises ValueError only for what is no text.

    >>> print(check("Et*3|(tt|)*29,m|L"))
    layout of Megatron-LM: 32 stages with 61 layers, for 1, 2, 4, 8, 16, 32 ranks
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
    """What a text is, and what reads it."""
    if len(text) > _MOST:
        return f"these are {len(text):,} characters, and at most {_MOST:,} are read", None
    if text.startswith("{") and '"' in text:
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"this begins as JSON does, and isn't: {error}", None
        return ("config.json", _config) if _OF_A_MODEL & {*fields} else ("this JSON has no model's fields", None)
    if re.fullmatch(r"['\"]?E[EtmL|*()\d,\s'\"]*", text):
        return "layout of Megatron-LM", _layout
    if re.search(r"micro[-_]batch[-_]size|model[-_]parallel[-_]size", text):
        many = text.count("torchrun ") > 1
        return ("these are several launch lines: give one", None) if many else ("launch line of Megatron-LM", _launch)
    if re.search(r"(?i)\b\d+[FBIW]\d+\b|\b[FBIW]\d+_s\d+\b", text):
        return "schedule", _schedule
    return "this is none of them", None


def _launch(text: str, num_layers: int | None, gpus: int | None) -> tuple[str, list[str]]:
    asked, ignored, _ = read_launch(text, num_layers=num_layers, gpus=gpus)
    layout, name, V = asked["layout"], asked["schedule"], asked.get("stages_per_rank", 1)
    P, M = layout.pp, asked["batch"] // layout.dp // asked["microbatch"]
    held = _HELD[name](P, M, *([V] if V > 1 else []))[0]
    found = (
        f"{layout.num_ranks} GPUs, tp {layout.tp} cp {layout.cp} pp {P} dp {layout.dp}; {plural(M, 'microbatch')} in "
        f"{name}, {plural(V, 'stage')} on each rank; bubble {formulas.bubble_fraction(P, M, V):.1%}; rank 0 has "
        f"{plural(sum(asked['cut'][::P]), 'layer')}, and at most {plural(held, 'microbatch')} of a stage in flight"
    )
    others = f"{', '.join(ignored[:9])}{' ...' * (len(ignored) > 9)}" if ignored else "other flags"
    return found, [f"{others}; what an environment variable, a data set or a kernel asks for"]


def _layout(text: str, *_: object) -> tuple[str, list[str]]:
    stages = stages_of(text)
    ranks = [str(n) for n in range(1, len(stages) + 1) if len(stages) % n == 0]
    layers = sum(stage.count("t") for stage in stages)
    found = f"{plural(len(stages), 'stage')} with {plural(layers, 'layer')}, for {', '.join(ranks)} ranks"
    return found, [*empty_stages(stages), "--num-layers and --mtp-num-layers"]


def _config(text: str, *_: object) -> tuple[str, list[str]]:
    model, experts = read_config(json.loads(text), 4096)
    whole = experts.parameters(model) if experts else model.parameters
    found = f"{plural(model.num_layers, 'layer')}, {whole / 1e9:.4g} billion parameters"
    return found + f", {model.parameters / 1e9:.4g} in use" * bool(experts), ["norms, biases, routers"]


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
        flag("--layers", "number of layers, if a launch line doesn't say it", type=int),
        flag("--gpus", "number of GPUs, if a launch line doesn't say it", type=int),
        JSON,
    ],
    "pplab check [FILE] [options]",
    f"Check {_FORMS}. It says what it is, what the framework does with it, the first rule that it breaks with a value "
    "that works, and what it didn't look at. The exit status is 0 if nothing is wrong, 1 if something is, and 2 if it "
    "can't be read.",
    {
        "Does Megatron-LM take this line?": "pplab check train.sh",
        "What is in this model?": "pplab check config.json",
    },
)
