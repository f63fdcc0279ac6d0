"""What happens between plan and sum, forward and backward.

    y_TH, beside = ride(x_TH, routing, slot_TK, weights, setup)

`function.py` is the node of autograd, `plain.py` the order of the verbs inside, `setup.py` what a ride is made of,
`operator.py` the operator for `torch.compile`. `turns.py` lets two halves of a batch take turns at the rides.
"""

from carpool.ride.function import backward_has_run, ride, ride_module
from carpool.ride.hooks import NO_HOOKS, RideHooks
from carpool.ride.setup import RideSetup

__all__ = ["NO_HOOKS", "RideHooks", "RideSetup", "backward_has_run", "ride", "ride_module"]
