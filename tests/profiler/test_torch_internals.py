"""Names that PyTorch does not promise to keep are in the installed one; else the message says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from pplan.cost_models.errors import MachineError
from pplan.profiler import torch_private
from pplan.profiler.clocks import CudaClock
from pplan.profiler.torch_private import INTERNALS, OPERATOR_INTERNALS, Internal, check_internals


def test_leaves_are_those_that_torch_finds() -> None:
    x = torch.ones(2, 3)
    named = torch.max(x, 0)
    tree: object = (
        (x, [named, {"b": x.t(), "a": [None, 1, {2}]}]),
        x.shape,
        (),
        [],
        {},
        "word",
        slice(1),
        nn.ReLU,
    )
    own, theirs = torch_private.tree_leaves(tree), _pytree.tree_leaves(tree)
    assert list(map(id, own)) == list(map(id, theirs))


@pytest.mark.parametrize("internal", [*INTERNALS, *OPERATOR_INTERNALS], ids=lambda internal: internal.name)
def test_torch_has_it(internal: Internal) -> None:
    assert internal.exists, f"torch {torch.__version__} has no {internal.name}. {internal.without}"


def test_one_that_is_gone_is_named_with_the_version_that_lacks_it() -> None:
    gone = Internal("torch.gone", lambda: torch.gone, "a test", "Do without.")  # type: ignore[attr-defined]
    with pytest.raises(MachineError, match=r"torch 9\.0 has no torch\.gone, needed for a test") as caught:
        check_internals([gone], "9.0")
    assert caught.value.hint == f"Install torch {torch_private.TESTED}, or a later version of pplan."


def test_a_gpu_cannot_be_timed_where_it_cannot_be_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    clock = CudaClock(torch.device("cuda"))
    clock._cycles_per_second = 1e9
    with pytest.raises(MachineError, match=r"has no torch\.cuda\._sleep, needed for timing a GPU"):
        clock.hold_back(1.0)


def test_a_checkpoint_function_of_another_name_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = torch_private.checkpoint_functions()
    assert names
    for name in names:
        monkeypatch.delattr(torch.utils.checkpoint, name)
    assert torch_private.checkpoint_functions() == []


def test_what_is_told_of_tensors_and_storages() -> None:
    tensor = torch.zeros(4)
    before = torch_private.tensor_version(tensor)
    view = tensor[:2].add_(1)
    assert torch_private.tensor_version(tensor) == before + 1
    assert torch_private.storage_key(view) == torch_private.storage_key(tensor.untyped_storage())
    assert torch_private.storage_key(tensor.clone()) != torch_private.storage_key(tensor)
    parameter = nn.Parameter(torch.ones(2))
    parameter.mine = 3  # type: ignore[attr-defined]
    twin = torch_private.copy_as(parameter, torch.empty(2, device="meta"))
    assert (type(twin), twin.requires_grad, twin.mine) == (nn.Parameter, True, 3)  # type: ignore[attr-defined]


def test_what_is_told_of_modules() -> None:
    inner = nn.BatchNorm1d(2)
    module = nn.Sequential(inner, inner)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    assert torch_private.child_modules(module) == {"0": inner, "1": inner}
    assert not torch_private.is_persistent(module, "passing")
    assert torch_private.is_persistent(inner, "running_mean")
    torch_private.make_transient(inner, "running_mean")
    assert "0.running_mean" not in module.state_dict()
    assert not torch_private.has_hooks(module)

    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None: ...

    module.register_forward_pre_hook(hook)
    assert torch_private.has_hooks(module)
