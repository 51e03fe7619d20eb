"""The range of every quantity, where it enters: a file, the command line, a call.

Inside these ranges sums and products of any plan stay finite, so that nothing behind the readers has to ask.
`docs/file-formats.md` says the same in words.
"""

from __future__ import annotations

MOST_SECONDS = 1e9
"""Measured or given: some 30 years."""
LEAST_PREDICTED_SECONDS, MOST_PREDICTED_SECONDS = 1e-30, 1e30
"""Of sums over layers and micro-batches."""
MOST_BYTES = 2**63 - 1
"""Of one figure: of a layer's parameters, say."""
MOST_TOTAL_BYTES = 2**100
"""Of sums of such figures."""
LEAST_RATE, MOST_RATE = 1.0, 1e18
"""Bytes per second of a link that is not endlessly fast."""
LEAST_SPEED, MOST_SPEED = 1e-6, 1e6
"""Of a device, relative to the profiled one."""
MOST_RATIO = 1e100
"""Of two predictions."""
LEAST_PRICE, MOST_PRICE = 1e-9, 1e9
"""Dollars of a device hour."""
MOST_SHARE = 1e9
"""Per cent that a step may be longer."""
MOST_SAMPLES = 2**24
"""Of a measured micro-batch."""
MOST_MINI_BATCH = 2**40
MOST_MICRO_BATCHES = 2**20
"""Of a step in a file: orders of actions are written out."""
MOST_ACTIONS = 2_000_000
"""Forwards, backwards and weight gradients of a step that are looked at one by one."""
MOST_LAYERS = 2**17
MOST_DEVICES = 65_536
"""Of a topology."""
MOST_MEMBERS = 2**24
"""Of a level of links."""
