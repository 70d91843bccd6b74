"""Checkers of the chapter on the naive pipeline refuse wrong answers and say what is wrong; what is right, its
solutions show."""

from __future__ import annotations

import ast
import json
import re
from itertools import product
from pathlib import Path

import pytest
from checkers import raises, slow, table_tests

from pplab.lab import Case
from pplab_course import naive as exercise
from pplab_course import spine

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PIPE = (NOTEBOOKS / "pipe_naive.py").read_text()


def skip_forgotten(stage, arrived, down):
    x = arrived.requires_grad_()
    y = stage(x)
    y.backward(down(y, x)[0])
    return x.grad


def stage_forgotten(stage, arrived, down):
    return down(stage(arrived), arrived)[1]


def own_part_only_of_the_skip(stage, arrived, down):
    x = arrived.requires_grad_()
    y = stage(x)
    gradient, of_skip = down(y, x)
    y.backward(gradient)
    return of_skip


def sent_changed(stage, arrived, down):
    x = arrived.requires_grad_()
    y = stage(x)
    gradient, of_skip = down(y, 2 * x)
    y.backward(gradient)
    return x.grad + of_skip


def asked_for_no_gradient(stage, arrived, down):
    y = stage(arrived)
    gradient, of_skip = down(y, arrived)
    y.backward(gradient)
    return arrived.grad + of_skip


def sent_twice(stage, arrived, down):
    down(stage(arrived), arrived)
    return stage_forgotten(stage, arrived, down)


def swapped(stage, arrived, down):
    return down(arrived, stage(arrived))


def nan_sent(stage, arrived, down):
    return own_part_only_of_the_skip(stage, arrived, down) * float("nan")


EIGHTS = [("large", 8)] * 4
RIGHT = {"A": 3, "B": 4, "C": 5, "D": 7, "E": 1}

