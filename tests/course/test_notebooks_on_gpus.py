"""What the notebooks train is possible on a machine with one, two or four GPUs: read from their cells, not run."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime.devices import choose_transport
from pplab.runtime.options import make_job

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
BY_TORCH = ("versus", "train_lowered")  # functions that take a pool and run torch's engine on it


def code_of(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    lines = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code").splitlines()
    return "\n".join("" if line.startswith(("%", "!")) else line for line in lines)


def called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", None) or getattr(function, "id", "")


def bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement or a part of it sets, each with what it is made of."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            pairs = zip(names, values, strict=True)
        case ast.Assign(targets=targets, value=value):
            pairs = [(target, value) for target in targets]
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            pairs = [(target, value)]
        case ast.withitem(context_expr=value, optional_vars=ast.Name() as target):
            pairs = [(target, value)]
        case _:
            return
    for target, value in pairs:
        yield from ((name.id, value) for name in ast.walk(target) if isinstance(name, ast.Name))


def sources(value: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression that its value may come from; of a method's call, what it is called on."""
    yield value
    method = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    for part in [value.func] if method else ast.iter_child_nodes(value):
        yield from sources(part)


def trained(code: str) -> list[tuple[int, dict, str, bool]]:
    """Every use of a pool for training: the line, the pool's arguments, the engine, whether messages may be late.

    The engine is torch's where anything that an extra, other than a pace, may be made of is `TorchEngine`, and a pace
    is late if anything that it may be made of is: what a method is called on, and not what it is given.
    """
    nodes = list(ast.walk(ast.parse(code)))
    made, pools = defaultdict(list), defaultdict(list)
    for name, value in (pair for node in nodes for pair in bindings(node)):
        made[name].append(value)
        if called(value) == "Pool":
            options = {each.arg: ast.literal_eval(each.value) for each in value.keywords}
            pools[name].append((value.lineno, {"num_ranks": ast.literal_eval(value.args[0]), **options}))

    def late(value: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        parts = list(sources(value))
        if any(
            called(n) == "Costs" and {"latency", "bandwidth", "links"} & {each.arg for each in n.keywords}
            for n in parts
        ):
            return True
        names = {n.id for n in parts if isinstance(n, ast.Name)} - seen
        return any(late(other, seen | names) for name in names for other in made[name])

    def by_torch(value: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        nodes = [] if called(value) == "Pace" else list(ast.walk(value))
        if any("TorchEngine" in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in nodes):
            return True
        names = {n.id for n in nodes if isinstance(n, ast.Name)} - seen
        return any(by_torch(other, seen | names) for name in names for other in made[name])

    found = []
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        methods = [n for n in (call.func, *call.args) if isinstance(n, ast.Attribute) and n.attr == "train"]
        always = called(call) in BY_TORCH and bool(call.args)
        (pool,) = [call.args[0]] if always else [n.value for n in methods] or [None]
        if pool is None:
            continue
        options = {each.arg: each.value for each in call.keywords}
        engine = "torch" if always or any(map(by_torch, call.args[2:])) else "pplab"
        _, arguments = max((each for each in pools[pool.id] if each[0] <= call.lineno), key=lambda each: each[0])
        paces = [n.args[0] for given in call.args[2:] for n in ast.walk(given) if called(n) == "Pace"]
        paces += [options["pace"]] if "pace" in options else []  # of torch's interpreter
        found.append((call.lineno, arguments, engine, any(map(late, paces))))
    return found


def refused(code: str) -> list[str]:
    """What this machine refuses of it, with the lines."""
    said = []
    for line, pool, engine, late in trained(code):
        ranks = pool["num_ranks"]
        try:
            places, transport = choose_transport(ranks, pool.get("device", "auto"), pool.get("transport", "auto"))
            s = pp.build("1F1B", num_ranks=ranks, num_microbatches=8)
            pace = pp.Costs(10, 10, 10, latency=3, unit="ms") if late else None
            extras = [*([lab.TorchEngine()] if engine == "torch" else []), *([lab.Pace(pace)] if pace else [])]
            job = make_job(s, models.gpt(batch_size=8), ranks, extras)
            for extra in job.extras:
                extra.check_devices(job, places, transport)
        except ValueError as error:
            said.append(f"{code.splitlines()[line - 1].strip()}: {error}")
    return said


@pytest.fixture(params=[1, 2, 4], ids=["1 GPU", "2 GPUs", "4 GPUs"])
def gpus(request, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return request.param


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_is_refused(path, gpus):
    code = code_of(path)
    assert trained(code)
    assert refused(code) == []


def test_what_is_refused_is_found(gpus):
    code = """
with Pool(4, transport="gloo") as pool:
    [pool.train(s, gpt, *extras) for extras in ((), (lab.TorchEngine(),))]
pool, runs = Pool(4), {}
pool.train(s, gpt)
late = pp.Costs(20, 20, 20, latency=20, unit="ms")
for name, pace in {"late": late}.items():
    pool.train(s, gpt, lab.Pace(pace))
pool = Pool(4, device="cpu")
pool.train(s, gpt, lab.Pace(late))
versus(pool, s, gpt)
"""
    assert [(line, engine, slow) for line, _, engine, slow in sorted(trained(code), key=lambda each: each[0])] == [
        (3, "torch", False),
        (5, "pplab", False),
        (8, "pplab", True),
        (10, "pplab", True),
        (11, "torch", False),
    ]
    said = " ".join(refused(code))
    assert "torch's runtime can't send between ranks that share a GPU" in said
    assert ("latency or bandwidth needs transport" in said) == (gpus == 4)
