"""Each simple planner's cuts against all partitions, by its own rule, and hand examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain, list_cut_points
from pplan.cost_models.precision import training_precision
from pplan.planner.candidate import Proposal
from pplan.planner.planners import PLANNERS, find_planner
from pplan.planner.planners.base import refusal_reason
from pplan.planner.planners.deepspeed_partition import DeepSpeedBalance, deepspeed_ends, matching_layers
from pplan.planner.planners.rules import block_ends, even_ends, repeated_blocks
from pplan.planner.planners.torchgpipe_balance import parameter_copies
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeProblem = Callable[..., Problem]


def all_ends(chain: Chain, stages: int) -> Iterator[tuple[int, ...]]:
    """Ends of all partitions into so many stages."""
    for inner in combinations(list_cut_points(chain)[1:-1], stages - 1):
        yield (*inner, len(chain))


def largest(costs: npt.NDArray[np.float64], ends: Sequence[int]) -> float:
    return max(float(costs[first:end].sum()) for first, end in pairwise((0, *ends)))


def by_stages(name: str, problem: Problem) -> dict[tuple[int, int], Proposal]:
    """The straight proposals, by number of stages and micro-batch size."""
    return {
        (len(proposal.ends), proposal.config.micro_batch_size): proposal
        for proposal in PLANNERS[name].propose(problem)
        if set(proposal.replicas) == {1}
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["even", "gpipe"])
def test_the_largest_stage_is_the_least_there_is(
    make_chain: MakeChain, make_problem: MakeProblem, name: str, seed: int
) -> None:
    chain = make_chain(seed, 8, cuts=0.7)
    found = by_stages(name, make_problem(chain, 4, mini_batch=8))
    assert {stages for stages, _ in found} == set(range(1 if name == "gpipe" else 2, 5))
    for (stages, size), proposal in found.items():
        at = chain.at(size)
        costs = {
            "even": np.ones(len(chain)),
            "gpipe": 2 * at.forward_seconds + at.backward_seconds,
        }[name]
        best = min(largest(costs, ends) for ends in all_ends(chain, stages))
        assert largest(costs, proposal.ends) == pytest.approx(best, rel=1e-12)


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


def test_the_first_stages_have_one_layer_more(make_named: Callable[..., Chain]) -> None:
    """As DeepSpeed's `partition_uniform` has it: 10 layers in 4 stages are 3, 3, 2, 2."""
    names = [f"l{i}" for i in range(10)]
    assert even_ends(make_named(names), 4) == (3, 6, 8, 10)
    assert even_ends(make_named(names, cuts=[2, 4, 6, 8]), 4) in {(2, 4, 6, 10), (2, 4, 8, 10), (4, 6, 8, 10)}


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


def test_torchgpipe_evens_out_time_or_size(make_chain: MakeChain, make_problem: MakeProblem) -> None:
    solve = pytest.importorskip("torchgpipe.balance.blockpartition").solve
    chain = make_chain(5, 9, cuts=1.0)
    problem = make_problem(chain, 6, mini_batch=8, optimizer="adam", schedule="gpipe")
    differ = 0
    for (stages, size), proposal in by_stages("torchgpipe-time", problem).items():
        at = chain.at(size)
        times = solve((at.forward_seconds + at.backward_seconds).tolist(), stages)
        sizes = solve((chain.parameter_bytes * 4 + at.saved_bytes).tolist(), stages)
        assert proposal.ends == tuple(np.cumsum([len(block) for block in times]))
        other = by_stages("torchgpipe-size", problem)[stages, size]
        assert other.ends == tuple(np.cumsum([len(block) for block in sizes]))
        differ += proposal.ends != other.ends
    assert differ > 5


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 2), ("momentum", 3), ("adam", 4), ("adamw", 4)])
def test_copies_are_those_of_torchgpipes_guide(optimizer: str, copies: float) -> None:
    assert parameter_copies(optimizer, training_precision("float32").bytes) == copies
    assert parameter_copies(optimizer, training_precision("bfloat16", precision="bf16").bytes) == copies


