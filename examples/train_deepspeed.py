"""VGG-19, one process a GPU: torchrun --nproc-per-node=N examples/train_deepspeed.py [FILE] [PIXELS]"""

import itertools
import sys
from pathlib import Path

import torch
import torchvision

import pplan
from pplan.runtimes.deepspeed import DeepspeedExport, build, start

plan = DeepspeedExport.load(Path(sys.argv[1] if len(sys.argv) > 1 else "vgg19.deepspeed.json"))
pixels = int(sys.argv[2]) if len(sys.argv) > 2 else 224
deepspeed = start("cuda" if torch.cuda.is_available() else "cpu")  # the module, its processes connected

layers = pplan.sequential(torchvision.models.vgg19(), torch.randn(1, 3, pixels, pixels))
model = build(plan, layers, torch.nn.functional.cross_entropy)  # the stage of this process
engine, *_ = deepspeed.initialize(model=model, config=plan.config, model_parameters=model.parameters())

size = plan.config["train_micro_batch_size_per_gpu"]
batch = torch.randn(size, 3, pixels, pixels), torch.randint(1000, (size,))
for step in range(3):
    loss = engine.train_batch(itertools.repeat(batch))
    if engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
