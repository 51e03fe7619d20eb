"""First blocks that run again: out to Megatron-LM, back, and counted a second time by the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile
from pplan.runtimes.documents import TrainerText
from pplan.runtimes.exports import export
from pplan.runtimes.transformer_blocks import (
    FirstBlocksError,
    count_first_blocks,
    find_blocks,
    first_block_words,
)
from tests.oracle import attack

FLAGS = "--recompute-granularity full --recompute-method block --recompute-num-layers"
MACHINE: dict[str, Any] = {"bandwidth": 1e9, "latency": 1e-5, "memory_bytes": 10**12}
WORDS = ["first_3", "first_2", "first_2", "never"]


NAMES = ["model.embed_tokens", *(f"model.layers.{block}" for block in range(9)), "model.norm", "lm_head"]


@pytest.fixture
def decoder_profile(make_profile: Callable[..., dict[str, Any]]) -> Profile:
    """Of nine blocks, which may be cut everywhere."""
    content = make_profile(1, 12, cuts=1.1)
    for layer, name in zip(content["layers"], NAMES, strict=True):
        layer["name"] = name
    return Profile.model_validate(content)


def import_text(text: str, profile: Profile, **options: Any) -> Plan:
    return pplan.import_plan(text, profile, **{"mini_batch": 16, "micro_batches": 8, **MACHINE, **options})


@pytest.mark.parametrize("runtime", ["megatron", "megatron-bridge"])
def test_there_and_back(decoder_profile: Profile, runtime: str) -> None:
    """The same step, memory and words from a command line, from what was exported, and from its text; and the
    oracle's second count agrees."""
    text = f"pretrain_gpt.py --pipeline-model-parallel-layout 'Et*3|t*3|t*3||L' {FLAGS} 2"
    plan = import_text(text.replace("||", "|"), decoder_profile)
    assert plan.recompute == "by_stage"
    assert [stage.recompute for stage in plan.stages] == WORDS
    assert [stage.layers_again for stage in plan.stages] == [3, 2, 2, 0]
    assert any("runs the first 2 blocks of every stage again" in note for note in plan.notes)
    never, always = (
        import_text("4,3,3,2", decoder_profile, schedule="1f1b", recompute=word)
        for word in ("never", "always")
    )
    steps = [own.prediction.step_seconds for own in (never, plan, always)]
    assert steps == sorted(set(steps))
    assert plan.stages[0].memory_bytes < never.stages[0].memory_bytes
    assert pplan.lint(plan, decoder_profile).agrees
    assert attack(plan.to_json(), decoder_profile.to_json()) == []
    document, _ = export(runtime, plan)
    assert isinstance(document, TrainerText)
    for again in (document.to_json(), document.text(Path("x.sh"))):
        back = import_text(again, decoder_profile)
        assert (back.stages, back.prediction.step_seconds) == (plan.stages, plan.prediction.step_seconds)
        assert back.runtime is None


def test_what_a_command_line_says_of_others(decoder_profile: Profile) -> None:
    """As many blocks as there are, virtual stages, no number, and what the user says himself."""
    straight = "--pipeline-model-parallel-layout 'Et*3|t*3|t*3L'"
    assert import_text(f"{straight} {FLAGS} 3", decoder_profile).recompute == "by_stage"
    assert import_text(f"{straight} {FLAGS} 2", decoder_profile, recompute="always").recompute == "always"
    several = (
        f"--pipeline-model-parallel-layout 'Et*3|t*2|t*2|t*2L' --pipeline-model-parallel-size 2 {FLAGS} 1"
    )
    plan = import_text(several, decoder_profile)
    assert plan.recompute == "never"
    assert any("the plan of several stages a device does not know that" in note for note in plan.notes)
    assert import_text(f"{straight} {FLAGS.rpartition(' ')[0]}", decoder_profile).recompute == "never"


def test_words_and_numbers_are_inverse() -> None:
    model = find_blocks(NAMES)
    for ends in ((4, 7, 10, 12), (1, 12), (2, 3, 12), (6, 12)):
        for number in range(1, 10):
            words = first_block_words(model, ends, number)
            inside = [
                model.blocks_before(end) - model.blocks_before(first) for first, end in pairwise((0, *ends))
            ]
            assert count_first_blocks(model, ends, words) == min(number, max(inside))
    with pytest.raises(FirstBlocksError, match="its stages run 2, 1 first blocks again"):
        count_first_blocks(model, (6, 12), ("first_3", "first_1"))


def test_no_room_is_said(decoder_profile: Profile) -> None:
    text = f"--pipeline-model-parallel-layout 'Et*3|t*3|t*3L' {FLAGS} 1"
    plan = import_text(text, decoder_profile, memory_bytes=40_000_000)
    assert any("it does not fit: device" in warning for warning in plan.warnings)
    assert json.loads(plan.to_json())["stages"][0]["recompute"] == "first_2"
