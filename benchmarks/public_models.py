"""Models of public repositories as pplan takes them apart: python benchmarks/public_models.py [NAME ...]

Most are small rewritings of a public repository's structure: the modules, lists and calls that decide where a
model can be cut, with few channels. Nothing is copied from there. Others are of packages, where these are
installed. The table says what became of each: its layers, the allowed cuts and the most tensors over a cut;
or the reason of a refusal. Layers are trained beside the model and must leave the same outputs, gradients and
buffers, bit for bit. `--write docs/lab/models.md` writes the table into that page.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from pplan.cost_models.errors import PplanError
from pplan.profiler.layers import build_chain

# Segmentation and detection.


def conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, inplace: bool = False
) -> nn.Sequential:
    """A convolution with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace),
    )


class DoubleConv(nn.Module):
    """The stage of milesial/Pytorch-UNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            *conv(inputs, outputs, inplace=True), *conv(outputs, outputs, inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)  # type: ignore[no-any-return]


class Down(nn.Module):
    """Half of the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool_conv(x)  # type: ignore[no-any-return]


class Up(nn.Module):
    """Twice the size, and the skip of that size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, inputs // 2, 2, 2)
        self.conv = DoubleConv(inputs, outputs)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        rows, columns = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.conv(torch.cat([x2, x1], 1))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """milesial/Pytorch-UNet: five levels, skips of each to the other side."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc = DoubleConv(3, width)
        for level in range(4):
            setattr(self, f"down{level + 1}", Down(width << level, width << (level + 1)))
            setattr(self, f"up{level + 1}", Up(width << (4 - level), width << (3 - level)))
        self.outc = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.inc(x)]
        for level in range(1, 5):
            skips.append(getattr(self, f"down{level}")(skips[-1]))
        x = skips.pop()
        for level in range(1, 5):
            x = getattr(self, f"up{level}")(x, skips.pop())
        return self.outc(x)  # type: ignore[no-any-return]


class SkipLevel(nn.Module):
    """junyanz/pytorch-CycleGAN-and-pix2pix: each level has the next one inside."""

    def __init__(
        self, outer: int, inner: int, inside: nn.Module | None = None, given: int | None = None
    ) -> None:
        super().__init__()
        self.outermost = given is not None
        given = given or outer
        down = nn.Conv2d(given, inner, 4, 2, 1, bias=False)
        up = nn.ConvTranspose2d(inner if inside is None else 2 * inner, outer, 4, 2, 1)
        if self.outermost and inside is not None:
            parts: list[nn.Module] = [down, inside, nn.ReLU(True), up, nn.Tanh()]
        else:
            parts = [nn.LeakyReLU(0.2, True), down, *([nn.BatchNorm2d(inner), inside] if inside else [])]
            parts += [nn.ReLU(True), up, nn.BatchNorm2d(outer)]
        self.model = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) if self.outermost else torch.cat([x, self.model(x)], 1)


class Pix2PixUNet(nn.Module):
    """The generator made of these, from the inside out."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        block = SkipLevel(8 * width, 8 * width)
        for _ in range(2):
            block = SkipLevel(8 * width, 8 * width, block)
        for times in (4, 2, 1):
            block = SkipLevel(times * width, 2 * times * width, block)
        self.model = SkipLevel(3, width, block, given=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


class GPipeUNet(nn.Module):
    """torchgpipe's benchmark U-Net: levels of several convolutions, encoders and decoders in lists."""

    def __init__(self, depth: int = 5, convs: int = 2, width: int = 8) -> None:
        super().__init__()
        widths = [width << level for level in range(depth)]
        self.encoders = nn.ModuleList(
            nn.Sequential(
                conv(3 if not level else widths[level - 1], own), *(conv(own, own) for _ in range(convs - 1))
            )
            for level, own in enumerate(widths)
        )
        self.bottom = nn.Sequential(conv(widths[-1], 2 * widths[-1]), conv(2 * widths[-1], widths[-1]))
        self.decoders = nn.ModuleList(
            nn.Sequential(
                conv(2 * own, own),
                *(conv(own, own) for _ in range(convs - 1)),
                conv(own, widths[max(level - 1, 0)]),
            )
            for level, own in reversed(list(enumerate(widths)))
        )
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for decoder, skip in zip(self.decoders, reversed(skips), strict=True):
            x = decoder(torch.cat([skip, F.interpolate(x, scale_factor=2)], 1))
        return self.last(x)  # type: ignore[no-any-return]


