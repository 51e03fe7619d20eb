"""Seconds of layers as they might have been measured: random factors, the same ones for every plan.

A profile holds, of each layer, the median of forward + backward and its interquartile range as a share of
that median, the spread s. The layer's seconds are taken as lognormal around the median: exp(sigma z) times as
long, z standard normal. The quartiles of that are exp(+-q sigma) with q = 0.6745, so 2 sinh(q sigma) = s, and
sigma = asinh(s / 2) / q. Layers vary independently of each other; forward and backward of one together, as
it is their sum of which the spread is known.

What the layers miss of the whole model (the closing error e, see `Chain.uncertainty`) is common to all of
them: one more factor (1 + e)^z, so that e is one standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...cost_models.layer import LayerCosts
from ..stage_table import Floats

SAMPLES = 200
SEED = 0
QUARTILE = 0.6744897501960817
"""Of the standard normal distribution, the third."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Standard normal numbers: `layers` (samples, layers), and `common` (samples,) for the closing error."""

    layers: Floats
    common: Floats

    def __len__(self) -> int:
        return len(self.common)

    def part(self, first: int, end: int) -> Draws:
        """Some of them."""
        return Draws(self.layers[first:end], self.common[first:end])

    def factors(self, costs: LayerCosts) -> Floats:
        """(samples, layers): how many times as long as the median each layer takes; 1 where no spread is
        known."""
        spread = np.zeros(self.layers.shape[1]) if costs.spread is None else costs.spread
        own = np.arcsinh(spread / 2) / QUARTILE * self.layers
        factors: Floats = np.exp(own + np.log1p(costs.uncertainty or 0.0) * self.common[:, None])
        return factors


@lru_cache(maxsize=4)
def make_draws(layers: int, samples: int = SAMPLES, seed: int = SEED) -> Draws:
    """The same numbers wherever and whenever they are drawn."""
    random = np.random.default_rng(seed)
    return Draws(common=random.standard_normal(samples), layers=random.standard_normal((samples, layers)))
