"""What is minimised, one file per kind of draft, registered in `OBJECTIVES`."""

from forerun.train.objectives.base import Loss, Objective
from forerun.train.objectives.dflash import DFlashObjective
from forerun.train.objectives.eagle import Eagle3Objective
from forerun.train.objectives.medusa import Medusa1
from forerun.train.objectives.medusa2 import Medusa2

OBJECTIVES: dict[str, type[Objective]] = {
    objective.name: objective for objective in (Eagle3Objective, Medusa1, DFlashObjective, Medusa2)
}

__all__ = ["OBJECTIVES", "Loss", "Objective"]
