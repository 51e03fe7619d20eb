"""The environment variables that torchrun sets in each process it starts. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..cost_models.errors import UsageError

COMMAND = "torchrun --no-python --nproc-per-node 2 pplan"
"""Before the verb. pplan is a console script, not a file of Python code: torchrun needs to be told."""
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class TorchrunEnv:
    """This process among `world_size`; `node` is torchrun's number of the node, None with other launchers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int | None


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process among others."""
    return bool(environment.get("RANK") and environment.get("WORLD_SIZE"))


def read_torchrun_env(
    environment: Mapping[str, str], verb: str = "machine measure links", at_least: int = 2
) -> TorchrunEnv:
    """Reads the environment. Raises UsageError where torchrun did not start this process, or fewer than
    `at_least`."""
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing:
        raise UsageError(
            f"{verb}: torchrun did not start this process ({missing[0]} is not set)",
            f"Start one process for each device: {COMMAND} {verb}",
        )
    group = environment.get("GROUP_RANK")
    env = TorchrunEnv(
        rank=_whole(environment, "RANK", verb),
        world_size=_whole(environment, "WORLD_SIZE", verb),
        local_rank=_whole(environment, "LOCAL_RANK", verb),
        local_world_size=_whole(environment, "LOCAL_WORLD_SIZE", verb),
        node=None if not group else _whole(environment, "GROUP_RANK", verb),
    )
    if env.world_size < at_least:
        raise UsageError(f"{verb}: there is one process, so no link", f"Start two or more: {COMMAND} {verb}")
    return env


def _whole(environment: Mapping[str, str], name: str, verb: str) -> int:
    text = environment[name]
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(
            f"{verb}: {name} is {text!r}, not a whole number", f"Start it with: {COMMAND} {verb}"
        )
    return int(text)
