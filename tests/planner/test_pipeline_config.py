"""Configurations: their order, their words, and what is said where there is none."""

from __future__ import annotations

from pplan.cost_models.runtime import find_runtime
from pplan.planner.candidate import (
    make_config_error,
)


def test_no_configuration_in_words() -> None:
    alone = make_config_error("gpipe", "except_last", None)
    assert alone.what == (
        "schedule='gpipe', recompute='except_last' needs 2 micro-batches or more, "
        "and the global batch makes 1"
    )
    runtime = find_runtime("torchgpipe")
    assert make_config_error("gpipe", "except_last", runtime).what == alone.what
    other = make_config_error("1f1b", "never", runtime)
    assert other.what == "runtime='torchgpipe' does not run schedule='1f1b', recompute='never'"
    assert other.hint == "torchgpipe runs gpipe with recompute always, except-last, never."
