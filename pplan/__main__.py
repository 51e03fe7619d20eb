"""`python -m pplan`: the same as the command `pplan`."""

from __future__ import annotations

import sys

from .cli.app import main

if __name__ == "__main__":
    sys.exit(main())
