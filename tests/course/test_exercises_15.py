"""The checkers of chapter 15 refuse wrong answers and say what is wrong; the chapter's solutions show what is right."""

from __future__ import annotations

import pytest
from checkers import table_tests

from pplab import lab
from pplab.course import gpu_box as exercise
from pplab.runtime import gpu

RIGHT = {"A": "FSDP", "B": "pipeline", "C": "one GPU", "D": "measure"}
CUT = [4, 4, 4, 4, 4, 5, 4, 3]

WRONG = [
    (exercise.places, 2, "with two, every rank of the ring can be filled"),
    (exercise.places, 4, "are they the fewest?"),
    (exercise.hangs, ["0F1"], "one is missing, on rank 1"),
    (exercise.hangs, ["0F1", "1F1", "2F1"], "before 2F1 every transfer on that GPU can end"),
    (exercise.hangs, ["0F7"], "0F7 is no action of this schedule"),
    (exercise.hangs, 1, "expected a list of actions"),
    (exercise.order, [0, 1, 2, 3], "3 of the three boundaries"),
    (exercise.order, [0, 2, 1], "expected each of the GPUs 0 to 3 once"),
    (exercise.order, 3, "expected the numbers of four GPUs"),
    (exercise.boxes, {**RIGHT, "B": "FSDP"}, "B: what would every GPU have to send"),
    (exercise.boxes, {**RIGHT, "D": "hope"}, "D: expected one of FSDP, pipeline"),
    (exercise.slow_network, "ZB-V", "expected a dict of what lab.Case.row takes"),
    (exercise.slow_network, {"cut": CUT}, "which schedule?"),
    (exercise.slow_network, {"schedule": "ZB-H2", "cut": [8, 9, 8, 7]}, "it doesn't fit: rank"),
    (exercise.slow_network, {"schedule": "1F1B", "cut": [8, 9, 8, 7]}, "more than the best that we know"),
    (exercise.slow_network, {"schedule": "ZB-V", "num_microbatches": 32}, "a step has 16 sequences"),
]

test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_the_best_known_is_found_again():
    plan = exercise.SLOW.plan("ZB-V", 16, cut=CUT)
    found = lab.search(4, 16, placement="V", costs=plan.costs, memory=plan.memory, limit=80e9, tries=3000).schedule
    says = exercise.slow_network({"schedule": found, "cut": CUT}).says
    assert says.endswith(", the best that we know")


def test_the_runtime_sets_what_the_chapter_says():
    settings = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    assert gpu.ENVIRONMENT == settings
    assert gpu._MOST_CTAS == 4


def test_a_table_of_links_is_read():
    assert exercise.links(exercise.TOPOLOGY)[0, 1] == "PIX"
    assert [pair for pair, how in exercise.links(exercise.MIXED).items() if how == "PIX"] == [
        (0, 2),
        (1, 3),
        (2, 0),
        (3, 1),
    ]
    shown = "GPU0 GPU1 NIC0 CPU\nGPU0 X NV18 PXB 0-9\nGPU1 NV18 X SYS 0-9\nNIC0 PXB SYS X"
    assert exercise.links(shown) == {(0, 1): "NV18", (1, 0): "NV18"}


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
        assert pool.run(exercise.fsdp, workload, 2)[1][1] == pytest.approx([loss.item() for loss in losses], rel=1e-5)
