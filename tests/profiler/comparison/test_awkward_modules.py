"""Modules that tracing was not made for: their layers train as they do, or are refused with the reason."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import pplan
from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import sequential
from pplan.profiler.trial import leave_vmap

X = torch.linspace(-1, 1, 24).reshape(3, 8)
IMAGE = torch.linspace(-1, 1, 3 * 3 * 8 * 8).reshape(3, 3, 8, 8)
TEXT = torch.linspace(-1, 1, 3 * 5 * 8).reshape(3, 5, 8)
WORDS = torch.arange(15).reshape(3, 5) % 11
MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {}


def module(example: object) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(kind: type[nn.Module]) -> type[nn.Module]:
        MODULES[kind.__name__] = kind, example
        return kind

    return add


def _double(_module: nn.Module, given: Any, _gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in given)


class Base(nn.Module):
    a: Any
    b: Any
    c: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)


@module(X)
class BatchNorms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.BatchNorm1d(8)
        self.m = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.m(torch.relu(self.b(self.n(self.a(x))))))


@module(X)
class Spectral(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.spectral_norm(self.a)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@module(X)
class OldSpectral(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.spectral_norm(self.a)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@module(X)
class WeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(self.a)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


@module(X)
class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.b, "weight", Symmetric())

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


@module(X)
class StraightThrough(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(Sign.apply(self.b(torch.relu(self.a(x)))))


@module(X)
class InPlace(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h.add_(1).mul_(2)
        h = torch.relu_(h)
        return self.c(self.b(h).clamp_(-1, 1))


@module(X)
class ViewChangedLater(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        v = h[:, :4]
        g = torch.tanh(self.b(x))
        v.mul_(3)
        return self.c(h + g)


@module(X)
class SliceAssign(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.zeros_like(x)
        h[:, :4] = self.a(x)[:, :4]
        h[:, 4:] = self.b(x)[:, 4:]
        return self.c(h)


@module(X)
class Dropouts(Base):
    def forward(self, x: Tensor) -> Any:
        h = F.dropout(self.a(x), 0.5, self.training)
        h = F.dropout(torch.relu(self.b(h)), 0.2, self.training)
        return F.dropout(self.c(h), 0.1)


@module(X)
class DropoutInBranches(Base):
    def __init__(self) -> None:
        super().__init__()
        self.d, self.e = nn.Dropout(0.5), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        late = self.d
        h = self.e(self.a(x))
        k = late(self.b(x))
        return self.c(h + k)


@module(TEXT)
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.l(x)
        return self.c(h[:, -1])


@module(TEXT)
class LstmKeepsState(nn.Module):
    state: Any

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LSTM(8, 8, batch_first=True)
        self.c = nn.Linear(8, 2)
        self.state = None

    def forward(self, x: Tensor) -> Any:
        h, s = self.l(
            x, self.state if self.state is not None and self.state[0].shape[1] == x.shape[0] else None
        )
        self.state = tuple(t.detach() for t in s)
        return self.c(h[:, -1])


@module(TEXT)
class GruCellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.GRUCell(8, 8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h = torch.zeros(x.shape[0], 8, device=x.device)
        for t in range(x.shape[1]):
            h = self.l(x[:, t], h)
        return self.c(h)


@module(X)
class Checkpointed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        h = checkpoint(lambda v: self.d(torch.relu(self.a(v))), x, use_reentrant=False)
        h = checkpoint(self.b, h, use_reentrant=False)
        return self.c(h)


@module(X)
class CheckpointedReentrant(Base):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h = checkpoint(lambda v: self.d(torch.relu(self.b(v))), h, use_reentrant=True)
        return self.c(h)


@module(X)
class Detaches(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return self.c(self.b(h.detach()) + h)


@module(X)
class DataOfActivation(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return self.c(self.b(h).data * h)


@module(X)
class ReparamData(Base):
    def forward(self, x: Tensor) -> Any:
        self.a.weight.data.clamp_(-0.1, 0.1)
        return self.c(torch.relu(self.b(self.a(x))))


@module(X)
class NormalizesWeightInNoGrad(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.c.weight.div_(self.c.weight.norm(dim=1, keepdim=True))
        return self.c(torch.relu(self.b(self.a(x))))


@module(X)
class TogglesGrad(Base):
    def forward(self, x: Tensor) -> Any:
        self.b.weight.requires_grad_(self.training)
        self.b.bias.requires_grad_(False)
        return self.c(torch.relu(self.b(self.a(x))))


@module(X)
class TrainingFlag(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h = h + torch.randn_like(h) * 0.1 if self.training else h * 2
        return self.c(torch.relu(self.b(h)))


@module(X)
class CalledTwice(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.a(torch.relu(self.a(x)))) + self.b(self.b(x)))


@module(X)
class SharedWeight(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@module(X)
class FunctionalWeight(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(F.linear(torch.relu(self.a(x)), self.a.weight.t() * 0.5, self.b.bias)))


@module(X)
class LambdaKept(Base):
    f: Any

    def __init__(self) -> None:
        super().__init__()
        t = torch.linspace(0, 1, 8)
        self.f = lambda h: h * t

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.f(self.a(x)))))


@module(X)
class LambdaKeptParameter(Base):
    f: Any

    def __init__(self) -> None:
        super().__init__()
        w = self.a.weight
        self.f = lambda h: h @ w

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.f(self.a(x)))))


@dataclass
class Out:
    logits: Tensor
    hidden: Any = None


@module(X)
class DataclassOut(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return Out(self.c(self.b(h)), (h,))


@module(X)
class DictOut(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return {"y": self.c(self.b(h)), "h": [h, {"x": x}], "n": 3, "none": None}


class Pair(NamedTuple):
    one: Tensor
    two: Tensor


@module(X)
class NamedOut(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return Pair(self.c(self.b(h)), h)


@module({"x": X, "scale": torch.ones(3, 1), "times": 2})
class Keywords(Base):
    def forward(self, *, x: Tensor, scale: Tensor | None = None, times: int = 1) -> Any:
        h = self.a(x)
        for _ in range(times):
            h = torch.relu(self.b(h))
        return self.c(h if scale is None else h * scale)


@module(([X, X * 2],))
class ListOfTensors(Base):
    def forward(self, xs: list[Tensor]) -> Any:
        return self.c(torch.relu(self.a(xs[0])) + torch.relu(self.b(xs[1])))


@module(X)
class ListBetween(Base):
    def forward(self, x: Tensor) -> Any:
        hs = [self.a(x), self.b(x)]
        hs.append(torch.relu(hs[0]))
        return self.c(torch.stack(hs).sum(0))


@module(X)
class BufferUpdated(Base):
    count: Any
    mean: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.count += 1
        self.mean.lerp_(h.detach().mean(0), 0.1)
        return self.c(torch.relu(self.b(h - self.mean) / self.count))


@module(X)
class BufferReplaced(Base):
    mean: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.c(torch.relu(self.b(h - self.mean)))


class KeepsMean(nn.Module):
    mean: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, h: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


@module(X)
class Ema(Base):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Linear(8, 8)
        for p in self.t.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for p, q in zip(self.t.parameters(), self.a.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
            target = self.t(x)
        return self.c(torch.relu(self.b(self.a(x)))), target


@module(X)
class StochasticDepth(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        keep = (torch.rand(x.shape[0], 1, device=x.device) < 0.5).to(x.dtype)
        return self.c(h + keep * torch.relu(self.b(h)))


@module(X)
class StochasticDepthTv(Base):
    def __init__(self) -> None:
        super().__init__()
        from torchvision.ops import StochasticDepth

        self.s = StochasticDepth(0.5, "row")

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(h + self.s(torch.relu(self.b(h))))


@module(X)
class RandPerm(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(torch.relu(self.b(h))[:, torch.randperm(8)])


@module(X)
class RandPermBatch(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(torch.relu(self.b(h))[torch.randperm(x.shape[0])])


@module(X)
class OwnStats(Base):
    m: Any
    v: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(8))
        self.register_buffer("v", torch.ones(8))
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        h = F.batch_norm(self.a(x), self.m, self.v, self.w, None, self.training, 0.1)
        return self.c(torch.relu(self.b(h)))


@module(X)
class Noise(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h = h + torch.empty_like(h).normal_() * 0.1
        return self.c(self.b(h) + torch.randn(8))


@module(X)
class NoiseOfConstantShape(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x))) * torch.bernoulli(torch.full((8,), 0.5)))


@module(IMAGE)
class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n, self.c2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=2)
        self.f = nn.Linear(4, 2)
        self.d = nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.n(self.c1(x)), inplace=True)
        h = self.d(F.relu(self.c2(h), True))
        return self.f(h.mean((2, 3)))


@module(IMAGE)
class ChannelsLastInside(Convs):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(memory_format=torch.channels_last))


@module(TEXT)
class Mha(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.n = nn.LayerNorm(8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h, w = self.m(x, x, x)
        return self.c(self.n(x + h)), w


@module(TEXT)
class Sdpa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 24)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.q(x).chunk(3, -1)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        return self.c(h)


@module(TEXT)
class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.t(x))


@module((TEXT, TEXT * 2))
class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Transformer(8, 2, 1, 1, 16, 0.1, batch_first=True)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.c(self.t(x, y))


@module(WORDS)
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(11, 8)
        self.a = nn.Linear(8, 8)
        self.h = nn.Linear(8, 11, bias=False)
        self.h.weight = self.e.weight

    def forward(self, x: Tensor) -> Any:
        return self.h(torch.relu(self.a(self.e(x))))


@module(WORDS)
class MaxNormEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(11, 8, max_norm=0.5)
        self.a = nn.Linear(8, 8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.a(self.e(x))))


@module(WORDS)
class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(11, 8, sparse=True)
        self.a = nn.Linear(8, 8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.a(self.e(x))))


@module(X)
class UnusedParameters(Base):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(8, 8)
        self.lost = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x))))


@module(X)
class ConditionalOnShape(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if x.shape[1] == 8:
            h = torch.relu(h)
        if x.shape[0] > 3:
            h = h * 2
        return self.c(self.b(h))


@module(X)
class Squeezes(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x).unsqueeze(0).squeeze())))


@module(X)
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(8, 3)
        self.e = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        p = self.g(x).softmax(-1)
        top = p.argmax(-1)
        out = torch.zeros_like(x)
        for i, e in enumerate(self.e):
            where = top == i
            out[where] = e(x[where]) * p[where, i : i + 1]
        return self.c(out)


@module(X)
class SoftExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(8, 3)
        self.e = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        p = self.g(x).softmax(-1)
        return self.c(sum(p[:, i : i + 1] * e(x) for i, e in enumerate(self.e)))


@module(X)
class Vmapped(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return self.c(torch.vmap(torch.outer)(h, h).sum(1) + self.b(x))


@module(X)
class Grads(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        (g,) = torch.autograd.grad(h.square().sum(), self.a.weight, create_graph=True)
        return self.c(self.b(h)) + g.sum()


@module(X)
class ComplexMiddle(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.fft.irfft(torch.fft.rfft(self.a(x)), n=8))))


@module(X)
class Einsum(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.einsum("bi,ij->bj", torch.relu(self.a(x)), self.b.weight) + self.b.bias)


@module(X)
class Where(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(torch.where(h > 0, h, self.b(x)))


@module(X)
class BooleanMask(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h = h.clone()
        h[h < 0] = 0
        return self.c(self.b(h))


@module(X)
class ItemScale(Base):
    s: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("s", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x) * self.s.item())))


@module(X)
class ItemOfActivation(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(torch.relu(self.b(h / h.detach().abs().max().item())))


@module(X)
class DoubleInside(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(F.linear(self.a(x).double(), self.b.weight.double()).float())))


@module(X)
class PlainTensorState(Base):
    def __init__(self) -> None:
        super().__init__()
        self.k = torch.zeros(1)

    def forward(self, x: Tensor) -> Any:
        self.k.add_(1)
        return self.c(torch.relu(self.b(self.a(x) * self.k)))


@module(X)
class ModuleDictChoice(Base):
    d: Any

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.ModuleDict({"x": nn.Linear(8, 8), "y": nn.Linear(8, 8)})
        self.i = 0

    def forward(self, x: Tensor) -> Any:
        self.i += 1
        return self.c(self.d["xy"[self.i % 2]](self.a(x)))


@module(X)
class RoundRobinBlocks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Any:
        self.step += 1
        return self.c(torch.relu(self.b(self.a(x))) * min(1.0, self.step / 2))


@module(X)
class GlobalChoice(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(self.b(h) if random.choice((True, False)) else h)


@module(X)
class GradMode(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(self.b(h) if torch.is_grad_enabled() else h)


@module(X)
class ScriptedPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


@module(X)
class CompiledPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="eager")

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


@module(X)
class HookedSubmodule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda _module, _given, output: output * 2)
        self.a.register_full_backward_hook(_double)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x))))


class Inner(Base):
    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.b(self.a(x)))


@module(X)
class HookedContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i = Inner()
        self.i.register_forward_hook(lambda _module, _given, output: output * 2)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.i(x))


@module(X)
class BackwardHookedContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.i = Inner()
        self.i.register_full_backward_hook(_double)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.i(self.f(x)))


@module(X)
class OverriddenCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        class Odd(Inner):
            def __call__(self, x: Tensor) -> Any:
                return super().__call__(x) * 2

        self.i = Odd()
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.i(x))


@module(X)
class NanOutput(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.log(self.a(x)))


@module(X)
class Fails(Base):
    def forward(self, x: Tensor) -> Any:
        if x.shape[0] > 0:
            raise KeyError("missing table")
        return x


@module(X)
class FailsInBackward(Base):
    def forward(self, x: Tensor) -> Any:
        h = torch.exp(self.a(x))
        k = self.b(h)
        h.add_(1)
        return self.c(k + h)


@module(X)
class ReturnsInput(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x)))), x


@module(X)
class GradientReversal(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        h = h.detach() * 2 - h
        return self.c(self.b(h))


@module(X)
class NoGradInBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FrozenHalf() for _ in range(3))
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        for b in self.blocks:
            x = b(x)
        return self.c(x)


class FrozenHalf(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            s = self.a(x).sigmoid()
        return torch.relu(self.b(x)) * s


@module(X)
class AutocastDisabledPart(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            h = self.a(x.float())
        return self.c(torch.relu(self.b(h)))


@module(X)
class Bf16AutocastAll(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.c(torch.relu(self.b(self.a(x)))).float()


@module(TEXT)
class LstmTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LSTM(8, 8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.l(x)
        return self.c(h)


@module(TEXT)
class LstmTransposes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LSTM(8, 8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.l(x.transpose(0, 1))
        return self.c(h.transpose(0, 1))


@module(TEXT)
class MhaTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.TransformerEncoderLayer(8, 2, 16)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.l(x))


@module(TEXT)
class LstmLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.LSTM(8, 8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.l(x)
        return self.c(h[-1])


_TABLES: dict[int, Tensor] = {}


@module(X)
class GlobalTable(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if x.shape[1] not in _TABLES:
            _TABLES[x.shape[1]] = torch.ones_like(h[0]) * 2
        return self.c(self.b(h * _TABLES[x.shape[1]]))


@functools.lru_cache(None)
def _lower_triangle(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@module(TEXT)
class MemoizedTable(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(self.b(_lower_triangle(h.shape[1]) @ h))


@module(X)
class UnusedNorm(Base):
    """Its output goes nowhere, its buffers change all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.n = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        self.n(h)
        return self.c(self.b(h))


