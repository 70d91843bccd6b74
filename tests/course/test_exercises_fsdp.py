"""Checkers of the chapter on FSDP refuse wrong answers and say what is wrong; the chapter's solutions show what is
right."""

from __future__ import annotations

import pytest
from checkers import raises, table_tests

from pplab import Link
from pplab.lab import Layout, Machine, Transformer, fsdp_plan
from pplab.lab.planning.formulas import free_tokens, sharded_step
from pplab_course import fsdp as exercise

CAUSES = {"A": "nothing", "B": "network", "C": "gradients", "D": "recomputing"}
FIRST = {"A": "FSDP", "B": "pipeline", "C": "one GPU", "D": "measure"}


WRONG = [
    (exercise.most_gpus, 349, "a rank has one n-th of the weights already"),
    (exercise.most_gpus, 351, "with one more the backward has too few tokens"),
    (exercise.most_gpus, 525, "that is with gradients in bfloat16: in fp32"),
    (exercise.most_gpus, 524, "and without (n - 1) / n"),
    (exercise.most_gpus, 1049, "that hides the forward's gather only"),
    (exercise.most_gpus, 10, "the number is much larger"),
    (exercise.tensor_ranks, 1, "4,096 tokens for each GPU"),
    (exercise.tensor_ranks, 2, "two share 8,192 tokens: enough with gradients in bfloat16"),
    (exercise.tensor_ranks, 3, "three don't divide a box of eight"),
    (exercise.tensor_ranks, 8, "eight are enough, but so are fewer"),
    (exercise.slow_teams, "network", "expected a dict with the keys A, B, C and D"),
    (exercise.slow_teams, {**CAUSES, "A": "luck"}, "A: expected one of nothing, network, gradients, recomputing"),
    (exercise.slow_teams, {**CAUSES, "B": "gradients"}, "B: not 'gradients'; why does a second sequence cost nothing?"),
    (exercise.slow_teams, {**CAUSES, "D": "nothing"}, "D: not 'nothing'; it doubles with the sequences"),
    (exercise.boxes, {**FIRST, "B": "FSDP"}, "B: not 'FSDP'; what would every GPU have to send"),
    (exercise.boxes, {**FIRST, "D": "hope"}, "D: expected one of FSDP, pipeline"),
    (exercise.rent, (25, True), "expected a function of (sequences, price)"),
    (exercise.rent, raises, "at 4 sequences and $2.00: your function raised"),
    (exercise.rent, lambda sequences, price: 25, "your function raised TypeError"),
    (exercise.rent, lambda sequences, price: (25, "yes"), "expected (25 or 100, True or False)"),
    (exercise.rent, lambda sequences, price: (25, True), "12.7% too dear: $110.5 with 8 sequences at $2.00"),
    (exercise.rent, lambda sequences, price: (100, True), "where 25 gigabits with a pipeline cost"),
]

test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_right_answers_may_differ():
    assert (
        exercise.most_gpus(350.0) and exercise.tensor_ranks(4) and exercise.slow_teams(CAUSES) and exercise.boxes(FIRST)
    )

    def simplest(sequences, price):
        return (100, sequences > 16) if price < (2.25 if sequences == 8 else 2.15) else (25, True)

    assert not exercise.rent(simplest)  # with four sequences a gather has to be hidden behind one
    assert exercise.rent(lambda m, price: (100, m not in (8, 16)) if price < 2.2 - 0.05 * (m != 8) else (25, True))


def test_the_tables_follow_from_the_law():
    for name, (G, backward) in {"A": (0.3, 2), "B": (5, 2), "C": (0.8, 2), "D": (0.3, 3)}.items():
        passes = ((1, 2 * G), (2, 2 * G), (1, G))
        assert exercise.TEAMS[name] == pytest.approx([sharded_step(1, n, backward * n, G, R) for n, R in passes])
    enough = [free_tokens(n, exercise.FLOPS, exercise.BANDWIDTH, r=4) * n <= exercise.TOKENS for n in (350, 351)]
    assert enough == [True, False]


@pytest.mark.parametrize(("tp", "hidden"), [(2, False), (4, True)])
def test_as_many_tensor_ranks_as_a_plan_needs(tp, hidden):
    """By the replicas' gathers and sums in a planned step, not by the law of tokens."""
    model, links = Transformer(32, 4096, 4096), (Link(0, 450e9), Link(0, exercise.BANDWIDTH))
    machine = Machine(8, *links, exercise.FLOPS, memory=1e15)
    layout, batch = Layout(tp=tp, dp=exercise.GPUS // tp), exercise.TOKENS // model.sequence
    found = fsdp_plan(model, machine, layout, batch, batch // layout.dp, zero=3)
    assert (found.dp_s < 0.01 * found.step_s) == hidden


@pytest.mark.slow
def test_fsdp_learns_what_one_process_learns():
    import torch

    from pplab.lab import models
    from pplab.runtime import Pool

    workload = models.gpt(batch_size=4, source="sample", num_layers=2, width=32, context=16)
    model = workload.build_whole()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(2):
        batch = workload.batch(step)
        losses.append(workload.loss(model(*batch.inputs), batch.target))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with Pool(2, device="cpu") as pool:
        found = pool.run(exercise.by_fsdp, workload, 2)[1][1]
    assert found == pytest.approx([loss.item() for loss in losses], rel=1e-5)
