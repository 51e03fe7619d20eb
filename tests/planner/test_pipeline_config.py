"""Configurations: their order, their words, and what is said where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pplan.cost_models.runtime import find_runtime
from pplan.planner.candidate import (
    MOST_MICRO_BATCHES,
    VIRTUAL_STAGES,
    PipelineConfig,
    abbreviate,
    make_config_error,
    pipeline_configs,
)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PipelineConfig("1f1b", "by_stage", 4, 2), "4 x 2, 1f1b, recompute where it must"),
        (PipelineConfig("gpipe", "except_last", 8, 1), "8 x 1, gpipe, recompute except last"),
        (PipelineConfig("1f1b", "never", 4, 2, 1), "4 x 2, 1f1b, recompute never"),
        (
            PipelineConfig("interleaved", "always", 8, 3, 2),
            "8 x 3, interleaved, 2 virtual stages, recompute always",
        ),
        (
            PipelineConfig("1f1b", "first_layers", 2, 16),
            "2 x 16, 1f1b, recompute first layers where it must",
        ),
    ],
)
def test_in_words(config: PipelineConfig, words: str) -> None:
    assert str(config) == words
    assert config.mini_batch == config.micro_batches * config.micro_batch_size
    assert replace(config, micro_batches=3, micro_batch_size=7).mini_batch == 21


def test_the_preferred_first() -> None:
    """Schedules, then modes, then few micro-batches; except_last is GPipe's, of two micro-batches or more."""
    made = pipeline_configs(4, ("gpipe", "1f1b"), ("never", "except_last"), [1, 4, 2])
    assert [(own.schedule, own.recompute, own.micro_batches, own.micro_batch_size) for own in made] == [
        *(("gpipe", "never", 4 // size, size) for size in (4, 2, 1)),
        *(("gpipe", "except_last", 4 // size, size) for size in (2, 1)),
        *(("1f1b", "never", 4 // size, size) for size in (4, 2, 1)),
    ]
    assert {own.virtual_stages for own in made} == {1}


def test_long_lists() -> None:
    assert abbreviate([]) == ""
    assert abbreviate([3, 5]) == "3, 5"
    assert abbreviate(range(13)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … 12"
    assert abbreviate(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"


def test_no_configuration_in_words() -> None:
    alone = make_config_error("gpipe", "except_last", None)
    assert alone.what == (
        "schedule='gpipe', recompute='except_last' with 1 micro-batch: there is no such plan"
    )
    runtime = find_runtime("torchgpipe")
    assert make_config_error("gpipe", "except_last", runtime).what == alone.what
    other = make_config_error("1f1b", "never", runtime)
    assert other.what == "runtime='torchgpipe' does not run schedule='1f1b', recompute='never'"
    assert other.hint == "torchgpipe runs gpipe with recompute always, except-last, never."


def test_limits_are_those_of_the_documentation() -> None:
    """Two to four virtual stages (docs/planners.md), and 16,384 micro-batches of a step."""
    assert VIRTUAL_STAGES == (2, 3, 4)
    assert MOST_MICRO_BATCHES == 16_384