@module(X)
class UnusedDropout(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        F.dropout(h, 0.5)
        return self.c(F.dropout(self.b(h), 0.5))


@module(X)
class SeedsInForward(Base):
    """With the number that most programs take."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        torch.manual_seed(0)
        return self.c(self.b(h + torch.randn(8)))


@module(X)
class DropoutSchedule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        h = self.d(self.a(x))
        self.d.p = min(0.5, self.d.p + 0.05)
        return self.c(self.b(h))


@module(X)
class Pruned(Base):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.b, "weight", 0.5)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x))))


@module(X)
class NamesOfGraphModules(nn.Module):
    """What torch.fx's GraphModule keeps to itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.code, self.graph, self.meta = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("print_readable", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Any:
        h = self.graph(x) * self.print_readable
        index = torch.cdist(h, self.code.weight).argmin(-1)
        return {"out": self.meta(h + (self.code(index) - h).detach()), "index": index}


@module(X)
class InnerGradient(Base):
    def forward(self, x: Tensor) -> Any:
        loss = F.linear(self.a(x), self.b.weight).pow(2).mean()
        (gradient,) = torch.autograd.grad(loss, self.b.weight, create_graph=True)
        return self.c(F.linear(self.a(x), self.b.weight - 0.1 * gradient))


@module(X)
class HyperNetwork(Base):
    def __init__(self) -> None:
        super().__init__()
        self.z, self.h = nn.Parameter(torch.ones(4)), nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Any:
        weights = {"weight": self.h(self.z).view(8, 8)}
        return self.c(torch.func.functional_call(self.b, weights, (self.a(x),)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any, *parameters: Tensor) -> Any:
        with torch.no_grad():
            y = x + run(x)
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x + ctx.run(x)
            own, *others = torch.autograd.grad(y, (x, *ctx.parameters), gradient)
        return own, None, *others


@module(X)
class RecomputesByHand(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(Reversed.apply(self.a(x), self.b, *self.b.parameters()))


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        del ctx
        return gradient * 5


@module(X)
class FunctionInPlace(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        Dirty.apply(h)
        return self.c(self.b(h))


@module(X)
class LocalLearning(Base):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return h, self.c(self.b(h.detach().requires_grad_()))


@module(X)
class WeightDrop(Base):
    """Puts a computed weight where a module has its parameter."""

    def __init__(self) -> None:
        super().__init__()
        raw = self.b.weight
        del self.b.weight
        self.b.register_parameter("raw", nn.Parameter(raw.detach()))
        self.b.weight = raw.detach()

    def forward(self, x: Tensor) -> Any:
        self.b.weight = F.dropout(self.b.raw, 0.5, self.training)
        return self.c(self.b(self.a(x)))


class LeavesEarly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return x.clamp(-1e6, 1e6) if x.abs().max() > 1e6 else x + self.l(x)


@module(X)
class ValueInOneBlock(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = LeavesEarly()

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


@module(X)
class SavedTensorHooks(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            h = self.b(self.a(x)).pow(2)
        return self.c(h)


@module(X)
class Swaps(Base):
    def forward(self, x: Tensor) -> Any:
        self.a, self.b = self.b, self.a
        return self.c(torch.relu(self.b(self.a(x))))


@module(X)
class SparseBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(torch.sparse.mm(self.adjacency, self.a(x).t()).t()))


@module(X)
class TracedPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), X)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


@module(X)
class ScriptedWhole(nn.Module):
    def __new__(cls) -> Any:
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


@module(X)
class CompiledMethod(Base):
    """A copy of it computes with the weights of the original."""

    def __init__(self) -> None:
        super().__init__()
        self.f = torch.compile(self._middle, backend="eager")

    def _middle(self, h: Tensor) -> Any:
        return torch.relu(self.b(h))

    def forward(self, x: Tensor) -> Any:
        return self.c(self.f(self.a(x)))


class Backwards(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def backwards() -> nn.Module:
    return Backwards(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU())


def other_forward() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    vars(layers)["forward"] = lambda x: layers[1](layers[0](x)) * 2
    return layers


MODULES["backwards"], MODULES["other_forward"] = (backwards, X), (other_forward, X)


@module(X)
class LengthOfBatch(Base):
    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x) / len(x))))


