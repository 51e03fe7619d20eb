"""Joint bound on the first link of a pipeline and the first stage's all-reduce, on any devices.

The least transfer needs senders and receivers on one node, and the least all-reduce needs all replicas of a
stage there. No device is in two places, so a plan cannot have both. A *node* is a group of N devices of the
innermost level. The first stage has r replicas, the second s. Let k be a node with the most replicas of the
first stage, a of them.

- No node holds more than a replicas of the first stage. `least_all_reduce_seconds(per_node=a)` bounds its
  all-reduce.
- Node k holds at most N - a replicas of the second stage. Its senders have a / r of a micro-batch of B bytes,
  of which its receivers take at most (N - a) / s. The rest leaves k by the senders' ports of the outer
  levels, which send at most p bytes per second: the sum over levels of min(a, ports of a node) bandwidths. So
  a transfer takes

      (a / r - (N - a) / s) B / p    seconds or more

  plus the latency of an outer level. The gradients go the same way back.

Every plan has some a with r / nodes <= a <= min(N, r), so the least joint cost over a holds for every plan. B
is at least min(r, s) shares of c bytes, those of the stage with fewer replicas. With x = s / r and q = (N -
a) / a, a transfer takes no less than c min(1 - q / x, x - q) a / p, which grows with x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...cost_models.topology import Topology
from ..stage_table import Floats, Indices
from .stage_figures import Choice


class NodeShare(NamedTuple):
    """A number of replicas of the first stage in one node, and the cost of transfers that leave the node.

    Attributes:
        replicas: Most replicas of the first stage in the node.
        pace: Seconds per byte of a share that leaves the node.
        latency: Least latency in seconds of a link between nodes.
    """

    replicas: int
    pace: float
    latency: float


@dataclass(frozen=True, eq=False)
class FirstLink:
    """Least extra seconds of the first link and the first all-reduce, by choices of both stages."""

    topology: Topology
    choices: Sequence[Choice]
    _exposed: dict[tuple[int, int], Floats] = field(default_factory=dict)

    @property
    def node(self) -> int:
        """Devices of a node; all devices if no link leaves it."""
        levels = self.topology.levels_in_use
        return levels[0].size or 1 if len(levels) > 1 else self.topology.gpus

    def shares(self) -> Iterator[NodeShare]:
        """Yield the numbers of replicas that a node may hold, with the cost of leaving it."""
        inner, outer = self.node, self.topology.levels_in_use[1:]
        latency = min(level.link.latency_seconds for level in outer)
        for replicas in range(1, inner + 1):
            rate = sum(
                min(replicas, max(1, inner // level.devices_per_port)) * level.link.bandwidth_bytes_per_second
                for level in outer
            )
            yield NodeShare(replicas, replicas / rate, latency)

    def extra_seconds(
        self, place: int, first: int, second: Indices, link_seconds: float, transfers: int
    ) -> Floats:
        """Return the seconds by which link and all-reduce exceed the sum of their separate bounds.

        Args:
            place: Cut point where the first stage ends.
            first: Choice of the first stage.
            second: (n,) choices of the second stage.
            link_seconds: The separate bound on a transfer.
            transfers: Number of transfers that a step waits for.

        Returns:
            (n,) seconds.
        """
        counts, node = self.choices[first].counts, self.node
        ratio = np.array([self.choices[at].counts.fewest for at in second]) / counts.most
        bytes = [self.choices[at].table.crossing[place] for at in (first, *second)]
        share, nodes = np.maximum(bytes[0], bytes[1:]), -(-self.topology.gpus // node)
        least = np.full(len(second), np.inf)
        for replicas, pace, latency in self.shares():
            if replicas <= counts.most and replicas * nodes >= counts.fewest:
                stays = (node - replicas) / replicas
                leaving = np.minimum(1 - stays / ratio, ratio - stays)
                seconds = np.where(leaving > 0, share * leaving * pace + latency, 0.0)
                exposed = self.exposed(first, place, replicas) - self.exposed(first, place, node)
                extra = transfers * np.maximum(seconds - link_seconds, 0.0) + exposed
                least = np.minimum(least, extra)
        return least

    def exposed(self, choice: int, place: int, per_node: int) -> float:
        """Return the least exposed all-reduce seconds of a stage with at most `per_node` replicas a node."""
        key = choice, per_node
        if key not in self._exposed:
            self._exposed[key] = self.choices[choice].exposed_allreduce(per_node)[0]
        return float(self._exposed[key][place])
