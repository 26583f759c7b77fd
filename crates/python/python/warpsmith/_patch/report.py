"""The outcome for each module of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from warpsmith._workbench import table


@dataclass(repr=False)
class PatchReport:
    """What was swapped and what was left."""

    model: str
    #: By path in the model: the old and the new module.
    swapped: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: By path in the model: the module, and why it stayed.
    left: dict[str, tuple[str, str]] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str, str]]:
        """How many modules of each kind were swapped or left, and for what or why."""
        swapped = Counter(self.swapped.values())
        left = Counter(self.left.values())
        rows = [(f"{count} {was}", "swapped", now) for (was, now), count in swapped.items()]
        return rows + [(f"{count} {was}", "left", why) for (was, why), count in left.items()]

    def __repr__(self) -> str:
        lines = [f"{self.model}: {len(self.swapped)} swapped, {len(self.left)} left"]
        return "\n".join([*lines, *(f"  {what}: {became}, {how}" for what, became, how in self.rows())])

    def _repr_html_(self) -> str:
        return table((self.model, "", ""), self.rows())
