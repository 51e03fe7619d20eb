"""What a profile holds of models that are more than a chain of one tensor, and of how they were run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pplan
from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import TiedWeight
from pplan.profiler.measure import profile_model
from pplan.profiler.models import from_module
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions


class Skips(nn.Module):
    """Two inputs, a tensor that skips two layers, a weight that two layers share, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, shift: Tensor) -> dict[str, Tensor]:
        entered = self.words(ids) + shift
        value = self.third(self.second(self.first(entered))) + entered
        return {"logits": self.head(value), "value": value}


def skips(*, parts: bool = True, **options: Any) -> Profile:
    given = {"ids": torch.randint(0, 16, (2, 5)), "shift": torch.randn(2, 5, 8)}
    loaded = from_module(Skips(), given)
    asked = ProfileOptions(micro_batch_sizes=[1, 3], device="cpu", **options)
    return profile_model(loaded, asked, rounds=1, parts=parts)


def test_several_inputs_and_tensors_over_a_cut() -> None:
    profile = skips(granularity="fine")
    assert profile.granularity == "fine"
    assert [(one.shape, one.dtype) for one in profile.inputs] == [([5], "int64"), ([5, 8], "float32")]
    assert profile.input_bytes_per_sample == 5 * 8 + 5 * 8 * 4
    crossing = {layer.name: layer.crossing for layer in profile.layers}
    assert [crossing[name] for name in ("first", "second")] == [2, 2]
    first = next(layer for layer in profile.layers if layer.name == "first")
    # Its own output, and what skips it: each 5 x 8 float32.
    assert [cost.output_bytes for cost in first.costs] == [2 * 5 * 8 * 4, 3 * 2 * 5 * 8 * 4]
    (skip,) = [edge for edge in profile.edges if edge[1] == profile.layers[-2].name and "third" not in edge]
    assert skip[0] in (profile.layers[0].name, profile.layers[1].name)


def test_tied_weights_are_told_and_may_be_cut_between() -> None:
    profile = skips(granularity="fine")
    (tied,) = profile.tied
    assert tied.tensor == "words.weight"
    assert tied.layers == [profile.layers[0].name, "head"]
    assert (tied.bytes, tied.trainable, tied.dtype) == (16 * 8 * 4, True, "float32")
    assert all(layer.cut_after for layer in profile.layers[:-1])
    (weight,) = profile.chain().tied
    assert weight == TiedWeight("words.weight", 512.0, 512.0, (0, len(profile.layers) - 1))


def test_ties_of_earlier_profiles_keep_their_layers_together() -> None:
    content = json.loads(skips(granularity="fine").to_json())
    content["tied"] = [{"tensor": "words.weight", "layers": content["tied"][0]["layers"]}]
    for layer in content["layers"][:-1]:
        layer["cut_after"] = False
    profile = Profile.model_validate(content)
    assert profile.chain().tied == ()
    assert not profile.chain().cut_after.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": ["head", "nowhere"]}, "no layer is named 'nowhere'"),
        ({"layers": ["head"]}, "two layers or more"),
        ({"bytes": 10_000}, "more than the parameters of its first layer"),
    ],
)
def test_ties_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    content = json.loads(skips(granularity="fine").to_json())
    content["tied"][0] |= change
    with pytest.raises(ValueError, match=words):
        Profile.model_validate(content)


def test_pins_are_told() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    profile = profile_model(
        (model, torch.randn(2, 4)),
        ProfileOptions(keep_together=["[12]"], micro_batch_sizes=[1], device="cpu"),
        rounds=1,
    )
    assert [layer.cut_reason for layer in profile.layers] == [None, "kept together: [12]", None, None]


