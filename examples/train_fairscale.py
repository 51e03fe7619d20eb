"""Trains VGG-19 on random images with FairScale: python examples/train_fairscale.py [FILE] [PIXELS]"""

import gc
import sys
import threading
from pathlib import Path

import torch
import torchvision

from pplan.runtimes.fairscale import FairscaleExport, build

plan = FairscaleExport.load(Path(sys.argv[1] if len(sys.argv) > 1 else "vgg19.fairscale.json"))
pixels = int(sys.argv[2]) if len(sys.argv) > 2 else 224
model = build(plan, torchvision.models.vgg19(), torch.randn(1, 3, pixels, pixels))  # a fairscale.nn.Pipe
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = model(torch.randn(plan.mini_batch, 3, pixels, pixels, device=model.devices[0])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}")
del model, loss
gc.collect()  # a living Pipe would keep the interpreter from ending, and its last thread's end could abort it
for thread in threading.enumerate()[1:]:
    thread.join()
