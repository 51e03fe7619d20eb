"""Fields in messages, as options of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pplan.cli.field_names import FIELDS, as_options
from pplan.cli.verbs import enter_all_fields, root


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("micro_batches=3: must divide 8", "--micro-batches 3: must divide 8"),
        (
            "recompute='except_last' with schedule='1f1b': no",
            "--recompute except-last with --schedule 1f1b: no",
        ),
        ("Omit `robust`, or give `schedule='gpipe'`.", "Omit --robust, or give --schedule gpipe."),
        ("memory_bytes=17179869184: too small", "--memory 16GiB: too small"),
        ("memory_bytes=1000: too small", "--memory 1000: too small"),
        ("pins=('features.1', 3): no such stage", "--pin features.1=stage3: no such stage"),
        ("use_all=True: no plan", "--use-all: no plan"),
        ("time_limit=0.5, say", "--time-limit 0.5, say"),
        ("Use precision='mixed'.", "Use --precision mixed."),
        (
            "Make a plan for it: pplan.solve(runtime='torch', use_all=True).",
            "Make a plan for it: pplan solve --runtime torch --use-all.",
        ),
        (
            "pplan.profile('vgg 19', granularity='module:h.*'), and so on",
            "pplan profile 'vgg 19' --granularity 'module:h.*', and so on",
        ),
        ("pplan.export('torch', ...)", "pplan export torch"),
        ("Use smaller `micro_batch_sizes`.", "Use smaller --micro-batch-sizes."),
        ("as in micro_batch_sizes=(2, 4, 8).", "as in --micro-batch-sizes 2,4,8."),
        ("input_shape=(3, 8, 8): it takes 2 tensors", "--input 3x8x8: it takes 2 tensors"),
        ("as in sizes=(1024, 16777216).", "as in --sizes 1KiB,16MiB."),
        ("`cache=False` measures anew", "--no-cache measures anew"),
        ("budget_seconds=0: must be above 0", "--budget 0: must be above 0"),
        ("settings['depth']: no keyword", "--set depth: no keyword"),
        (
            "model='a:make', settings={'width': 7, 'kind': 'b c'}",
            "--model a:make --set width=7 --set 'kind=b c'",
        ),
        # no fields of ours
        ("the layer block.gpus=3 of /gpus=4", "the layer block.gpus=3 of /gpus=4"),
        ("`features.0` and depth=24", "`features.0` and depth=24"),
    ],
)
def test_fields_become_options(message: str, printed: str) -> None:
    assert as_options(message) == printed


def test_every_option_that_may_be_printed_is_one() -> None:
    """A word that is no field of an option stays as it is."""
    enter_all_fields()
    names = set(_options(root))
    written = {own if name not in NEGATED else own.replace("--", "--no-", 1) for name, own in FIELDS.items()}
    assert written <= names
    assert "--seconds-of" in names


NEGATED = {"cache", "even"}
"""Fields of which only the negation is an option."""


def _options(command: Any) -> Iterator[str]:
    for own in command.params:
        yield from (*own.opts, *own.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)


def test_a_call_is_typed_as_its_fields_are() -> None:
    call = "pplan.solve(recompute='except_last', memory_bytes=17179869184, planner='deepspeed-type:a b')"
    typed = "pplan solve --recompute except-last --memory 16GiB --planner 'deepspeed-type:a b'"
    assert as_options(f"Make it again: {call}.") == f"Make it again: {typed}."