def test_the_loss_is_measured_beside_the_layers_and_the_last_stage_pays_for_it() -> None:
    model, given = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 9)), torch.randn(2, 6)
    profile = profile_model(
        (model, given), ProfileOptions(loss="cross-entropy", micro_batch_sizes=[1, 4], device="cpu"), rounds=2
    )
    assert profile.loss is not None
    assert profile.loss.name == "cross-entropy"
    assert [cost.micro_batch_size for cost in profile.loss.costs] == [1, 4]
    assert all(cost.forward_seconds > 0 and cost.backward_seconds > 0 for cost in profile.loss.costs)
    chain = profile.chain()
    closing = [each.closing_ratio if 0.5 <= each.closing_ratio <= 2 else 1.0 for each in profile.whole]
    own = np.array([cost.forward_seconds for cost in profile.layers[-1].costs]) / closing
    assert chain.forward_seconds[-1] == pytest.approx(
        own + [cost.forward_seconds for cost in profile.loss.costs]
    )
    assert len(chain) == 2
    whole, sums = profile.whole[1], [layer.costs[1] for layer in profile.layers]
    seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in sums)
    assert whole.closing_ratio == pytest.approx(seconds / (whole.forward_seconds + whole.backward_seconds))


def test_backward_in_two_parts_is_there_unless_it_is_not_wanted() -> None:
    profile = skips()
    for layer in profile.layers:
        for cost in layer.costs:
            assert cost.backward_input_seconds is not None
            assert cost.backward_weight_seconds is not None
    assert all(whole.backward_parts_ratio for whole in profile.whole)
    plain = skips(parts=False)
    assert plain.layers[0].costs[0].backward_input_seconds is None
    assert plain.whole[0].backward_parts_ratio is None


@pytest.mark.parametrize(("rounds", "is_known"), [(1, False), (2, True)])
def test_what_was_timed_once_has_no_spread(rounds: int, is_known: bool) -> None:
    model, options = nn.Linear(4, 4), ProfileOptions(micro_batch_sizes=[1], device="cpu")
    profile = profile_model((model, torch.randn(2, 4)), options, rounds=rounds)
    spreads = [profile.layers[0].costs[0].spread, profile.whole[0].spread]
    assert [spread is not None for spread in spreads] == [is_known] * 2
    assert Profile.parse(profile.to_json(), "x") == profile
    assert (profile.chain().spread is not None) == is_known


class Residual(nn.Module):
    """A block of a model of equal blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = given + self.b(torch.tanh(self.a(given)))
        return result


def test_the_parts_of_a_block_walk_no_graph_before_it() -> None:
    """Autograd walks all that a block's input was made of, once for every weight."""
    behind: list[set[int]] = [set() for _ in range(6)]

    def watch(index: int) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def count_operations(_: nn.Module, given: tuple[Tensor]) -> None:
            pending = [] if given[0].grad_fn is None else [given[0].grad_fn]
            nodes = set(pending)
            while pending:
                following = {after for after, _ in pending.pop().next_functions if after is not None} - nodes
                nodes |= following
                pending += following
            behind[index] |= {len(nodes)} - {0}

        return count_operations

    model = nn.Sequential(*(Residual(4) for _ in behind))
    for index, block in enumerate(model):
        block.register_forward_pre_hook(watch(index))
    profile = pplan.profile(model, torch.randn(2, 4), micro_batch_sizes=(2,), device="meta", loss="none")
    assert all(layer.costs[0].pending_gradient_bytes for layer in profile.layers)
    # Of the passes in which the graph is one, and of that in two parts.
    assert [max(counts) for counts in behind[1:]] == [10, 20, 30, 40, 50]
    assert [min(counts) for counts in behind[1:]] == [2] * 5


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_first_micro_batch_of_a_step_adds_to_no_gradients(micro_batches: int) -> None:
    """From the measurement to the plan and its simulation."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    options = ProfileOptions(micro_batch_sizes=[2], device="cpu", loss="mse")
    profile = profile_model((model, torch.randn(2, 256)), options, rounds=1)
    costs = [layer.costs[0] for layer in profile.layers]
    assert profile.loss is not None
    one = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    closing = profile.whole[0].closing_ratio
    one /= closing if 0.5 <= closing <= 2 else 1.0
    one += profile.loss.costs[0].forward_seconds + profile.loss.costs[0].backward_seconds
    adding = sum(layer.accumulation_seconds or 0.0 for layer in profile.layers)
    assert adding > 0
    plan = pplan.solve(profile, gpus=1, mini_batch=2 * micro_batches, micro_batches=micro_batches)
    assert plan.prediction.step_seconds == pytest.approx(micro_batches * one - adding)
    assert pplan.simulate(plan, profile).step_seconds == pytest.approx(micro_batches * one - adding)


def test_the_peak_of_a_step_is_the_one_of_the_parts() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 144, 5)
    )
    profile = profile_model(
        (model, torch.randn(2, 3, 16, 16)), ProfileOptions(micro_batch_sizes=[2, 8], device="cpu"), rounds=1
    )
    for whole in profile.whole:
        assert whole.peak_bytes is not None
        assert whole.predicted_peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)


def test_how_it_was_run_is_told() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    profile = profile_model(
        (model, torch.randn(1, 3, 8, 8)),
        ProfileOptions(channels_last=True, amp="bf16", micro_batch_sizes=[1], device="cpu"),
        rounds=1,
    )
    assert (profile.channels_last, profile.amp, profile.compiled, profile.tf32) == (
        True,
        "bf16",
        False,
        False,
    )
    # The convolution's output, 4 channels of 6 x 6, is of two bytes each.
    assert profile.layers[0].costs[0].output_bytes == 4 * 6 * 6 * 2


class Gate(nn.Module):
    """Operations around which the input skips: no place is crossed by one tensor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gate).sigmoid() * x + x


