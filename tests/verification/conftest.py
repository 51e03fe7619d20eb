"""Generated profiles, the plans that are solved for them, and what the verb and the oracle find in both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pplan
from pplan.api.lint import PlanReport
from pplan.cost_models.text_files import KEY
from tests.oracle import Findings, attack

Content = dict[str, Any]
MakeProfile = Callable[..., Content]


def generated(
    seed: int,
    layers: int,
    *,
    sizes: tuple[int, ...] = (1, 2, 4),
    loss: bool = False,
    parts: bool = False,
    dtype: str = "float32",
    cuts: float = 0.8,
    host: float = 0.3,
    traffic: float = 1.0,
    faster: float = 1.0,
    tied: tuple[tuple[int, ...], ...] = (),
) -> Content:
    """Layers whose costs grow by lines with the micro-batch size; `faster` as another device's profile;
    `tied`: the users of weights of 20 MB, the second of which is frozen."""
    rng = np.random.default_rng(seed)
    made: list[Content] = []
    for index in range(layers):
        draw = rng.random(14)
        layer: Content = {
            "name": f"layers.{index}",
            "kind": "Linear",
            "parameter_bytes": int(3e7 * draw[0]),
            "trainable_bytes": 0 if draw[12] < 0.1 else int(3e7 * draw[0] * (0.5 if draw[12] < 0.3 else 1)),
            "buffer_bytes": int(1e4 * draw[1]),
            "cut_after": bool(draw[13] < cuts),
            "accumulation_seconds": 0.0 if draw[12] < 0.1 else 6e-4 * draw[0] / faster,
            "costs": [],
        }
        for size in sizes:
            backward = 1e-3 * (2 * draw[4] * size + 0.3 * draw[5]) / faster
            cost = {
                "micro_batch_size": size,
                "forward_seconds": 1e-3 * (draw[2] * size + 0.3 * draw[3]) / faster,
                "backward_seconds": backward,
                "output_bytes": int(traffic * 1e6 * draw[6] * size),
                "saved_bytes": int(2e6 * draw[7] * size),
                "saved_input_bytes": int(2e5 * draw[8] * size),
                "workspace_bytes": int(3e5 * draw[9] * size),
                "spread": 0.01,
                "forward_host_seconds": 1e-3 * host * draw[10],
                "backward_host_seconds": 1e-3 * host * draw[11],
            }
            if parts:
                cost |= {
                    "backward_input_seconds": 0.55 * backward,
                    "backward_weight_seconds": 0.47 * backward,
                }
            layer["costs"].append(cost)
        made.append(layer)
    whole = [
        {"micro_batch_size": s, "forward_seconds": 1, "backward_seconds": 2, "closing_ratio": 1 + 0.01 * s}
        for s in sizes
    ]
    profile: Content = {"schema": 1, "model": "toy", "device": "cuda:0", "dtype": dtype, "layers": made}
    profile |= {"whole": whole, "input_bytes_per_sample": 5000}
    profile["tied"] = [_tied(made, users, number) for number, users in enumerate(tied)]
    if loss:
        profile["loss"] = {"name": "cross entropy", "costs": [_loss_costs(size) for size in sizes]}
    return profile


def _tied(layers: list[Content], users: tuple[int, ...], number: int) -> Content:
    layers[users[0]]["parameter_bytes"] += 20_000_000
    layers[users[0]]["trainable_bytes"] += 20_000_000 * (number != 1)
    names = [layers[user]["name"] for user in users]
    return {"tensor": f"weight{number}", "layers": names, "bytes": 20_000_000, "trainable": number != 1}


def _loss_costs(size: int) -> Content:
    return {
        "micro_batch_size": size,
        "forward_seconds": 2e-4 * size,
        "backward_seconds": 3e-4 * size,
        "output_bytes": 4,
        "saved_bytes": 4000 * size,
        "workspace_bytes": 10_000 * size,
        "forward_workspace_bytes": 1000,
    }


@pytest.fixture(scope="session")
def make_profile() -> MakeProfile:
    """`generated`."""
    return generated


@dataclass(frozen=True)
class Solved:
    """A plan as JSON, and the folder of its profile."""

    plan: Content
    profile: bytes
    folder: Path

    def verify(self, plan: Content | None = None) -> PlanReport:
        """What `pplan lint` says of the plan, or of a changed one, whose file holds no hash."""
        content = dict(self.plan if plan is None else plan)
        if plan is not None and isinstance(content.get("made_by"), dict):
            content["made_by"] = {key: own for key, own in content["made_by"].items() if key != KEY}
        path = self.folder / "toy.plan.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return pplan.lint(path)

    def attack(self, plan: Content | None = None, profile: bytes | None = None) -> Findings:
        """What the oracle finds in the plan, or in a changed one."""
        return attack(json.dumps(self.plan if plan is None else plan), profile or self.profile, self.folder)

    def check(self) -> None:
        """Fail with what one of them finds."""
        assert self.attack() == []
        assert self.verify().differing == []


Solve = Callable[..., Solved]


@pytest.fixture(scope="session")
def solve_files(tmp_path_factory: pytest.TempPathFactory) -> Solve:
    """A function of a profile and the options of `pplan.solve`; `topology` is the text of a TOML file."""

    def solve(profile: Content, *, topology: str = "", **options: Any) -> Solved:
        folder = tmp_path_factory.mktemp("plan")
        content = json.dumps(profile).encode()
        (folder / "toy.profile.json").write_bytes(content)
        if topology:
            (folder / "machine.toml").write_text(topology)
            options["topology"] = folder / "machine.toml"
            own = generated(99, len(profile["layers"]), sizes=_sizes(profile), faster=2.0)
            (folder / "own.profile.json").write_text(json.dumps(own))
        plan = pplan.solve(folder / "toy.profile.json", **options)
        return Solved(json.loads(plan.to_json()), content, folder)

    return solve


def _sizes(profile: Content) -> tuple[int, ...]:
    return tuple(cost["micro_batch_size"] for cost in profile["layers"][0]["costs"])
