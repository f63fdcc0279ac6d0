"""One exchange, called a ride: dispatch, experts, combine, forward and backward; and the order of its verbs.

    y_TH, result = ride(x_TH, routing, slot_TK, weights, setup, overlapped)

`function.py` is the node of autograd, `setup.py` has the components of a ride, `operator.py` the operator for
`torch.compile`, `ride_module.py` the ride around a model's own experts. A schedule (`schedule.py`) never changes what
is computed: `chunks.py` has the order of the verbs in a ride, and its saved activations; `two_batch.py` and
`forward_backward.py` run two micro-batches half a layer apart, `split_backward.py` defers weight gradients.
"""
