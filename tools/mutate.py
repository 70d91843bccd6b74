"""Take the waits of the code for GPUs out, one at a time, and see whether the GPUs that tests play notice.

Found in the source is every call that waits for a GPU, or chooses a stream, the current device or a group. Each is left
out, or takes another choice, in a copy of the source; then tests/fake_gpus/drill.py runs on it, and must fail. What it
doesn't notice is listed in HARMLESS with the reason, or is missed. `make attack` writes the table; a test keeps it
complete. `python tools/mutate.py pace` tries what has this word in its place, and writes nothing.

Not tried: on which device a tensor lies. All of them lie on the CPU here, and a GPU refuses to mix them, by name.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "tests" / "fake_gpus"
TABLE = FAKE / "mutations.md"
ROOMS = [path for path in sorted((ROOT / "src/pplab/lab").glob("*/*.py")) if path.parent.name != "models"]
SOURCES = [*sorted((ROOT / "src/pplab/runtime").glob("*.py")), *ROOMS]
LIMIT_S = 240

# What takes a call's place, by its name: None leaves it out. {} is the call, {0} and {1} its arguments.
INSTEAD: dict[str, list[str]] = {
    **dict.fromkeys(
        ("synchronize", "wait", "record", "settle", "_synchronize", "empty_cache", "release", "take"), ["None"]
    ),
    "query": ["True"],
    "set_device": ["None", "cuda.set_device(0)"],
    "set_stream": ["None"],
    "Stream": ["cuda.current_stream({0})"],
    "current_stream": ["cuda.Stream({0})"],
    "fork_rng": ["torch.random.fork_rng([])"],
    "set_per_process_memory_fraction": ["None"],
    "channel": ["self.channel({1}, {0})"],
    "group": ["rank.context.group('all', range(rank.context.num_ranks))"],
    "new_group": ["dist.new_group(list(ranks), backend='nccl')"],
}
# The same names, of other things.
OTHERS = {
    "explorer.py",
    "json_form.py",
    "problem.py",
    "processes.py",
    "progress.py",
    "turns.py",
}
NOT_OF_A_GPU = {"self.passed.wait()", "start().wait()"}  # of a queue that imitates a GPU on a CPU
# Not calls, or more than one: in a file, what becomes of a text.
ALSO = [
    (
        "runtime/context.py",
        'self.group("channel", (source, target))',
        'self.group("channel", sorted((source, target)))',
    ),
    ("runtime/context.py", 'self.group("channel", (source, target))', 'self.group("channel", range(self.num_ranks))'),
    ("runtime/gpu.py", "options.config.max_ctas = _MOST_CTAS", "pass"),
    (
        "runtime/gpu.py",
        "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32",
        "torch.backends.cuda.matmul.allow_tf32",
    ),
    (
        "runtime/gpu.py",
        "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32",
        "torch.backends.cudnn.allow_tf32",
    ),
    ("runtime/devices.py", "os.environ.update(ENVIRONMENT if", "dict().update(ENVIRONMENT if"),
    ("runtime/rank.py", 'if context.transport == "nccl":', "if False:"),
    ("preload.py", "gc.disable()", 'gc.disable(); __import__("torch").cuda.is_available()'),
    (
        "runtime/comm.py",
        "tensors = tuple(view.to(self.device, copy=True) for view in views)",
        "views = [*views]; slot.memory[0] = 0; tensors = tuple(view.to(self.device, copy=True) for view in views)",
    ),
    ("runtime/process_groups.py", "self.sending.append((work, tensor))", "self.sending.append((work, None))"),
    ("runtime/gpu.py", '"timeout": 2 * patience', '"timeout": patience'),
    ("runtime/gpu.py", 'self._reach(self._found["item"][-2:-1])', 'self._reach(self._found["item"][-4:-3])'),
    ("runtime/rank.py", "passes = [by_host, by_host]", "passes = [by_host]"),
    ("runtime/comm.py", "view.to(self.device, copy=True)", "view.to(self.device, copy=True, non_blocking=True)"),
    (
        "runtime/process_groups.py",
        "room = came = torch.empty(shape, dtype=dtype, device=self.device)",
        "room = came = vars(self).setdefault(str((content_of(receive)[:2], receive.microbatch % 4, part)), "
        "torch.empty(shape, dtype=dtype, device=self.device))",
    ),
    ("runtime/gpu.py", 'self._reach(self._found["item"][-2:-1])', "pass"),
    ("runtime/gpu.py", 'self._reach(self._found["item"][-2:])', "pass"),
]
ROUND_TRIP = "one message is under way at a time: any group of the two ranks will do"
ITS_STREAM = "set_stream goes to the device of its stream"
HARMLESS = {
    "runtime/gpu.py, CudaClock.tie | `cuda.synchronize()` | `None`": (
        "the first of five readings waits for what was computed before, and the closest reading counts"
    ),
    "runtime/process_groups.py, GroupComm.warm_up | `self.channel(source, target)` | `self.channel(target, source)`": (
        "neighbours have channels both ways, so each channel is opened all the same"
    ),
    "lab/experts/beside.py, Settings.__enter__ | `cuda.set_device(self.device)` | `None`": ITS_STREAM,
    "lab/experts/beside.py, Settings.__enter__ | `cuda.set_device(self.device)` | `cuda.set_device(0)`": ITS_STREAM,
    "lab/experts/beside.py, Settings.__enter__ | `cuda.set_stream(self.stream)` | `None`": (
        "a rank computes on its device's default stream, where a new thread is, too"
    ),
    "lab/extras/budget.py, train_within | `cuda.empty_cache()` | `None`": (
        "a rank has released what the job before left"
    ),
    "lab/extras/meter.py, Allocator.begin | `cuda.synchronize(self._device)` | `None`": (
        "the allocator counts when the host asks for memory, not when the GPU uses it"
    ),
    "lab/extras/pace.py, paced | `settle(device)` | `None`": "who calls it has settled",
    "lab/measuring/probe.py, message_times | `context.channel(one, other)` | `context.channel(other, one)`": ROUND_TRIP,
    "lab/measuring/probe.py, message_times | `context.channel(other, one)` | `context.channel(one, other)`": ROUND_TRIP,
    "lab/against_torch/torch_engine.py, _Rank.noting | `settle(device)` | `None`": (
        "`paced`, which follows, settles itself"
    ),
    "runtime/rank.py, as text | `passes = [by_host, by_host]` | `passes = [by_host]`": (
        "the allocator that is played splits no block, so one pass makes all the room; on a GPU nobody has tried one"
    ),
    "lab/experts/wire.py, Wire.cross | `work.wait()` | `None`": "of messages through the host's memory: not of a GPU",
}


@dataclass(frozen=True)
class Mutation:
    """A piece of a file, and its replacement."""

    path: str  # under src/pplab
    within: str  # which function
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """Its line in the table, without the result."""
        return " | ".join(
            each.replace("|", "\\|") for each in (f"{self.path}, {self.within}", f"`{self.old}`", f"`{self.new}`")
        )


def find() -> list[Mutation]:
    """All mutations of the source."""
    found, count = [], Counter()
    for path in SOURCES:
        for each in _of(path) if path.name not in OTHERS else ():
            count[each.name] += 1  # a function may have the same call twice
            again = f"{each.within} ({count[each.name]})"
            found.append(replace(each, within=again) if count[each.name] > 1 else each)
    for path, old, new in ALSO:
        text = (ROOT / "src/pplab" / path).read_text()
        assert text.count(old) == 1, f"{path} has {text.count(old)} times {old}"
        start = len(text[: text.index(old)].encode())
        found.append(Mutation(path, "as text", start, start + len(old.encode()), old, new))
    return found


def _of(path: Path) -> Iterator[Mutation]:
    text = path.read_text()
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for within, call in _calls(ast.parse(text), ""):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        old = ast.unparse(call)
        for new in INSTEAD.get(name, ()) if old not in NOT_OF_A_GPU else ():
            new = new.format(*[ast.unparse(each) for each in call.args], old)
            owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if name in ("channel", "group"):
                new = new.replace("rank.context" if name == "group" else "self", owner)
            span = (
                lines[n - 1] + at for n, at in ((call.lineno, call.col_offset), (call.end_lineno, call.end_col_offset))
            )
            if new != old:
                yield Mutation(str(path.relative_to(ROOT / "src/pplab")), within, *span, old, new)


def _calls(node: ast.AST, within: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        inner = f"{within}.{child.name}".lstrip(".") if named else within
        if isinstance(child, ast.Call):
            yield within or "the module", child
        yield from _calls(child, inner)


def tried(mutation: Mutation | None) -> str:
    """The result of the drill: the last line of its error, or "" when it notices nothing."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation:
            path = Path(folder, "pplab", mutation.path)
            text = path.read_bytes()
            path.write_bytes(text[: mutation.start] + mutation.new.encode() + text[mutation.end :])
        paths = os.pathsep.join(map(str, (FAKE, folder, ROOT / "tests", ROOT / "benchmarks")))
        environment = {**os.environ, "FAKE_GPUS": "4", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(FAKE / "drill.py")]
        try:
            done = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it doesn't end within {LIMIT_S} s"
    if done.returncode == 0 and "the drill is done" in done.stdout:
        return ""
    said = [line for line in done.stderr.splitlines() if "Error" in line and not line.startswith(" ")]
    return shortened((said or done.stderr.splitlines() or ["it ends"])[-1])