class SeparableConv(nn.Module):
    """ReLU, a depthwise and a pointwise convolution, batch norm; twice."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for own in (stride, 1):
            depthwise = nn.Conv2d(width, width, 3, own, 1, groups=width, bias=False)
            parts += [nn.ReLU(), depthwise, nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)]
        self.body = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Cell(nn.Module):
    """A cell of AmoebaNet-D: takes the outputs of two cells before it, and joins the sums of pairs."""

    OPERATIONS = (
        ("sep", 1),
        ("max", 0),
        ("sep", 0),
        ("none", 1),
        ("avg", 1),
        ("sep", 2),
        ("none", 0),
        ("avg", 2),
    )

    def __init__(
        self, two_before: int, before: int, width: int, *, reduction: bool, reduced_before: bool
    ) -> None:
        super().__init__()
        self.reduction = reduction
        skip = nn.Conv2d(two_before, width, 1, 2 if reduced_before else 1, bias=False)
        self.reduce1 = nn.Sequential(nn.ReLU(), skip, nn.BatchNorm2d(width))
        self.reduce2 = nn.Sequential(
            nn.ReLU(), nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        )
        operations: list[nn.Module] = []
        for kind, source in self.OPERATIONS:
            stride = 2 if reduction and source < 2 else 1
            if kind == "sep":
                operations.append(SeparableConv(width, stride))
            elif kind == "none":
                operations.append(nn.Identity() if stride == 1 else nn.Conv2d(width, width, 1, 2, bias=False))
            else:
                pool = nn.MaxPool2d if kind == "max" else nn.AvgPool2d
                operations.append(pool(3, stride, 1))
        self.operations = nn.ModuleList(operations)

    def forward(self, s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        skip = s1
        states = [self.reduce1(s1), self.reduce2(s2)]
        for index in range(0, len(self.operations), 2):
            one, two = (self.OPERATIONS[index + place][1] for place in (0, 1))
            states.append(self.operations[index](states[one]) + self.operations[index + 1](states[two]))
        return torch.cat(states[2:], 1), skip


class AmoebaNet(nn.Module):
    """torchgpipe's benchmark AmoebaNet-D: normal cells between two reductions."""

    def __init__(self, cells: int = 9, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width))
        two_before = before = width
        own, reduced_before = width, False
        blocks = []
        for index in range(cells):
            reduction = index in (cells // 3, 2 * cells // 3)
            own = 2 * own if reduction else own
            blocks.append(Cell(two_before, before, own, reduction=reduction, reduced_before=reduced_before))
            two_before, before, reduced_before = before, 4 * own, reduction
        self.cells = nn.ModuleList(blocks)
        self.classify = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        s1 = s2 = self.stem(x)
        for cell in self.cells:
            out, _ = cell(s1, s2)
            s1, s2 = s2, out
        return self.classify(s2.mean((2, 3)))  # type: ignore[no-any-return]


class Extractor(nn.Module):
    """songdejia/EAST, SakuraRiven/EAST: VGG-16 with batch norm; the outputs of its pools are collected."""

    PLAN = (8, 8, 0, 16, 16, 0, 32, 32, 32, 0, 64, 64, 64, 0, 64, 64, 64, 0)

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        before = 3
        for width in self.PLAN:
            parts += [nn.MaxPool2d(2)] if not width else list(conv(before, width, inplace=True))
            before = width or before
        self.features = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for module in self.features:
            x = module(x)
            if isinstance(module, nn.MaxPool2d):
                out.append(x)
        return out[1:]


class Merge(nn.Module):
    """The neck of EAST."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(128, 32, 1), conv(32, 32)
        self.conv3, self.conv4 = conv(64, 16, 1), conv(16, 16)
        self.conv5, self.conv6 = conv(32, 8, 1), conv(8, 8)
        self.conv7 = conv(8, 8)

    def forward(self, x: list[Tensor]) -> Tensor:
        y = F.interpolate(x[3], scale_factor=2, mode="bilinear", align_corners=True)
        y = self.conv2(self.conv1(torch.cat((y, x[2]), 1)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
        y = self.conv4(self.conv3(torch.cat((y, x[1]), 1)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
        y = self.conv6(self.conv5(torch.cat((y, x[0]), 1)))
        return self.conv7(y)  # type: ignore[no-any-return]


class EAST(nn.Module):
    """The text detector: score and geometry."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.merge = Extractor(), Merge()
        self.score, self.location, self.angle = (nn.Conv2d(8, outputs, 1) for outputs in (1, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.merge(self.extractor(x))
        angle = (torch.sigmoid(self.angle(y)) - 0.5) * math.pi
        return torch.sigmoid(self.score(y)), torch.cat((torch.sigmoid(self.location(y)) * 512, angle), 1)


class SSD(nn.Module):
    """amdegroot/ssd.pytorch: a VGG in a list, extras, and heads on six of their outputs."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.vgg = nn.ModuleList()
        before = 3
        for width in (8, 8, 0, 16, 16, 0, 32, 32, 32, 0, 32, 32, 32):
            if width:
                self.vgg += [nn.Conv2d(before, width, 3, 1, 1), nn.ReLU(True)]
                before = width
            else:
                self.vgg.append(nn.MaxPool2d(2, 2, ceil_mode=True))
        widths = [(32, 16, 32), (32, 8, 16), (16, 8, 16)]
        self.extras = nn.ModuleList()
        for given, middle, own in widths:
            self.extras += [nn.Conv2d(given, middle, 1), nn.Conv2d(middle, own, 3, 2, 1)]
        sources = [32, 32, *(own for _, _, own in widths)]
        self.loc = nn.ModuleList(nn.Conv2d(width, 4 * 4, 3, 1, 1) for width in sources)
        self.conf = nn.ModuleList(nn.Conv2d(width, 4 * classes, 3, 1, 1) for width in sources)
        self.classes = classes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sources, loc, conf = [], [], []
        for k in range(17):
            x = self.vgg[k](x)
        sources.append(F.normalize(x, dim=1))
        for k in range(17, len(self.vgg)):
            x = self.vgg[k](x)
        sources.append(x)
        for k, extra in enumerate(self.extras):
            x = F.relu(extra(x), inplace=True)
            if k % 2 == 1:
                sources.append(x)
        for x, one, two in zip(sources, self.loc, self.conf, strict=True):
            loc.append(one(x).permute(0, 2, 3, 1).contiguous())
            conf.append(two(x).permute(0, 2, 3, 1).contiguous())
        joined = torch.cat([own.view(own.size(0), -1) for own in loc], 1)
        scores = torch.cat([own.view(own.size(0), -1) for own in conf], 1)
        return joined.view(joined.size(0), -1, 4), scores.view(scores.size(0), -1, self.classes)


class Bottleneck(nn.Module):
    """ResNet's block."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class FPN(nn.Module):
    """kuangliu/pytorch-fpn: a ResNet bottom-up, its features joined top-down."""

    def __init__(self, blocks: tuple[int, ...] = (2, 2, 2, 2), width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        inputs = width
        for index, count in enumerate(blocks):
            own = width << index
            parts = [
                Bottleneck(inputs if not k else 4 * own, own, 2 if index and not k else 1)
                for k in range(count)
            ]
            setattr(self, f"layer{index + 1}", nn.Sequential(*parts))
            inputs = 4 * own
        self.toplayer = nn.Conv2d(32 * width, 16, 1)
        self.smooth1, self.smooth2, self.smooth3 = (nn.Conv2d(16, 16, 3, 1, 1) for _ in range(3))
        self.lat1, self.lat2, self.lat3 = (nn.Conv2d(times * width, 16, 1) for times in (16, 8, 4))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return F.interpolate(x, size=y.shape[2:], mode="bilinear", align_corners=False) + y

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        c1 = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        c2 = self.layer1(c1)  # type: ignore[operator]
        c3 = self.layer2(c2)  # type: ignore[operator]
        c4 = self.layer3(c3)  # type: ignore[operator]
        c5 = self.layer4(c4)  # type: ignore[operator]
        p5 = self.toplayer(c5)
        p4 = self.add(p5, self.lat1(c4))
        p3 = self.add(p4, self.lat2(c3))
        p2 = self.add(p3, self.lat3(c2))
        return self.smooth3(p2), self.smooth2(p3), self.smooth1(p4), p5


# Super-resolution and restoration: the input is added to the output.


class VDSR(nn.Module):
    """twtygqyy/pytorch-vdsr: twenty convolutions, whose output is added to the picture."""

    def __init__(self, width: int = 8, depth: int = 18) -> None:
        super().__init__()
        body: list[nn.Module] = []
        for _ in range(depth):
            body += [nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.ReLU(inplace=True)]
        self.residual_layer = nn.Sequential(*body)
        self.input, self.output = nn.Conv2d(1, width, 3, 1, 1), nn.Conv2d(width, 1, 3, 1, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.residual_layer(self.relu(self.input(x)))
        return torch.add(self.output(out), x)


class SRVGGNet(nn.Module):
    """xinntao/Real-ESRGAN: a list of convolutions and PReLU, pixel shuffle, and the picture made larger."""

    def __init__(self, width: int = 8, convs: int = 8, upscale: int = 2) -> None:
        super().__init__()
        self.upscale = upscale
        self.body = nn.ModuleList([nn.Conv2d(3, width, 3, 1, 1), nn.PReLU(width)])
        for _ in range(convs):
            self.body += [nn.Conv2d(width, width, 3, 1, 1), nn.PReLU(width)]
        self.body.append(nn.Conv2d(width, 3 * upscale * upscale, 3, 1, 1))
        self.upsampler = nn.PixelShuffle(upscale)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for part in self.body:
            out = part(out)
        return self.upsampler(out) + F.interpolate(x, scale_factor=self.upscale, mode="nearest")  # type: ignore[no-any-return]


class EDSRBlock(nn.Module):
    """A residual block without batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(True), nn.Conv2d(width, width, 3, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mul(0.1) + x  # type: ignore[no-any-return]


class EDSR(nn.Module):
    """sanghyun-son/EDSR-PyTorch: the head's output is added behind all blocks."""

    def __init__(self, width: int = 8, blocks: int = 8) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1))
        self.body = nn.Sequential(
            *(EDSRBlock(width) for _ in range(blocks)), nn.Conv2d(width, width, 3, 1, 1)
        )
        self.tail = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, 1, 1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return self.tail(self.body(x) + x)  # type: ignore[no-any-return]


class Hourglass(nn.Module):
    """princeton-vl/pytorch_stacked_hourglass: a branch at each size, the next size inside."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.up1, self.low1, self.low3 = (conv(width, width) for _ in range(3))
        self.low2 = Hourglass(depth - 1, width) if depth > 1 else conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low3(self.low2(self.low1(F.max_pool2d(x, 2))))
        return self.up1(x) + F.interpolate(low, scale_factor=2)  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """Hourglasses one behind the other, each with its heat maps, which all are returned."""

    def __init__(self, stacks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.pre = conv(3, width)
        self.hgs = nn.ModuleList(Hourglass(3, width) for _ in range(stacks))
        self.features, self.outs = (
            nn.ModuleList(conv(width, width, 1) for _ in range(stacks)) for _ in range(2)
        )
        self.merge = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(stacks))

    def forward(self, x: Tensor) -> Tensor:
        x, maps = self.pre(x), []
        for hourglass, feature, out, merge in zip(
            self.hgs, self.features, self.outs, self.merge, strict=True
        ):
            features = feature(hourglass(x))
            maps.append(out(features))
            x = x + merge(maps[-1])
        return torch.stack(maps, 1)


class YOLO(nn.Module):
    """eriklindernoren/PyTorch-YOLOv3: a list of modules, whose outputs are kept for routes and shortcuts."""

    ROUTES = {6: (-1, 3), 10: (-1, 1)}
    SHORTCUTS = {4: 2}

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = {6: 2 * width, 10: 2 * width}
        self.module_list = nn.ModuleList()
        before = 3
        for index in range(12):
            if index in self.ROUTES or index in self.SHORTCUTS:
                self.module_list.append(nn.Sequential())
                before = widths.get(index, before)
            else:
                self.module_list.append(conv(before, width))
                before = width

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for index, module in enumerate(self.module_list):
            if index in self.ROUTES:
                x = torch.cat([outputs[place] for place in self.ROUTES[index]], 1)
            elif index in self.SHORTCUTS:
                x = outputs[-1] + outputs[self.SHORTCUTS[index]]
            else:
                x = module(x)
            outputs.append(x)
        return x


# Language, speech, graphs, recommendation and others.


class GPTBlock(nn.Module):
    """karpathy/nanoGPT's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The model around it, with tied weights."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(40, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(GPTBlock(width, 2) for _ in range(blocks))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 40, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


class MaskedText(nn.Module):
    """pytorch/examples, word_language_model: an encoder with a mask, here with the batch first."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.input_emb, self.decoder = nn.Embedding(40, width), nn.Linear(width, 40)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 32, batch_first=True), 4)

    def forward(self, src: Tensor) -> Tensor:
        mask = torch.log(torch.tril(torch.ones(src.size(1), src.size(1))))
        x = self.encoder(self.input_emb(src) * 4.0, mask=mask)
        return F.log_softmax(self.decoder(x), dim=-1)


class Seq2Seq(nn.Module):
    """bentrevett/pytorch-seq2seq: a recurrent encoder, and a decoder that attends to it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(40, width), nn.Linear(2 * width, 40)
        self.encoder, self.decoder = (nn.GRU(width, width, batch_first=True) for _ in range(2))

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        outputs, hidden = self.encoder(self.embedding(src))
        decoded, _ = self.decoder(self.embedding(trg), hidden)
        weights = torch.softmax(decoded @ outputs.transpose(1, 2), -1)
        return self.out(torch.cat([decoded, weights @ outputs], -1))  # type: ignore[no-any-return]


class CRNN(nn.Module):
    """meijieru/crnn.pytorch: convolutions, then recurrent layers over the columns of a picture."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cnn = nn.Sequential(conv(1, width), nn.MaxPool2d(2), conv(width, width), nn.MaxPool2d((8, 1)))
        self.rnn = nn.ModuleList(nn.LSTM(own, width, bidirectional=True) for own in (width, 2 * width))
        self.embedding = nn.Linear(2 * width, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cnn(x).squeeze(2).permute(2, 0, 1)
        for layer in self.rnn:
            x, _ = layer(x)
        return self.embedding(x).transpose(0, 1)  # type: ignore[no-any-return]


class TemporalBlock(nn.Module):
    """locuslab/TCN: dilated causal convolutions beside a residual."""

    def __init__(self, inputs: int, width: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(inputs, width, 3, padding=2 * dilation, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 3, padding=2 * dilation, dilation=dilation)
        self.downsample = nn.Conv1d(inputs, width, 1) if inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x)[..., : x.size(2)])
        out = F.relu(self.conv2(out)[..., : x.size(2)])
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    """Blocks of growing dilation."""

    def __init__(self, width: int = 8, levels: int = 5) -> None:
        super().__init__()
        blocks = (TemporalBlock(width if level else 1, width, 1 << level) for level in range(levels))
        self.tcn, self.linear = nn.Sequential(*blocks), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.tcn(x)[:, :, -1])  # type: ignore[no-any-return]


class NBeats(nn.Module):
    """ServiceNow/N-BEATS: each block takes away from the series, and adds to the forecast."""

    def __init__(self, blocks: int = 6, length: int = 12, horizon: int = 4) -> None:
        super().__init__()
        self.horizon = horizon
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(length, 16),
                nn.ReLU(),
                nn.Linear(16, 16),
                nn.ReLU(),
                nn.Linear(16, length + horizon),
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        residuals, forecast = x.flip(1), x[:, -1:]
        for block in self.blocks:
            theta = block(residuals)
            residuals = residuals - theta[:, self.horizon :]
            forecast = forecast + theta[:, : self.horizon]
        return forecast


class PointNet(nn.Module):
    """fxia22/pointnet.pytorch: a transform made of the points is applied to them."""

    def __init__(self) -> None:
        super().__init__()
        self.stn = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1)
        )
        self.fc = nn.Linear(32, 9)
        self.feat = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.classify = nn.Sequential(
            nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 5)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        transform = self.fc(self.stn(x).squeeze(2)).view(-1, 3, 3) + torch.eye(3, device=x.device)
        x = torch.bmm(x.transpose(2, 1), transform).transpose(2, 1)
        return F.log_softmax(self.classify(self.feat(x).max(2)[0]), dim=1), transform


class GraphConv(nn.Module):
    """tkipf/pygcn's layer, on batches of graphs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) / 4),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.matmul(adjacency, x @ self.weight) + self.bias


class GCN(nn.Module):
    """The adjacency goes into each layer."""

    def __init__(self, width: int = 8, layers: int = 6) -> None:
        super().__init__()
        self.gcs = nn.ModuleList(GraphConv(4 if not index else width, width) for index in range(layers))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.gcs:
            x = F.dropout(F.relu(layer(x, adjacency)), 0.5, self.training)
        return F.log_softmax(self.head(x), dim=-1)


class DLRM(nn.Module):
    """facebookresearch/dlrm: offsets have a row for each table, and indices are a list."""

    def __init__(self, tables: int = 3) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(tables))
        self.bot_l = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def interact(self, x: Tensor, bags: list[Tensor]) -> Tensor:
        """Products of all pairs."""
        joined = torch.stack([x, *bags], 1)
        products = torch.bmm(joined, joined.transpose(1, 2))
        rows, columns = torch.tril_indices(joined.size(1), joined.size(1), -1)
        return torch.cat([x, products[:, rows, columns]], 1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: list[Tensor]) -> Tensor:
        bags = [table(indices[row], offsets[row]) for row, table in enumerate(self.emb_l)]
        return self.top_l(self.interact(self.bot_l(dense), bags))  # type: ignore[no-any-return]


class BatchedDLRM(DLRM):
    """The same with the samples in dimension 0, as the refusal says."""

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:  # type: ignore[override]
        bags = [table(indices[:, row]) for row, table in enumerate(self.emb_l)]
        return self.top_l(self.interact(self.bot_l(dense), bags))  # type: ignore[no-any-return]


class DeepFM(nn.Module):
    """shenweichen/DeepCTR-Torch: a factorization machine beside a deep network on the same embeddings."""

    def __init__(self, fields: int = 6, width: int = 8) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Embedding(50, 1), nn.Embedding(50, width)
        self.dnn = nn.Sequential(
            nn.Linear(fields * width, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        values = self.embedding(ids)
        pairs = 0.5 * (values.sum(1).square() - values.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.linear(ids).sum(1) + pairs + self.dnn(values.flatten(1)))


class WaveNet(nn.Module):
    """NVIDIA/waveglow's part: gated dilated convolutions, whose skips are summed."""

    def __init__(self, width: int = 8, layers: int = 6) -> None:
        super().__init__()
        self.start, self.end = nn.Conv1d(4, width, 1), nn.Conv1d(width, 8, 1)
        self.in_layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, dilation=1 << index, padding=1 << index) for index in range(layers)
        )
        self.cond_layer = nn.Conv1d(6, 2 * width * layers, 1)
        self.res_skip_layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.width = width

    def forward(self, audio: Tensor, spectrogram: Tensor) -> Tensor:
        audio, output = self.start(audio), torch.zeros_like(self.start(audio))
        conditions = self.cond_layer(spectrogram).split(2 * self.width, 1)
        for layer, skip, condition in zip(self.in_layers, self.res_skip_layers, conditions, strict=True):
            gate, value = (layer(audio) + condition).chunk(2, 1)
            residual, own = skip(torch.tanh(value) * torch.sigmoid(gate)).chunk(2, 1)
            audio, output = audio + residual, output + own
        return self.end(output)  # type: ignore[no-any-return]


class DETR(nn.Module):
    """facebookresearch/detr: pictures as a sequence with the batch second, and queries."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, width, 3, 2), conv(width, width, 3, 2))
        self.transformer = nn.Transformer(width, 2, 3, 3, 32)
        self.query, self.row = nn.Parameter(torch.rand(5, width)), nn.Parameter(torch.rand(64, width))
        self.linear_class, self.linear_bbox = nn.Linear(width, 4), nn.Linear(width, 4)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        h = self.backbone(pictures).flatten(2).permute(2, 0, 1)
        queries = self.query.unsqueeze(1).repeat(1, pictures.size(0), 1)
        h = self.transformer(self.row[: h.size(0)].unsqueeze(1) + h, queries).transpose(0, 1)
        return {"logits": self.linear_class(h), "boxes": self.linear_bbox(h).sigmoid()}


class Whisper(nn.Module):
    """openai/whisper: encoder and decoder of own attention, and a sparse mask that forward does not read."""

    mask: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, 1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, batch_first=True) for _ in range(3)
        )
        self.token_embedding = nn.Embedding(40, width)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 2, 32, batch_first=True) for _ in range(3)
        )
        self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu_(1), persistent=False)
        self.register_buffer("alignment_heads", torch.ones(3, 2).to_sparse(), persistent=False)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        audio = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).permute(0, 2, 1)
        for block in self.blocks:
            audio = block(audio)
        x, mask = self.token_embedding(tokens), self.mask[: tokens.size(1), : tokens.size(1)]
        for block in self.decoder:
            x = block(x, audio, tgt_mask=mask)
        return x @ self.token_embedding.weight.T  # type: ignore[no-any-return]


class Contrastive(nn.Module):
    """openai/CLIP: pictures and texts of a batch are compared with each other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.visual, self.text = (
            nn.Sequential(conv(3, width), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Embedding(40, width),
        )
        self.transformer = nn.Sequential(*(nn.TransformerEncoderLayer(width, 2, 32) for _ in range(3)))

    def forward(self, pictures: Tensor, texts: Tensor) -> Tensor:
        text = self.transformer(self.text(texts).permute(1, 0, 2)).mean(0)
        return F.normalize(self.visual(pictures), dim=-1) @ F.normalize(text, dim=-1).T


# The table.

MARKS = "<!-- made by benchmarks/public_models.py -->", "<!-- end of public models -->"


@dataclass(frozen=True)
class Case:
    """A model of a repository. `make` returns it, and its input."""

    repository: str
    make: Callable[[], tuple[nn.Module, Any]]


def pictures(side: int, channels: int = 3) -> Tensor:
    """Two of them."""
    return torch.randn(2, channels, side, side)


def ids(*shape: int) -> Tensor:
    """Token ids of the shape."""
    return torch.randint(1, 40, shape)


REWRITTEN = {
    "UNet": Case("milesial/Pytorch-UNet", lambda: (UNet(), pictures(32))),
    "Pix2PixUNet": Case("junyanz/pytorch-CycleGAN-and-pix2pix", lambda: (Pix2PixUNet(), pictures(128))),
    "GPipeUNet": Case("kakaobrain/torchgpipe", lambda: (GPipeUNet(), pictures(32))),
    "AmoebaNet": Case("kakaobrain/torchgpipe", lambda: (AmoebaNet(), pictures(32))),
    "ResNet-101": Case("kakaobrain/torchgpipe", lambda: (torchvision.models.resnet101(), pictures(32))),
    "EAST": Case("SakuraRiven/EAST", lambda: (EAST(), pictures(64))),
    "SSD": Case("amdegroot/ssd.pytorch", lambda: (SSD(), pictures(64))),
    "FPN": Case("kuangliu/pytorch-fpn", lambda: (FPN(), pictures(64))),
    "YOLO": Case("eriklindernoren/PyTorch-YOLOv3", lambda: (YOLO(), pictures(16))),
    "Stacked": Case("princeton-vl/pytorch_stacked_hourglass", lambda: (Stacked(), pictures(32))),
    "DETR": Case("facebookresearch/detr", lambda: (DETR(), pictures(16))),
    "VDSR": Case("twtygqyy/pytorch-vdsr", lambda: (VDSR(), pictures(16, 1))),
    "SRVGGNet": Case("xinntao/Real-ESRGAN", lambda: (SRVGGNet(), pictures(16))),
    "EDSR": Case("sanghyun-son/EDSR-PyTorch", lambda: (EDSR(), pictures(16))),
    "GPT": Case("karpathy/nanoGPT", lambda: (GPT(), ids(2, 8))),
    "MaskedText": Case("pytorch/examples", lambda: (MaskedText(), ids(2, 8))),
    "Seq2Seq": Case("bentrevett/pytorch-seq2seq", lambda: (Seq2Seq(), (ids(2, 8), ids(2, 6)))),
    "CRNN": Case("meijieru/crnn.pytorch", lambda: (CRNN(), torch.randn(2, 1, 16, 32))),
    "Whisper": Case("openai/whisper", lambda: (Whisper(), (torch.randn(2, 8, 20), ids(2, 6)))),
    "WaveNet": Case("NVIDIA/waveglow", lambda: (WaveNet(), (torch.randn(2, 4, 20), torch.randn(2, 6, 20)))),
    "TCN": Case("locuslab/TCN", lambda: (TCN(), torch.randn(2, 1, 32))),
    "NBeats": Case("ServiceNow/N-BEATS", lambda: (NBeats(), torch.randn(2, 12))),
    "PointNet": Case("fxia22/pointnet.pytorch", lambda: (PointNet(), torch.randn(2, 3, 20))),
    "GCN": Case("tkipf/pygcn", lambda: (GCN(), (torch.randn(2, 5, 4), torch.rand(2, 5, 5)))),
    "DLRM": Case(
        "facebookresearch/dlrm",
        lambda: (
            DLRM(),
            (torch.randn(4, 5), (torch.arange(4) * 2).repeat(3, 1), [ids(8) % 20 for _ in range(3)]),
        ),
    ),
    "BatchedDLRM": Case(
        "facebookresearch/dlrm", lambda: (BatchedDLRM(), (torch.randn(4, 5), ids(4, 3, 2) % 20))
    ),
    "DeepFM": Case("shenweichen/DeepCTR-Torch", lambda: (DeepFM(), ids(4, 6))),
    "Contrastive": Case("openai/CLIP", lambda: (Contrastive(), (pictures(8), ids(2, 6)))),
}
"""The models of this file."""


def of_smp(name: str) -> Case:
    """A segmentation model with a small encoder."""

    def make() -> tuple[nn.Module, Any]:
        smp = importlib.import_module("segmentation_models_pytorch")
        encoder = "mit_b0" if name == "Segformer" else "resnet18"
        return getattr(smp, name)(encoder, encoder_weights=None, classes=2), pictures(128)

    return Case("qubvel-org/segmentation_models.pytorch", make)


def of_package(repository: str, package: str, path: str, given: Callable[[], Any], **settings: Any) -> Case:
    """A class or function of an installed package with these settings."""

    def make() -> tuple[nn.Module, Any]:
        value: Any = importlib.import_module(package)
        for part in path.split("."):
            value = getattr(value, part)
        return value(**settings), given()

    return Case(repository, make)


VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 3, "heads": 2, "mlp_dim": 32}
DROPS = {"dropout": 0.1, "emb_dropout": 0.1}
SPEECH = "pytorch/audio"
VITS = "lucidrains/vit-pytorch"
DIFFUSERS = "huggingface/diffusers"
X = "lucidrains/x-transformers"
INSTALLED = {
    **{
        f"smp.{name}": of_smp(name)
        for name in (
            *(
                "Unet",
                "UnetPlusPlus",
                "MAnet",
                "Linknet",
                "FPN",
                "PSPNet",
                "PAN",
                "DeepLabV3",
                "DeepLabV3Plus",
            ),
            *("UPerNet", "Segformer"),
        )
    },
    "vit.ViT": of_package(VITS, "vit_pytorch.vit", "ViT", lambda: pictures(32), **VIT, **DROPS),
    "vit.SimpleViT": of_package(VITS, "vit_pytorch.simple_vit", "SimpleViT", lambda: pictures(32), **VIT),
    "vit.DeepViT": of_package(VITS, "vit_pytorch.deepvit", "DeepViT", lambda: pictures(32), **VIT, **DROPS),
    "vit.ParallelViT": of_package(
        VITS, "vit_pytorch.parallel_vit", "ViT", lambda: pictures(32), **VIT, num_parallel_branches=2
    ),
    "vit.CaiT": of_package(
        VITS, "vit_pytorch.cait", "CaiT", lambda: pictures(32), **VIT, cls_depth=2, layer_dropout=0.0
    ),
    "vit.CCT": of_package(
        *(VITS, "vit_pytorch.cct", "CCT", lambda: pictures(32)),
        img_size=32,
        embedding_dim=16,
        n_conv_layers=1,
        num_layers=3,
        num_heads=2,
        num_classes=5,
        mlp_ratio=2.0,
        kernel_size=3,
        stride=2,
        padding=1,
    ),
    "vit.CvT": of_package(VITS, "vit_pytorch.cvt", "CvT", lambda: pictures(32), num_classes=5),
    "vit.Registers": of_package(
        VITS, "vit_pytorch.simple_vit_with_register_tokens", "SimpleViT", lambda: pictures(32), **VIT
    ),
    "vit.ViTForSmallDataset": of_package(
        VITS, "vit_pytorch.vit_for_small_dataset", "ViT", lambda: pictures(32), **VIT
    ),
    "audio.Conformer": of_package(
        *(SPEECH, "torchaudio.models", "Conformer", lambda: (torch.randn(2, 12, 8), torch.tensor([12, 9]))),
        input_dim=8,
        num_heads=2,
        ffn_dim=16,
        num_layers=3,
        depthwise_conv_kernel_size=3,
    ),
    "audio.ConvTasNet": of_package(
        *(SPEECH, "torchaudio.models", "ConvTasNet", lambda: torch.randn(2, 1, 400)),
        enc_num_feats=16,
        msk_num_feats=8,
        msk_num_hidden_feats=16,
        msk_num_layers=3,
        msk_num_stacks=2,
    ),
    "audio.DeepSpeech": of_package(
        SPEECH, "torchaudio.models", "DeepSpeech", lambda: torch.randn(2, 1, 10, 8), n_feature=8, n_hidden=16
    ),
    "audio.Wav2Letter": of_package(
        SPEECH,
        "torchaudio.models",
        "Wav2Letter",
        lambda: torch.randn(2, 8, 200),
        input_type="mfcc",
        num_features=8,
    ),
    "audio.WaveRNN": of_package(
        *(SPEECH, "torchaudio.models", "WaveRNN", lambda: (torch.randn(2, 1, 24), torch.randn(2, 1, 8, 10))),
        upsample_scales=[2, 2],
        n_classes=8,
        hop_length=4,
        n_rnn=16,
        n_fc=16,
        n_freq=8,
        n_hidden=8,
        n_output=8,
        n_res_block=3,
    ),
    "audio.wav2vec2": of_package(
        *(SPEECH, "torchaudio.models", "wav2vec2_model", lambda: torch.randn(2, 800)),
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=16,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=5,
        encoder_pos_conv_groups=2,
        encoder_num_layers=3,
        encoder_num_heads=2,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=32,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.1,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=8,
    ),
    "diffusers.UNet2D": of_package(
        *(DIFFUSERS, "diffusers", "UNet2DModel", lambda: (pictures(16), torch.tensor([3, 5]))),
        block_out_channels=(16, 32),
        layers_per_block=2,
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers.UNet2DCondition": of_package(
        *(DIFFUSERS, "diffusers", "UNet2DConditionModel"),
        lambda: (pictures(16, 4), torch.tensor([3, 5]), torch.randn(2, 5, 16)),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        cross_attention_dim=16,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
    ),
    "diffusers.AutoencoderKL": of_package(
        *(DIFFUSERS, "diffusers", "AutoencoderKL", lambda: pictures(16)),
        block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "diffusers.DiT": of_package(
        *(DIFFUSERS, "diffusers", "DiTTransformer2DModel"),
        lambda: (pictures(8, 4), torch.tensor([3, 5]), torch.tensor([1, 2])),
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=3,
        sample_size=8,
        norm_num_groups=4,
    ),
    "open_clip.ViT": of_package(
        *("mlfoundations/open_clip", "open_clip.transformer", "VisionTransformer", lambda: pictures(32)),
        image_size=32,
        patch_size=8,
        width=16,
        layers=3,
        heads=2,
        mlp_ratio=2.0,
    ),
    "open_clip.Text": of_package(
        *("mlfoundations/open_clip", "open_clip.transformer", "TextTransformer", lambda: ids(2, 12)),
        context_length=12,
        vocab_size=40,
        width=16,
        heads=2,
        layers=3,
        output_dim=8,
    ),
}
"""Models of packages, which are tried where these are installed."""


def decoder() -> tuple[nn.Module, Any]:
    """A causal language model with rotary embeddings."""
    package = importlib.import_module("x_transformers")
    layers = package.Decoder(dim=16, depth=3, heads=2, rotary_pos_emb=True)
    return package.TransformerWrapper(num_tokens=40, max_seq_len=16, attn_layers=layers), ids(2, 8)


INSTALLED["x.Decoder"] = Case(X, decoder)


def verdict(case: Case) -> str:
    """The cells of a model's row."""
    torch.manual_seed(0)
    try:
        model, given = case.make()
    except ImportError as error:
        return f"not installed: {error.name} | | | |"
    try:
        chain = build_chain(model.train(), given, verify=True)
    except PplanError as error:
        reason = re.sub(r"/\S*/", "", error.what.splitlines()[0])[:240]
        return f"refused: {reason} {error.hint} | | | |"
    notes = chain.comparison.notes if chain.comparison is not None else ()
    cuts = sum(layer.cut_reason is None for layer in chain.layers[:-1])
    crossing = max(layer.crossing for layer in chain.layers)
    return (
        f"right{''.join(f'; {note}' for note in notes)} | {len(chain)} | {cuts} | {crossing} | {chain.tool}"
    )


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    cases = {**REWRITTEN, **INSTALLED}
    lines = [
        "| model | repository | verdict | layers | cuts | tensors over a cut | tool |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    print("\n".join(lines))
    for name in options.names or cases:
        cells = verdict(cases[name]).replace("\n", " ")
        lines.append(f"| {name} | {cases[name].repository} | {cells} |")
        print(lines[-1], flush=True)
    if options.write:
        from model_coverage import write

        write(options.write, lines, MARKS)


if __name__ == "__main__":
    main()
