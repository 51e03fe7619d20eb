"""Results for meta tensors that are remembered, against those of the operations themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pplan
from pplan.profiler import meta_device
from pplan.profiler.meta_device import MetaResults, run_on_meta

aten: Any = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layouts(result: Any, arguments: Any) -> list[Any]:
    """Of each tensor all that a pass asks of it, and in which of the arguments' storages it lies."""
    values = result if isinstance(result, tuple | list) else (result,)
    owners = [own.untyped_storage()._cdata for own in arguments if isinstance(own, Tensor)]
    described: list[Any] = [type(result)]
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            owner = owners.index(storage._cdata) if storage._cdata in owners else None
            layout = (value.dtype, value.shape, value.stride(), value.storage_offset(), value.device)
            described.append((*layout, storage.nbytes(), owner))
        else:
            described.append(value)
    return described


X, ROWS, TALL = meta(4, 6, 8), meta(8, 5), meta(6, 4)
INDICES = meta(4, 6, dtype=torch.int64)
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mul.Tensor, (X, 2), {}),
    (aten.mul.Tensor, (X, 2.0), {}),
    (aten.mul.Tensor, (INDICES, 2), {}),
    (aten.mul.Tensor, (INDICES, 2.0), {}),
    (aten.mul.Tensor, (INDICES, True), {}),
    (aten.add.Tensor, (X, X.transpose(0, 1).contiguous().transpose(0, 1)), {"alpha": 2}),
    (aten.add.Tensor, (X.half(), meta(8)), {}),
    (aten.div.Tensor, (INDICES, INDICES), {}),
    (aten.mm.default, (ROWS, meta(5, 3)), {}),
    (aten.mm.default, (TALL.t(), TALL), {}),
    (aten._unsafe_view.default, (X, (24, 8)), {}),
    (aten.view.default, (X, (24, 8)), {}),
    (aten.transpose.int, (X, 0, 1), {}),
    (aten.clone.default, (X.transpose(0, 2),), {}),
    (aten.clone.default, (X.transpose(0, 2),), {"memory_format": torch.contiguous_format}),
    (aten.clone.default, (meta(4, 1).expand(4, 6),), {}),
    (aten._to_copy.default, (X,), {"dtype": torch.bfloat16}),
    (aten.lift_fresh.default, (X,), {}),
    (aten.cat.default, ([X, X], 1), {}),
    (aten.cat.default, ([X, X], 2), {}),
    (aten.split.Tensor, (X, 3, 2), {}),
    (aten.native_layer_norm.default, (X, [8], meta(8), meta(8), 1e-5), {}),
    (aten.native_dropout.default, (X, 0.1, True), {}),
    (aten.topk.default, (X, 2), {}),
    (aten.max.dim, (X, 1), {}),
    (aten.embedding.default, (ROWS, INDICES), {}),
    (aten.convolution.default, (X, meta(3, 6, 2), None, [1], [0], [1], False, [0], 1), {}),
    (aten.add_.Tensor, (meta(4), 1), {}),
    (aten.relu_.default, (meta(4),), {}),
    (aten.empty.memory_format, ([3, 2],), {"device": torch.device("meta")}),
    (aten.zeros_like.default, (X[1:, :, 1:],), {}),
    (aten.sum.dim_IntList, (X[1:, :, 1:], [0], True), {}),
    (aten._conj.default, (meta(4, dtype=torch.complex64),), {}),
    (aten._scaled_dot_product_flash_attention.default, (meta(2, 2, 8, 8).half(),) * 3, {}),
]


def test_a_remembered_result_is_that_of_the_operation() -> None:
    meta_device._recipes.clear()
    for _ in range(3):
        for func, args, kwargs in CALLS:
            remembered = run_on_meta(func, args, kwargs)
            assert layouts(remembered, args) == layouts(func(*args, **kwargs), args), (func, args)
    recipes = meta_device._recipes.values()
    assert any(recipe is None for recipe in recipes)
    assert sum(recipe is not None for recipe in recipes) > len(CALLS) // 2


def test_the_default_dtype_is_another_call() -> None:
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert run_on_meta(aten.div.Tensor, (INDICES, INDICES), {}).dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_an_error_is_raised_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run_on_meta(aten.mm.default, (ROWS, ROWS), {})


def test_other_devices_are_left_alone() -> None:
    with MetaResults():  # type: ignore[no-untyped-call]
        assert (torch.ones(3) * 2).tolist() == (torch.ones(3) * 2).tolist() == [2.0, 2.0, 2.0]


def test_few_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_device, "_MOST", 3)
    meta_device._recipes.clear()
    for size in range(1, 9):
        assert run_on_meta(aten.mul.Tensor, (meta(size), 2), {}).shape == (size,)
    assert len(meta_device._recipes) <= 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inner(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = x + self.dropout(self.outer(attended.transpose(1, 2).flatten(2)))
        return mixed


def whole_model(name: str) -> tuple[nn.Module, Tensor]:
    if name == "attention":
        return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 5)), torch.ones(2, 6, 8)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(36, 5)), torch.ones(2, 3, 8, 8)


@pytest.mark.parametrize("name", ["attention", pytest.param("pictures", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["analytic:h100", pytest.param("meta", marks=pytest.mark.slow)])
def test_profiles_are_those_of_operations_that_run(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str
) -> None:
    model, example = whole_model(name)
    remembered = pplan.profile(model, example, device=device, micro_batch_sizes=[2, 4])
    monkeypatch.setattr(meta_device, "run_on_meta", run_each_time)
    each = pplan.profile(model, example, device=device, micro_batch_sizes=[2, 4])
    assert remembered.model_dump(exclude={"made_by"}) == each.model_dump(exclude={"made_by"})


@pytest.mark.slow
def test_a_transformer_is_that_of_operations_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    sizes = {"layers": 14, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 100}
    options: Any = {"settings": sizes, "device": "analytic:h100", "micro_batch_sizes": [2]}
    remembered = pplan.profile("hf:llama", **options)
    monkeypatch.setattr(meta_device, "run_on_meta", run_each_time)
    each = pplan.profile("hf:llama", **options)
    assert remembered.model_dump(exclude={"made_by"}) == each.model_dump(exclude={"made_by"})


def run_each_time(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)
