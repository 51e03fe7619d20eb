"""Trains VGG-19 on random images with torchgpipe: python examples/train_torchgpipe.py [FILE] [PIXELS]"""

import sys
from pathlib import Path

import torch
import torchvision
from torch.nn.functional import cross_entropy

from pplan.runtimes.torchgpipe import TorchgpipeExport, build

plan = TorchgpipeExport.load(Path(sys.argv[1] if len(sys.argv) > 1 else "vgg19.torchgpipe.json"))
pixels = int(sys.argv[2]) if len(sys.argv) > 2 else 224

model = build(plan, torchvision.models.vgg19(), torch.randn(1, 3, pixels, pixels))  # a torchgpipe.GPipe
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

images = torch.randn(plan.mini_batch, 3, pixels, pixels, device=model.devices[0])
labels = torch.randint(1000, (plan.mini_batch,), device=model.devices[-1])
for step in range(3):
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