@pytest.fixture
def gpt(make_named: Callable[..., Chain]) -> Chain:
    """An embedding, six blocks of two layers, a norm and a head."""
    blocks = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    return make_named(["wte", "wpe", *blocks, "ln_f", "lm_head"])


def test_megatron_gives_every_stage_as_many_blocks(gpt: Chain, make_problem: MakeProblem) -> None:
    found = list(PLANNERS["megatron"].propose(make_problem(gpt, 6, mini_batch=24)))
    assert {(proposal.ends, proposal.devices) for proposal in found} == {
        ((16,), (tuple(range(6)),)),
        ((8, 16), ((0, 1, 2), (3, 4, 5))),
        ((6, 10, 16), ((0, 1), (2, 3), (4, 5))),
        ((4, 6, 8, 10, 12, 16), tuple((rank,) for rank in range(6))),
    }
    for proposal in found:
        assert proposal.config.micro_batch_size % proposal.replicas[0] == 0


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


def test_interleaved_goes_round_the_devices(gpt: Chain, make_problem: MakeProblem) -> None:
    found = list(PLANNERS["interleaved"].propose(make_problem(gpt, 3, mini_batch=12)))
    assert {(p.config.virtual_stages, p.device_count) for p in found} == {
        (v, n) for v in (2, 3, 4) for n in (2, 3)
    }
    for proposal in found:
        config, devices = proposal.config, proposal.device_count
        assert config.schedule == "interleaved"
        assert config.micro_batches % devices == 0
        assert proposal.devices == tuple((rank,) for rank in range(devices)) * config.virtual_stages
    even = (4, 6, 8, 10, 12, 16)
    assert even in {proposal.ends for proposal in found}
    for proposal in found:
        at = gpt.at(proposal.config.micro_batch_size)
        work = at.forward_seconds + at.backward_seconds
        parts = len(proposal.ends)
        if proposal.ends != even and parts < 5:
            best = min(largest(work, ends) for ends in all_ends(gpt, parts))
            alike = block_ends(gpt, repeated_blocks(gpt), parts)
            assert proposal.ends == alike or largest(work, proposal.ends) == pytest.approx(best)


def test_gpipe_recomputes_unless_told_not_to(make_chain: MakeChain, make_problem: MakeProblem) -> None:
    chain = make_chain(1, 6)
    free = list(PLANNERS["gpipe"].propose(make_problem(chain, 2, mini_batch=8)))
    assert {p.config.recompute for p in free} <= {"always", "except_last"}
    assert "always" in {p.config.recompute for p in free}
    told = list(PLANNERS["gpipe"].propose(make_problem(chain, 2, mini_batch=8, recompute="never")))
    assert {p.config.recompute for p in told} == {"never"}


def test_data_parallel_takes_the_measured_sizes_on_each_device(
    make_chain: MakeChain, make_problem: MakeProblem
) -> None:
    found = list(PLANNERS["data-parallel"].propose(make_problem(make_chain(1, 6), 4, mini_batch=16)))
    assert {proposal.devices for proposal in found} == {((0, 1, 2, 3),)}
    assert {(p.config.micro_batches, p.config.micro_batch_size) for p in found} >= {(4, 4), (2, 8), (1, 16)}
    asked = make_problem(make_chain(1, 6), 4, mini_batch=16, micro_batches=2)
    found = list(PLANNERS["data-parallel"].propose(asked))
    assert {(p.config.micro_batches, p.config.micro_batch_size) for p in found} == {(2, 8)}
    none = make_problem(make_chain(1, 6), 4, mini_batch=16, runtime="torchgpipe")
    assert list(PLANNERS["data-parallel"].propose(none)) == []


def test_one_gpu_uses_one(make_chain: MakeChain, make_problem: MakeProblem) -> None:
    found = list(PLANNERS["one-gpu"].propose(make_problem(make_chain(1, 6), 4, mini_batch=16)))
    assert {(proposal.ends, proposal.devices) for proposal in found} == {((6,), ((0,),))}