class EachSample(nn.Module):
    def forward(self, h: Tensor) -> Any:
        return torch.stack([h[i] * (i + 1) for i in range(h.shape[0])])


@module(X)
class EachSampleInBlock(Base):
    def __init__(self) -> None:
        super().__init__()
        self.each = EachSample()

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.each(self.a(x)))))


@module((X, TEXT))
class JoinsSamples(Base):
    def forward(self, x: Tensor, texts: Tensor) -> Any:
        joined = torch.cat(list(self.a(texts)))
        return self.c(torch.relu(self.b(joined).unflatten(0, (x.shape[0], -1)) + x.unsqueeze(1)))


class KeepsState(nn.Module):
    """Decides by values, so it is taken whole; who calls it forgets its state."""

    state: Any = None

    def forward(self, h: Tensor) -> Any:
        self.state = h if self.state is None or float(h.sum()) > 1e9 else self.state + h
        return self.state * 2


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = KeepsState()

    def forward(self, h: Tensor) -> Any:
        self.inner.state = None
        return self.inner(h)


@module(X)
class StateOfAnother(Base):
    def __init__(self) -> None:
        super().__init__()
        self.part = Forgets()

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.part(self.a(x)))))


@module(X)
class CountsByIterator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.n = itertools.count()

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.c(torch.relu(self.b(h * 2 if next(self.n) > 1000 else h)))


