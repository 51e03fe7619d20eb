"""What a block, the embedding and the head take and need on one device, with one set of degrees, where every
block of a pipeline has degrees of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...cost_models.schedules import one_f_one_b_in_flight
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import RankCosts
from ...cost_models.transformer.resharding import StageDevices
from ...cost_models.transformer.training_setting import TrainingSetting
from ...cost_models.transformer.transformer_shape import TransformerShape
from .stage_degree_table import FIRST, LAST, MIDDLE


@dataclass(frozen=True)
class BlockDegrees:
    """Those of a block, and whether its forward runs again."""

    degrees: ParallelDegrees
    again: bool


class BlockChoice:
    """What blocks, embedding and head take with one set of degrees, with or without running forward again."""

    def __init__(
        self,
        shape: TransformerShape,
        degrees: ParallelDegrees,
        setting: TrainingSetting,
        costs: RankCosts,
    ) -> None:
        self.own = BlockDegrees(degrees, setting.recompute == "full")
        # Three stages: with the embedding, with nothing, with the head.
        layers = self.layers = LayerTable(shape, replace(degrees, pipeline=3), setting, costs)
        places = {kind: shape.routed.index(kind) for kind in layers.blocks}
        ranges = {kind: range(place, place + 1) for kind, place in places.items()}
        self.seconds = {kind: layers.seconds(own, MIDDLE) for kind, own in ranges.items()}
        self.parameters = {kind: layers.parameters(own, MIDDLE) for kind, own in ranges.items()}
        ledgers = {kind: layers.ledger((own,), MIDDLE) for kind, own in ranges.items()}
        alive = one_f_one_b_in_flight(MIDDLE, 3, setting.micro_batches)
        self.states = {kind: _states(ledger) for kind, ledger in ledgers.items()}
        self.saved = {kind: ledger["activations"] / alive for kind, ledger in ledgers.items()}
        self.workspace = max(ledger["workspace"] for ledger in ledgers.values())
        alone = {frozenset({kind}): ledger["placeholders"] for kind, ledger in ledgers.items()}
        every = layers.ledger((range(shape.blocks),), MIDDLE)
        self.placeholders = {frozenset(ranges): every["placeholders"], **alone}
        self.ends = {role: layers.seconds(range(0), role) for role in (FIRST, LAST)}
        ends = {role: layers.ledger((range(0),), role) for role in (FIRST, LAST)}
        self.end_states = {role: _states(ledger) for role, ledger in ends.items()}
        self.end_saved = ends[LAST]["activations"] / one_f_one_b_in_flight(LAST, 3, setting.micro_batches)
        self.end_workspace = ends[LAST]["workspace"]
        self.end_placeholders = ends[LAST]["placeholders"]

    def stage_devices(self, first: int) -> StageDevices:
        """From the rank `first` on."""
        return StageDevices(self.own.degrees, first)


def _states(ledger: dict[str, float]) -> float:
    return ledger["weights"] + ledger["gradients"] + ledger["optimizer"]
