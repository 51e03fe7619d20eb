"""Models of public repositories as pplan takes them apart: python benchmarks/public_models.py [NAME ...]

Each model is a small rewriting of a public repository's structure: the modules, lists and calls that decide
where a model can be cut, with few channels. Nothing is copied from there. The table says what became of each:
its layers, the allowed cuts, the most tensors over a cut, and the largest share of the FLOPs in one layer; or
the reason of a refusal. Layers are trained beside the model and must leave the same outputs, gradients and
buffers, bit for bit. `--write docs/models.md` writes the table into that page.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        return self.model(x) if self.outermost else torch.cat([x, self.model(x)], 1)  # type: ignore[no-any-return]


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
