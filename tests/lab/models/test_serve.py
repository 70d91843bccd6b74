"""Decoding in a pipeline says what one process says; one group of requests gains nothing, as many as ranks do."""

from __future__ import annotations

import pytest
import torch

from pplab.lab import decode, models
from pplab.runtime import Pool, RankError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpt() -> models.LanguageModel:
    return models.gpt(num_layers=4, width=32, num_heads=2, context=16, source="sample")


def one_process(gpt: models.LanguageModel, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    model, windows = gpt.build_whole().eval(), prompts
    made = []
    for _ in range(new_tokens):
        with torch.no_grad():
            made.append(model(windows)[:, -1].argmax(-1))
        windows = torch.cat([windows[:, 1:], made[-1][:, None]], 1)
    return torch.stack(made, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tokens_are_those_of_one_process(gpt, ranks):
    prompts = gpt.batch(0).inputs[0][:6]
    with Pool(ranks, device="cpu") as pool:
        for groups in (1, 2, 3):
            answers = pool.run(decode, gpt, prompts, groups, 5)
            assert [a.tokens is None for a in answers] == [True] * (ranks - 1) + [False]
            assert torch.equal(answers[-1].tokens, one_process(gpt, prompts, 5))


@pytest.mark.timed
def test_groups_fill_the_ranks(gpt):
    """With a pace of 20 ms a stage: 10 tokens of one group take 2 x 10 turns, of two groups hardly more."""
    prompts = gpt.batch(0).inputs[0][:4]
    with Pool(2, device="cpu") as pool:
        one, two = (pool.run(decode, gpt, prompts, groups, 10, 0.02)[-1].seconds for groups in (1, 2))
    assert one >= 20 * 0.02 and two >= 21 * 0.02
    assert two < 1.5 * one  # in turns, without any overlap, it would be 40


def test_requests_that_do_not_divide(gpt):
    with Pool(1, device="cpu") as pool, pytest.raises(RankError, match="3 requests don't divide into 2 equal groups"):
        pool.run(decode, gpt, gpt.batch(0).inputs[0][:3], 2, 1)