@module(X)
class CountsInClass(Base):
    n = 0

    def forward(self, x: Tensor) -> Any:
        type(self).n += 1
        h = self.a(x)
        return self.c(torch.relu(self.b(h * 2 if self.n > 1000 else h)))


CALLS = [0]


@module(X)
class CountsInGlobal(Base):
    def forward(self, x: Tensor) -> Any:
        CALLS[0] += 1
        return self.c(torch.relu(self.b(self.a(x) * CALLS[0])))


@module(X)
class OwnGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.g = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x) + torch.randn(x.shape, generator=self.g)))


@module(X)
class TeacherOfStudent(Base):
    """Equal at the start: what the trace makes of the teacher is right until the student learns."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
            features = self.teacher(x)
        return self.c(torch.relu(self.b(self.a(x)))), features


@module(X)
class TeacherInList(Base):
    """No submodule, so that nothing trains it."""

    teachers: Any

    def __init__(self) -> None:
        super().__init__()
        vars(self)["teachers"] = [copy.deepcopy(self.a)]

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for own, other in zip(self.teachers[0].parameters(), self.a.parameters(), strict=True):
                own.lerp_(other, 0.1)
            features = self.teachers[0](x)
        return self.c(torch.relu(self.b(self.a(x) + features)))


class AddsTransposed(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = other

    def forward(self, w: Tensor) -> Tensor:
        return w + self.other.weight.t()


@module(X)
class TiedByParametrization(Base):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.b, "weight", AddsTransposed(self.a))

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@module(X)
class ScalesByFirstCall(Base):
    """As weight normalization that starts from the data; copies of the hook write to the first module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.handle = self.a.register_forward_hook(self._begin())

    def _begin(self) -> Callable[..., None]:
        def begin(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.scale.data.div_(output.detach().std() + 0.1)
            self.handle.remove()

        return begin

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(self.a(x) * self.scale)))