WRONG = [
    (exercise.faster_network, 295, "at $2 an hour"),
    (exercise.faster_network, 353, "with the slower network's messages"),
    (exercise.faster_network, 81.1, "one GPU's share"),
    (exercise.faster_network, 321, "321 is near; the number is a little larger"),
    (exercise.faster_network, float("nan"), "nan isn't it"),
    (exercise.faster_network, "324 dollars", "write it without quotes"),
    (exercise.faster_network, True, "expected a number"),
    (exercise.moved_layers, (33.6, 5.07), "ms: the slowest rank becomes that much faster. Does it set the pace"),
    (exercise.moved_layers, (11.2, 5.07), "ms: the slowest rank becomes that much faster. Does it set the pace"),
    (exercise.moved_layers, (0, 3.93), "GB: that is only the layer's state. What does it keep of a sequence?"),
    (exercise.moved_layers, (0, 1.14), "GB: that is only what the layer keeps of a sequence. It has state, too"),
    (exercise.moved_layers, (0, 55.1), "GB: that is what the fullest rank holds. By how much does it grow?"),
    (exercise.moved_layers, (0, 10.13), "GB: rank 0 gets one layer more, not two"),
    (exercise.moved_layers, (5.07, 0), "the right numbers, swapped: expected ms, then GB"),
    (exercise.moved_layers, (float("nan"), 5.07), "ms: nan isn't it"),
    (exercise.moved_layers, 0, "expected 2 numbers"),
    (exercise.diagnose, "no detach", "expected a dict"),
    (exercise.diagnose, dict.fromkeys("ABCDE", "ones"), "A: expected the number of a cause, 1 to 7, got 'ones'"),
    (exercise.diagnose, RIGHT | {"E": True}, "E: expected the number of a cause"),
    (exercise.diagnose, RIGHT | {"E": float("nan")}, "E: expected the number of a cause"),
    (exercise.diagnose, RIGHT | {"E": 0}, "E: expected the number of a cause"),
    (exercise.diagnose, RIGHT | {"A": 7, "D": 3}, "3 of 5 are right. To find out which, make each mistake"),
    (exercise.diagnose, dict.fromkeys("ABCDE", 2), "0 of 5 are right"),
    (exercise.cheapest, 3, "expected a list of a pair per machine"),
    (exercise.cheapest, [], "expected a list of a pair per machine"),
    (exercise.cheapest, "large", "expected a list of a pair per machine"),
    (exercise.cheapest, ("large", 32), "expected a pair such as"),
    (exercise.cheapest, [("huge", 32)], "expected a pair such as"),
    (exercise.cheapest, [([], 32)], "expected a pair such as"),
    (exercise.cheapest, [("large", 32.0)], "a whole number of layers, 1 or more, got 32.0"),
    (exercise.cheapest, [("large", 33), ("large", -1)], "a whole number of layers, 1 or more, got -1"),
    (exercise.cheapest, EIGHTS[1:], "your machines have 24 layers, and the model has 32"),
    (exercise.cheapest, EIGHTS, "it fits, and costs $321: $121 more"),
    (exercise.cheapest, [("large", 16)] * 2, "rank 0 would hold 90.5 GB and has 80, rank 1 would hold 90.5 GB"),
    (exercise.cheapest, [("large", 32)], "rank 0 would hold 181.0 GB and has 80"),
    (exercise.cheapest, [("large", 11), ("large", 10), ("large", 11)], "it fits, and costs $232: $32 more"),
    (exercise.cheapest, [("small", 8), ("small", 9), ("large", 15)], "rank 0 would hold 50.0 GB and has 48"),
    (exercise.cheapest, [("large", 13), ("small", 6), ("large", 13)], "it fits, and costs $204: $3 more"),
    slow(exercise.middle_rank, skip_forgotten, "the gradients of rank 0 aren't those of one process, those of rank 1"),
    slow(exercise.middle_rank, stage_forgotten, "rank 1's stage has no gradient"),
    slow(exercise.middle_rank, own_part_only_of_the_skip, "the gradients of rank 0 aren't those of one process"),
    slow(exercise.middle_rank, nan_sent, "the gradients of rank 0 aren't those of one process"),
    slow(exercise.middle_rank, sent_changed, "the gradients of rank 0 and 1 and 2 aren't those of one process"),
    slow(exercise.middle_rank, asked_for_no_gradient, "a tensor that nobody asked for a gradient has None"),
    slow(exercise.middle_rank, sent_twice, "down was called 2 times"),
    slow(exercise.middle_rank, swapped, "down takes as output a tensor of shape (4, 6), got one of shape (4, 8)"),
    slow(exercise.middle_rank, lambda stage, arrived, down: arrived, "down was called 0 times"),
    slow(exercise.middle_rank, lambda stage, x, down: down(stage(x), x)[0], "got one of shape (4, 6)"),
    slow(exercise.middle_rank, lambda stage, x, down: down(stage(x), x) and None, "of shape (4, 8), got None"),
    slow(exercise.middle_rank, lambda stage, x, down: down(stage(x), x), r"got 2 things (Tensor, Tensor): one is"),
    slow(exercise.middle_rank, lambda stage, x, down: down(stage(x), x) and 3, "got a thing of type int"),
    slow(exercise.middle_rank, raises, "your function raised IndexError"),
    slow(exercise.middle_rank, 3, "expected a function of (stage, arrived, down)"),
]

test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG, later=False)


def test_every_right_answer_is_accepted():
    """A bill is given to a dollar or two."""
    assert exercise.moved_layers(0, 5.07) and exercise.moved_layers((0.0, 5.1))
    assert all(exercise.faster_network(dollars) for dollars in (323, 324, 324.5, 325))
    assert exercise.cheapest((["small", 4], ["large", 15], ["large", 13]))
    assert "$200.3, and we know nothing cheaper" in exercise.cheapest([("small", 4), ("large", 15), ("large", 13)]).says
    assert exercise.diagnose(RIGHT)


def test_nothing_is_cheaper_than_the_best_that_the_checker_knows():
    """Every row of up to six machines. The chain is a sum, so that layers go to the fastest that have room for them."""
    case, found = Case(), []
    layer_gb = case.state_gb()[1] / 8 + case.sequence_gb()[1] / 8
    end_gb = case.state_gb()[0] - case.state_gb()[1]  # the embedding, or the head
    for count in range(2, 7):
        for names in product(exercise.MACHINES, repeat=count):
            ends = [end_gb * (rank in (0, count - 1)) for rank in range(count)]
            room = [int((exercise.MACHINES[name][0] - end) / layer_gb) for name, end in zip(names, ends, strict=True)]
            if sum(room) < 32:
                continue
            cut, left = [1] * count, 32 - count
            for rank in sorted(range(count), key=lambda rank: -exercise.MACHINES[names[rank]][1]):
                more = min(left, room[rank] - 1)
                cut[rank], left = cut[rank] + more, left - more
            held, dollars = exercise.naively(names, cut)
            assert all(gb <= exercise.MACHINES[name][0] for gb, name in zip(held, names, strict=True))
            found.append((dollars, names, tuple(cut)))
    best = min(found)
    assert best[0] == pytest.approx(exercise.CHEAPEST_DOLLARS, abs=0.05)
    assert best[1:] == (("small", "large", "large"), (4, 15, 13)) and len(found) > 50


