"""A process of test_tensor_parallel_profile.py: profiles layers that it shares with another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pplan

LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 40, "head_dim": 4, "max_position_embeddings": 16,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return mixed


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    os.environ["RANK"] = str(rank)
    blocks = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
    profiles = {
        "blocks": pplan.profile(
            blocks,
            torch.zeros(1, 8, 16),
            tensor_parallel=2,
            tensor_plan={"up": "colwise", "down": "rowwise"},
            micro_batch_sizes=(1, 2),
            budget_seconds=0.2,
        ),
        "llama": pplan.profile(
            "hf:llama", settings=LLAMA, tensor_parallel=2, micro_batch_sizes=(1, 2), budget_seconds=0.2
        ),
    }
    content = {name: json.loads(profile.to_json()) for name, profile in profiles.items()}
    (folder / f"{rank}.json").write_text(json.dumps(content))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
