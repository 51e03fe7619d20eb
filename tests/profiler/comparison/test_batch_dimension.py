"""Notes on models with modules that take the batch second: only those that are true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pplan
from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import build_chain

SECOND = "the samples lie in dimension 1"
MIXED = "depends on the others of its batch"


class TimeFirst(nn.Module):
    """Hands a batch-first input on as it is: to the module the samples are moments."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.head = nn.LSTM(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.l(x)[0])


class Last(TimeFirst):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.l(x)[0][-1])


class Transposes(TimeFirst):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.l(x.transpose(0, 1))[0]).transpose(0, 1)


class Queries(nn.Module):
    """DETR's transformer: samples second inside, and second in the output, one for each decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.query = nn.MultiheadAttention(4, 2), nn.Parameter(torch.randn(3, 4))

    def forward(self, picture: Tensor) -> Tensor:
        memory = picture.flatten(2).permute(2, 0, 1)
        queries = self.query.unsqueeze(1).repeat(1, len(picture), 1)
        one = self.attention(queries, memory, memory)[0]
        two = self.attention(one, memory, memory)[0]
        return torch.stack([one, two]).transpose(1, 2)


class Contrastive(nn.Module):
    """CLIP: pictures and texts of a batch are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.picture, self.text = (
            nn.MultiheadAttention(4, 2),
            nn.Linear(8, 4),
            nn.Linear(4, 4),
        )

    def forward(self, pictures: Tensor, texts: Tensor) -> Tensor:
        text = self.text(texts).transpose(0, 1)
        text = self.attention(text, text, text)[0][0]
        return F.normalize(self.picture(pictures), dim=-1) @ F.normalize(text, dim=-1).T


class Bags(nn.Module):
    """DLRM: offsets have a row for each table, indices are lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(5, 4), nn.Linear(16, 1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: list[Tensor]) -> Any:
        bags = [table(indices[row], offsets[row]) for row, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *bags], 1))


def test_inputs_with_samples_elsewhere_are_refused_with_what_to_do() -> None:
    indices = [torch.randint(0, 20, (8,)) for _ in range(3)]
    given = (torch.randn(4, 5), (torch.arange(4) * 2).repeat(3, 1), indices)
    with pytest.raises(ModelError, match=r"runs with 4 samples and fails with 5.* of shape 3x4") as caught:
        build_chain(Bags(), given)
    assert "samples in dimension 0" in caught.value.hint


class Sparse(nn.Module):
    """openai-whisper keeps a sparse mask that its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x)))


def test_a_sparse_buffer_that_forward_does_not_read_is_no_hindrance() -> None:
    model = Sparse()
    profile = pplan.profile(model, torch.randn(4, 4), device="cpu", micro_batch_sizes=[2], budget_seconds=1)
    assert [layer.name for layer in profile.layers] == ["a", "relu", "b"]
    assert model.heads.is_sparse


CASES: dict[str, tuple[type[nn.Module], tuple[Tensor, ...], str]] = {
    "time first": (TimeFirst, (torch.randn(3, 5, 4),), SECOND),
    "the last moment": (Last, (torch.randn(3, 5, 4),), SECOND),
    "transposed": (Transposes, (torch.randn(3, 5, 4),), ""),
    "queries": (Queries, (torch.randn(2, 4, 3, 3),), ""),
    "contrastive": (Contrastive, (torch.randn(3, 8), torch.randn(3, 5, 4)), MIXED),
}


@pytest.mark.parametrize("name", CASES)
def test_the_note_says_what_is_so(name: str) -> None:
    kind, inputs, expected = CASES[name]
    chain = build_chain(kind(), inputs if len(inputs) > 1 else inputs[0], verify=True)
    assert chain.comparison is not None
    assert [expected in note for note in chain.comparison.notes] == ([True] if expected else [])
