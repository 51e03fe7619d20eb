"""The profile's file: the bounds of its figures, and the contradictions that are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pplan
from pplan.cost_models.errors import FileError
from pplan.profiler.profile_file import Profile


def content(*names: str, **changed: Any) -> dict[str, Any]:
    """A profile of these layers; `changed` are figures of the first one."""
    costs = {
        "micro_batch_size": 4,
        "forward_seconds": 0.01,
        "backward_seconds": 0,
        "output_bytes": 64,
        "saved_bytes": 0,
    }
    layers: list[dict[str, Any]] = [
        {"name": name, "parameter_bytes": 8, "costs": [dict(costs)]} for name in names or ("a", "b")
    ]
    layers[0] |= {"costs": [costs | changed]}
    return {"schema": 1, "model": "toy", "layers": layers}


def load(profile: dict[str, Any]) -> Profile:
    return Profile.parse(json.dumps(profile), "toy.profile.json")


def test_the_smallest_profile() -> None:
    assert load(content()).chain().forward_seconds.tolist() == [[0.01], [0.01]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("forward_seconds", 1e308),
        ("backward_seconds", 1.1e9),
        ("forward_seconds", -1e-9),
        ("output_bytes", 2**63),
        ("saved_bytes", 10**400),
        ("workspace_bytes", -1),
        ("micro_batch_size", 0),
        ("micro_batch_size", 10**12),
        ("spread", 1e300),
        ("forward_seconds", "0.01"),
        ("output_bytes", "64"),
        ("output_bytes", 64.5),
    ],
)
def test_figures_out_of_bounds(key: str, value: Any) -> None:
    with pytest.raises(FileError) as caught:
        load(content(**{key: value}))
    assert caught.value.what.startswith(f"toy.profile.json: layers.0.costs.0.{key}: Input should be ")
    assert f"the value is {value!r}"[:60] in caught.value.what


def test_the_greatest_figures_are_planned_with() -> None:
    from pplan import solve

    greatest: dict[str, Any] = {
        "forward_seconds": 1e9,
        "backward_seconds": 1e9,
        "output_bytes": 2**63 - 1,
        "saved_bytes": 2**63 - 1,
    }
    plan = solve(load(content(**greatest)), gpus=1, mini_batch=4, optimizer="adam")
    assert plan.prediction.step_seconds == pytest.approx(2e9 + 0.01)


@pytest.mark.parametrize("seconds", [0, 1e-320])
def test_a_model_that_takes_no_time(seconds: float) -> None:
    with pytest.raises(FileError) as caught:
        load(content("a", forward_seconds=seconds))
    assert caught.value.what == (
        f"toy.profile.json: all layers together take {seconds:g} s at micro-batch size 4, "
        "it must be at least 1e-12 s"
    )


def test_two_layers_of_one_name() -> None:
    with pytest.raises(FileError) as caught:
        load(content("a", "a"))
    assert caught.value.what == "toy.profile.json: two layers are named 'a'"


def test_costs_that_scale_with_the_samples_are_of_one_size() -> None:
    scaling = load(content() | {"scales_with_samples": True})
    assert scaling.chain().at(1).forward_seconds.tolist() == [0.0025, 0.0025]
    assert not load(content()).chain().reaches(1)
    two = content("a")
    two["layers"][0]["costs"].append(two["layers"][0]["costs"][0] | {"micro_batch_size": 8})
    with pytest.raises(FileError, match=r"scales_with_samples is for one micro-batch size, .* \[4, 8\]"):
        load(two | {"scales_with_samples": True})


def test_the_chain_has_the_spread_of_every_layer() -> None:
    profile = load(content(spread=0.25))
    spread = profile.chain().spread
    assert spread is not None
    assert spread.tolist() == [[0.25], [0.0]]
    assert "steps have no interval" not in "".join(profile.remarks())


def test_nothing_is_known_of_what_was_not_timed_twice() -> None:
    profile = load(content())
    assert profile.chain().spread is None
    assert "steps have no interval" in "".join(profile.remarks())
    assert load(content(spread=0.25) | {"estimated": True}).chain().spread is None


def test_the_loss_varies_with_the_last_layer() -> None:
    """By hand: 0.01 s with a spread of 0.2, and 0.03 s with one of 0.6."""
    cost = content("a", spread=0.2)["layers"][0]["costs"][0]
    loss = {"name": "loss", "costs": [cost | {"forward_seconds": 0.03, "spread": 0.6}]}
    spread = load(content("a", spread=0.2) | {"loss": loss}).chain().spread
    assert spread is not None
    assert spread.tolist() == [[pytest.approx(0.5)]]


def closing(*ratios: float | None, **changed: Any) -> dict[str, Any]:
    """Two layers, and a whole model with these ratios: of both directions, of forward and of backward."""
    profile = content(backward_seconds=0.02, backward_input_seconds=0.008, backward_weight_seconds=0.012)
    profile["layers"][1]["costs"][0] |= {"backward_input_seconds": 0.0, "backward_weight_seconds": 0.0}
    for layer in profile["layers"]:
        layer["costs"][0] |= changed
    names = ("closing_ratio", "forward_closing_ratio", "backward_closing_ratio")
    whole = {"micro_batch_size": 4, "forward_seconds": 1, "backward_seconds": 1}
    profile["whole"] = [whole | dict(zip(names, ratios, strict=True))]
    return profile


def test_layers_are_planned_as_they_add_up_to_the_whole_model() -> None:
    profile = load(
        closing(0.9, 0.8, 1.25) | {"loss": {"name": "own", "costs": content()["layers"][0]["costs"]}}
    )
    chain = profile.chain()
    # The loss is not in the whole: its 10 ms stay.
    np.testing.assert_allclose(chain.forward_seconds[:, 0], [0.01 / 0.9, 0.01 / 0.9 + 0.01])
    np.testing.assert_allclose(chain.backward_seconds[:, 0], [0.02 / 0.9, 0])
    assert chain.backward_input_seconds is not None
    assert chain.backward_weight_seconds is not None
    np.testing.assert_allclose(chain.backward_input_seconds[:, 0], [0.008 / 0.9, 0])
    np.testing.assert_allclose(chain.backward_weight_seconds[:, 0], [0.012 / 0.9, 0])
    assert profile.remarks()[0].startswith("the layers' seconds are taken 1.111 times as long as measured")
    assert profile.layers[0].costs[0].forward_seconds == 0.01


@pytest.mark.parametrize(
    ("ratio", "changed", "factor"),
    [
        (0.8, {}, 1.25),
        (0.5, {}, 2.0),
        (2.0, {}, 0.5),
        (0.499, {}, 1),
        (2.001, {}, 1),
        (0.8, {"forward_host_seconds": 1e-4}, 1),
        (1.0, {}, 1),
    ],
)
def test_by_what_layers_are_scaled(ratio: float, changed: dict[str, float], factor: float) -> None:
    profile = load(closing(ratio, None, None, **changed))
    chain = profile.chain()
    np.testing.assert_allclose(chain.forward_seconds[:, 0], [0.01 * factor] * 2)
    np.testing.assert_allclose(chain.backward_seconds[:, 0], [0.02 * factor, 0])
    assert any("as long as measured" in remark for remark in profile.remarks()) == (factor != 1)


@pytest.mark.parametrize("sizes", [[2], [1, 2, 4]])
def test_one_stage_takes_what_the_untouched_model_took(sizes: list[int]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))
    profile = pplan.profile(model, torch.ones(1, 16), micro_batch_sizes=sizes, device="cpu", budget_seconds=2)
    whole = profile.whole[-1]
    size = whole.micro_batch_size
    if not 0.5 <= whole.closing_ratio <= 2:
        pytest.skip(f"the machine was too busy to measure: a closing ratio of {whole.closing_ratio:.2f}")
    plan = pplan.solve(profile, gpus=1, mini_batch=size, micro_batches=1, recompute="never")
    adding = sum(layer.accumulation_seconds or 0.0 for layer in profile.layers)
    measured = whole.forward_seconds + whole.backward_seconds
    assert plan.prediction.step_seconds <= measured * (1 + 1e-9)
    assert plan.prediction.step_seconds >= (measured - adding) * (1 - 1e-9)
