"""Each simple planner's cuts against all partitions, by its own rule, and hand examples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.planner.planners import PLANNERS, find_planner
from pplan.planner.planners.base import refusal_reason
from pplan.planner.planners.deepspeed_partition import DeepSpeedBalance, deepspeed_ends, matching_layers
from pplan.planner.planners.rules import block_ends, repeated_blocks
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeProblem = Callable[..., Problem]


@pytest.mark.parametrize("name", ["even", "parameters"])
def test_one_stage_only_where_there_can_be_no_more(
    make_named: Callable[..., Chain], make_problem: MakeProblem, name: str
) -> None:
    """It would be data parallelism, or one GPU, which are planners of their own."""

    def replicas(problem: Problem) -> set[tuple[int, ...]]:
        return {proposal.replicas for proposal in PLANNERS[name].propose(problem)}

    chain = make_named(["a", "b", "c", "d"])
    assert replicas(make_problem(chain, 4)) == {(1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 2)}
    assert replicas(make_problem(chain, 4, max_stages=1)) == {(1,), (4,)}
    assert replicas(make_problem(chain, 1)) == {(1,)}
    assert replicas(make_problem(make_named(["a", "b"], cuts=[]), 2)) == {(1,), (2,)}


def type_ends(pattern: str | None, chain: Chain, stages: int) -> tuple[int, ...] | None:
    return deepspeed_ends(chain, DeepSpeedBalance(matching_layers(chain, pattern).astype(np.float64)), stages)


def test_what_does_not_match_stays_with_the_block_before(make_named: Callable[..., Chain]) -> None:
    names = ["embed", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.attn", "h.2.mlp", "ln", "head"]
    chain = make_named(names)
    assert type_ends(None, chain, 3) == (3, 5, 9)
    assert type_ends("ATTN|head", chain, 2) == (5, 9)
    assert type_ends("mlp", chain, 3) == (4, 6, 9)


def test_type_refuses_what_it_cannot_count(
    make_named: Callable[..., Chain], make_problem: MakeProblem
) -> None:
    problem = make_problem(make_named(["conv", "relu", "fc"]), 2)
    assert list(PLANNERS["deepspeed-type"].propose(problem)) == []
    assert "no transformer blocks" in refusal_reason(PLANNERS["deepspeed-type"], problem)
    with pytest.raises(UsageError, match=r"deepspeed-type:attention': no layer's name matches.*'conv'"):
        list(find_planner("deepspeed-type:attention").propose(problem))
    with pytest.raises(UsageError, match="in the regular expression"):
        find_planner("deepspeed-type:(")
    one = find_planner("deepspeed-type:conv")
    assert list(one.propose(problem)) == []
    assert refusal_reason(one, problem).startswith("the layers that it counts (1) make no stages")
    named = find_planner("deepspeed-type:conv|fc")
    assert named.name == "deepspeed-type:conv|fc"
    assert {proposal.ends for proposal in named.propose(problem)} == {(2, 3)}


@pytest.fixture
def gpt(make_named: Callable[..., Chain]) -> Chain:
    """An embedding, six blocks of two layers, a norm and a head."""
    blocks = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    return make_named(["wte", "wpe", *blocks, "ln_f", "lm_head"])


def test_megatron_refuses_blocks_that_do_not_divide(
    gpt: Chain, make_problem: MakeProblem, make_chain: MakeChain
) -> None:
    blocks = repeated_blocks(gpt)
    assert blocks is not None
    assert block_ends(gpt, blocks, 4) is None
    problem = make_problem(make_chain(0, 5), 2)
    assert list(PLANNERS["megatron"].propose(problem)) == []
    assert "no transformer blocks" in refusal_reason(PLANNERS["megatron"], problem)
    one_process = make_problem(gpt, 8, mini_batch=8, runtime="torchgpipe")
    assert list(PLANNERS["megatron"].propose(one_process)) == []
    assert "6 blocks, h.*, do not divide" in refusal_reason(PLANNERS["megatron"], one_process)
