"""What happens between plan and sum, forward and backward.

    y_TH, beside = ride(x_TH, routing, slot_TK, weights, setup)

`function.py` is the node of autograd, `chunks.py` the order of the verbs inside, `setup.py` what a ride is made of,
`operator.py` the operator for `torch.compile`, `module.py` the ride around a model's own experts, `merged.py` the ride
in which similar rows travel as one. `turns.py` lets two halves of a batch take turns at the rides, and `owed.py` leaves
weight gradients to be computed later.
"""

from carpool.ride.function import WaitingRides, ride
from carpool.ride.hooks import NO_HOOKS, RideHooks
from carpool.ride.merged import ride_merged
from carpool.ride.module import ride_module
from carpool.ride.owed import Owed
from carpool.ride.setup import RideSetup

__all__ = ["NO_HOOKS", "Owed", "RideHooks", "RideSetup", "WaitingRides", "ride", "ride_merged", "ride_module"]
