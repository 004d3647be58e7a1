"""A simulated device, so that training loops and offloading can be tested without an accelerator, adversarially.

``SimulatedDevice`` is the device, ``for_each_schedule`` runs a scenario in every order of events worth trying, and
``damaged`` says in which of them its numbers are wrong.
"""

from sidestep.testing.ledger import CATEGORIES, Ledger
from sidestep.testing.schedules import ALL, ScheduleError, damaged, for_each_schedule, orders
from sidestep.testing.simulated import SimulatedDevice

__all__ = [
    "ALL",
    "CATEGORIES",
    "Ledger",
    "ScheduleError",
    "SimulatedDevice",
    "damaged",
    "for_each_schedule",
    "orders",
]