@pytest.mark.parametrize(("granularity", "layers"), [(None, 1), ("fine", 4)])
def test_a_layer_that_is_the_whole_model_is_pointed_at(granularity: str | None, layers: int) -> None:
    options = ProfileOptions(micro_batch_sizes=[1, 3], device="meta", granularity=granularity)
    profile = profile_model((Gate(), torch.randn(2, 8)), options, rounds=1)
    assert len(profile.layers) == layers
    hint = "granularity='fine' cuts inside it"
    assert any(hint in note for note in profile.notes) == (layers == 1)


def test_on_meta_there_are_layers_and_bytes_and_no_seconds() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 9))
    on_cpu, on_meta = (
        profile_model(
            (model, torch.randn(2, 6)),
            ProfileOptions(loss="mse", micro_batch_sizes=[2, 8], device=device),
            rounds=1,
        )
        for device in ("cpu", "meta")
    )
    assert (on_meta.device, on_meta.device_name, on_meta.whole) == ("meta", "", [])
    for here, there in zip(on_cpu.layers, on_meta.layers, strict=True):
        assert (here.name, here.parameter_bytes, here.crossing) == (
            there.name,
            there.parameter_bytes,
            there.crossing,
        )
        for measured, counted in zip(here.costs, there.costs, strict=True):
            assert (counted.forward_seconds, counted.backward_seconds, counted.spread) == (0, 0, None)
            for key in ("output_bytes", "saved_bytes", "saved_input_bytes", "workspace_bytes"):
                assert getattr(counted, key) == getattr(measured, key)
    assert Profile.parse(on_meta.to_json(), "x").structure_only
    with pytest.raises(UsageError, match="has no seconds"):
        on_meta.chain()


def test_losses_of_ones_own_are_called_with_the_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "my_losses.py").write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def on_logits(output):\n"
        "    logits = output['logits'].flatten(0, 1)\n"
        "    return cross_entropy(logits, logits.argmax(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    profile = skips(loss="my_losses:on_logits")
    assert profile.loss is not None
    assert profile.loss.name == "my_losses:on_logits"


def test_shared_buffers_are_told() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4, affine=False, track_running_stats=True)

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = self.norm(self.b(self.norm(self.a(given))))
            return result

    profile = profile_model(
        (Norms(), torch.randn(4, 4)), ProfileOptions(device="meta", micro_batch_sizes=[4])
    )
    assert {tied.tensor for tied in profile.tied} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert all(len(tied.layers) == 2 for tied in profile.tied)