@module(X)
class KeepsProductOfWeights(Base):
    product: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.product is None:
            self.product = (self.b.weight @ self.a.weight).detach()
        return self.c(torch.relu(x @ self.product.T + self.b(x)))


@module(X)
class LateWarmUp(Base):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.c(torch.relu(self.b(self.a(x))) if self.calls > 5 else self.a(x))


@module(X)
class ByBatchBefore(Base):
    last = 1

    def forward(self, x: Tensor) -> Any:
        last, self.last = self.last, x.shape[0]
        return self.c(torch.relu(self.b(self.a(x) / last)))


class VmapOfWeight(Base):
    def forward(self, x: Tensor) -> Any:
        weight = torch.vmap(lambda row: row * row.norm())(self.b.weight)
        return F.linear(torch.relu(self.a(x)), weight)


@module(X)
class VmapInside(Base):
    """What no tool traces is one layer, whichever of the model's modules it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.b = VmapOfWeight()

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


REFUSED = {
    "ScalesByFirstCall": "a copy of it writes to scale of the model itself",
    "KeepsProductOfWeights": "in pass 2, on a batch of 1 again",
    "LateWarmUp": "the output is not the model's in pass 6, on a batch of 1",
    "ByBatchBefore": "the output is not the model's in pass 4, on a batch of 1",
    "OwnGenerator": "draw other random numbers than the model, of g, on a batch of 1",
    "TeacherInList": r"writes to a tensor that no module has \(8x8 float32\), of a network that is kept in a",
    "other_forward": "its forward is an attribute, and not its class's",
    "CountsInGlobal": "is another each time, from the same weights, input and random state",
    "LstmKeepsState": "in pass 2, on a batch of 1 again",
    "ModuleDictChoice": "in pass 2, on a batch of 1 again",
    "RoundRobinBlocks": "in pass 2, on a batch of 1 again",
    "GlobalChoice": "draw other random numbers than the model, of random",
    "LambdaKeptParameter": r"cannot be copied: a copy of it trains a\.weight of the model itself",
    "SeedsInForward": "draw other random numbers than the model, of torch",
    "DropoutSchedule": "in pass 2, on a batch of 1 again",
    "SavedTensorHooks": r"the gradient of b\.bias is not the model's",
    "Swaps": "the gradient of .* is not the model's",
    "SparseBuffer": r"adjacency is a sparse tensor \(torch\.sparse_coo\), whose bytes pplan cannot count",
    "ScriptedWhole": r"was made by torch\.jit as a whole: it is one layer",
    "CompiledMethod": r"cannot be copied: a copy of it trains b\.weight of the model itself",
    "ConditionalOnShape": "holds for 2 to 3 samples only",
    "Fails": r"fails on its example input of shape 3x8 .*KeyError: 'missing table' .*in forward",
    "FailsInBackward": "does not train on a batch of 1: RuntimeError: .* modified by an inplace operation",
}
SAID = {
    "CountsByIterator": "forward changes n at each call, in Python",
    "CountsInClass": r"forward changes CountsInClass\.n at each call, in Python",
    "Squeezes": "give each micro-batch 2 samples or more: layer squeeze",
    "NanOutput": "the model's own output holds NaN in the output",
    "LstmTimeFirst": r"dimension 0 of the input does not look like the batch: l \(LSTM\)",
    "LstmLast": r"dimension 0 of the input does not look like the batch: l \(LSTM\)",
    "MhaTimeFirst": r"does not look like the batch: l\.self_attn \(MultiheadAttention\)",
}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", [name for name in MODULES if name not in REFUSED])
def test_layers_train_as_the_module_does(name: str, assert_same_training: Callable[..., None]) -> None:
    make, example = MODULES[name]
    # Not a deepcopy: torch has none of pruned weights, and that of a scripted module trains the original.
    model, twin = _seeded(make), _seeded(make)
    with pytest.warns(UserWarning, match=SAID[name]) if name in SAID else nullcontext():
        layers = sequential(model, example)
    assert_same_training(model, layers, twin, example)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_or_it_is_refused_with_the_reason(name: str) -> None:
    make, example = MODULES[name]
    with pytest.raises(ModelError) as caught:
        sequential(make(), example)
    assert re.search(REFUSED[name], caught.value.what), caught.value.what
    assert caught.value.hint


def test_what_the_state_dict_lacks_is_named() -> None:
    make, example = MODULES["UnusedParameters"]
    layers = sequential(make(), example)
    assert layers.unused_names == ("lost", "never.weight", "never.bias")


def test_vmap_is_left_where_a_graph_fails_inside() -> None:
    """Traced operations enter it and leave it; in between torch.randn fails, and would ever after."""
    with leave_vmap():
        torch._C._functorch._vmap_increment_nesting(3, "error")
        with pytest.raises(RuntimeError, match="randomness error mode"):
            torch.randn(2)
    assert torch.randn(2).shape == (2,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CompiledMethod", "LambdaKeptParameter"])
def test_a_profile_does_not_train_the_model_it_was_given(name: str) -> None:
    """Copies of these compute with the parameters of the original."""
    make, example = MODULES[name]
    model = make()
    with pytest.raises(ModelError, match="cannot be copied: a copy of it trains"):
        pplan.profile(model, example, device="cpu", micro_batch_sizes=[2], budget_seconds=1)
    assert all(parameter.grad is None for parameter in model.parameters())
