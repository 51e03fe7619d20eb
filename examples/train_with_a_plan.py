"""Trains a small network by a plan for any runtime: python examples/train_with_a_plan.py FILE [EPOCHS]

Where stages are processes: torchrun --nproc-per-node N examples/train_with_a_plan.py FILE [EPOCHS]
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from pplan.runtimes.training import build

CHECKPOINT = Path("train.checkpoint")


def make() -> tuple[nn.Module, torch.Tensor]:
    """The model and an example input, as `pplan profile examples.train_with_a_plan:make` takes them."""
    blocks = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 10)), torch.randn(2, 32)


def data(samples: int, seed: int) -> TensorDataset:
    """Stands for your data: vectors, labelled by their largest of ten numbers."""
    vectors = torch.randn(samples, 32, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(vectors, vectors[:, :10].argmax(1))


def main(file: str, epochs: int) -> None:
    torch.manual_seed(0)  # the same model and batches in every process
    model, example = make()
    test_inputs, test_labels = data(100, seed=1).tensors
    optimizer = partial(torch.optim.AdamW, lr=0.003)
    with build(file, model, cross_entropy, example, optimizer=optimizer) as training:
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 30, gamma=0.5)
        first = 0
        if training.has_checkpoint(CHECKPOINT):  # of any plan for this model
            progress = training.load(CHECKPOINT)
            scheduler.load_state_dict(progress["scheduler"])
            first = progress["epoch"]
        for epoch in range(first, epochs):
            shuffle = torch.Generator().manual_seed(epoch)
            size = training.document.mini_batch
            for inputs, labels in DataLoader(data(500, seed=0), size, shuffle=True, generator=shuffle):
                loss = training.step(inputs, labels)  # the last batch is smaller
                norm = training.clip_grad_norm_(1.0)
                training.optimizer.step()
                scheduler.step()
            test_loss = training.eval(test_inputs, test_labels)
            if training.is_main:
                print(f"epoch {epoch}: loss {loss:.4f}, gradient {norm:.3f}, test {test_loss:.4f}")
            training.save(CHECKPOINT, epoch=epoch + 1, scheduler=scheduler.state_dict())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
