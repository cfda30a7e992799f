"""What is minimised, one file per kind of draft, registered in `OBJECTIVES`."""

from forerun.train.objectives.base import Loss, Objective
from forerun.train.objectives.eagle import Eagle3Objective

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective for objective in (Eagle3Objective,)
}

__all__ = ["OBJECTIVES", "Loss", "Objective"]
