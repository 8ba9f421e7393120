"""What a request would need on given ranks: tokens, bytes, memory, time; nothing is run."""

from magi2.planning.devices import DEVICES, DeviceProfile
from magi2.planning.layout import RankLayout, branch_tokens
from magi2.planning.step import StepPlan, plan_step
from magi2.planning.weights import WeightGroup, weight_groups

__all__ = [
    "DEVICES",
    "DeviceProfile",
    "RankLayout",
    "StepPlan",
    "WeightGroup",
    "branch_tokens",
    "plan_step",
    "weight_groups",
]