def broken(folder, *changes):
    """A copy of the course's file with each text replaced by another; the text must be there once."""
    text = PIPE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "my_pipe.py").write_text(text)
    return folder / "my_pipe.py"


BACKWARD = "    y.backward(receive(rank + 1, torch.ones_like(y)))"
BROKEN = {
    1: [(".requires_grad_()", "")],
    2: [("inputs, targets = torch.randn", "torch.manual_seed(1 + rank)\ninputs, targets = torch.randn")],
    3: [("    send(y, rank + 1)\n", "    gradient = receive(rank + 1, torch.ones_like(y))\n    send(y, rank + 1)\n")]
    + [(BACKWARD, "    y.backward(gradient)")],
    4: [("    send(x.grad, rank - 1)", "    send(torch.ones_like(x), rank - 1)")],
    5: [("    stage.zero_grad()\n", "")],
    6: [("stage = model[12 * rank // ranks :", "stage = model[max(0, 12 * rank // ranks - 1) :")],
    7: [
        (
            BACKWARD,
            BACKWARD.replace("y.backward(", "gradient = (")
            + "\n    if rank == ranks - 1:\n        y.backward(gradient)",
        )
    ],
    8: [("        tensor = torch.empty_like(tensor)  # a message doesn't tell its shape\n", "")],  # none of the causes
    9: [("tensor = torch.empty_like(tensor)  # a", "came = torch.empty_like(tensor)  # a")]
    + [("dist.recv(tensor, source)", "dist.recv(came, source)")],  # which isn't returned
}
SAID = {  # by the checker of the reader's file, which knows no cause
    1: "rank 1 fails in step, .*send.*NoneType.* nobody asked for a gradient has None",
    2: "gradients of ranks 0 and 1 differ from one process's",
    3: "it hasn't ended after .* rank 0 stands in step, .*receive.*; rank 1 stands in step, .*receive",
    4: "gradients of rank 0 differ .*; those of rank 1 are right",
    5: "every gradient is 3 times one process's",
    6: "the ranks' stages have 52 parameters, the model 48",
    7: "rank 0 fails .*: AssertionError: rank 0 has no gradients",
    8: "gradients of ranks 0 and 1 differ .*batch of rank 1 isn't that of rank 0: .*`receive` filled the tensor",
    9: "gradients of ranks 0 and 1 differ .*; `receive` doesn't return the tensor that `dist.recv` fills",
}


@pytest.mark.slow
@pytest.mark.parametrize("cause", BROKEN, ids=lambda cause: dict(enumerate(exercise.CAUSES, 1)).get(cause, f"{cause}"))
def test_the_symptoms_are_those_of_the_causes(tmp_path, monkeypatch, cause):
    """Each mistake is made and run, also the two whose symptoms aren't shown."""
    monkeypatch.setattr(spine, "LIMIT_S", 6.0)
    says = spine.naive_file(broken(tmp_path, *BROKEN[cause])).says
    assert re.search(SAID[cause], says), says


def test_every_symptom_has_a_cause_and_two_causes_have_none():
    assert set(exercise.symptoms()) == set(RIGHT) and set(range(1, 8)) - set(RIGHT.values()) == {2, 6}
    assert len(exercise.CAUSES) == len(BROKEN) - 2


def test_the_page_folds_away_the_functions_of_the_courses_file():
    cells = json.loads((NOTEBOOKS / "02_naive.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    folded = re.search(r"One way to write them.*?```python\n(.*?)```", text, flags=re.S)[1]
    functions = [node for node in ast.parse(PIPE).body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions] == ["send", "receive", "step"]
    assert ast.dump(ast.parse(folded)) == ast.dump(ast.Module(functions, []))
