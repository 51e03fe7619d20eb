"""One process of a check: runs its cases together with the others.

Started by torchrun's launcher (`-m`, with a folder). Where a torchrun of the user's started `pplan check`,
that calls `run_job` itself.
"""

from __future__ import annotations