def shortened(said: str) -> str:
    """The error without its module, and without places and numbers of this run."""
    return re.split(r": all ranks were|[:, ]+(?:it was )?(?:started by|with) [\[{]", said.rpartition(".failures.")[2])[
        0
    ][:140]


def main(words: list[str]) -> int:
    """Try all, or those with one of these words in their names. Returns 1 if any is missed."""
    assert not (said := tried(None)), f"the drill fails as it is: {said}"
    asked = [each for each in find() if not words or any(word in each.name for word in words)]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as several:
        rows = {}
        for mutation, said in zip(asked, several.map(tried, asked), strict=True):
            rows[mutation.name] = (
                said or f"harmless: {HARMLESS[mutation.name]}" if said or mutation.name in HARMLESS else "MISSED"
            )
            print(f"{mutation.name}: {rows[mutation.name]}", flush=True)
    missed = sum(said == "MISSED" for said in rows.values())
    if not words:
        write(rows)
    print(f"== {len(rows)} tried, {missed} missed")
    return int(missed > 0)


def write(rows: dict[str, str]) -> None:
    """The table."""
    head = "What the GPUs that tests play notice: written by tools/mutate.py, which says what this is.\n\n"
    head += "| where | what | became | noticed by |\n|---|---|---|---|\n"
    TABLE.write_text(head + "".join(f"| {name} | {said} |\n" for name, said in rows.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
