"""What attacks came to: how much was enumerated, how often each check was made, and what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Violation:
    """Something that was said and is not so. `allowance`: seconds (or bytes, or dollars) said, and found."""

    seed: int
    kind: str
    check: str
    text: str

    @property
    def command(self) -> str:
        """What shows it again."""
        return f"python benchmarks/proofs.py --seed {self.seed} --problems 1 --kind '{self.kind}'"


@dataclass
class Result:
    """Of one problem: checks by name, how often; plans that were enumerated, and simulated. `refused`: why
    pplan refused the problem; `left_out`: why not all of its plans were looked at."""

    seed: int
    kind: str
    checks: Counter[str] = field(default_factory=Counter)
    plans: int = 0
    simulated: int = 0
    violations: list[Violation] = field(default_factory=list)
    refused: str = ""
    left_out: str = ""

    def check(self, name: str, text: str | None) -> None:
        """Counts a check; a text says what is wrong."""
        self.checks[name] += 1
        if text is not None:
            self.violations.append(Violation(self.seed, self.kind, name, text))
