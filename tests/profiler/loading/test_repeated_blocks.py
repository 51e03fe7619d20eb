"""Patterns of the layers that a family's blocks are: of lists of blocks, of stages, and not of experts."""

from __future__ import annotations

from torch import Tensor, nn

from pplan.profiler.transformers_models import block_patterns, registration_order


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, given: Tensor) -> Tensor:
        return given + self.mlp(self.mix(given))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Blocks between what leads into the stage and what leads out of it."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width // 2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, 3)
        self.experts = nn.ModuleList(Block(width) for _ in range(3))


def model(*stages: nn.Module) -> nn.Module:
    whole = nn.Module()
    whole.embed, whole.stages, whole.head = nn.Linear(4, 4), nn.ModuleList(stages), nn.Linear(4, 2)
    return whole


def patterns(*stages: nn.Module) -> list[str]:
    whole = model(*stages)
    return block_patterns(whole, registration_order(whole))


def test_a_list_of_blocks() -> None:
    assert patterns(Block(8), Block(8)) == ["stages.*", "head"]


def test_stages_of_wider_and_wider_blocks_are_opened() -> None:
    """Also where the blocks of the first are too small to be a list of their own by size."""
    first = ["stages.0.blocks.*", "stages.0.norm"]
    others = [f"stages.{i}.{part}" for i in (1, 2) for part in ("enter", "blocks.*", "norm")]
    assert patterns(Stage(8, 2), Stage(16, 3), Stage(32, 1)) == [*first, *others, "head"]


def test_experts_are_no_blocks() -> None:
    assert patterns(Experts(8), Experts(8)) == ["stages.*", "head"]
