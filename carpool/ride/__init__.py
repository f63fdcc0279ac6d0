"""One exchange, forward and backward: dispatch, experts, combine; and in which order its verbs run.

    y_TH, beside = ride(x_TH, routing, slot_TK, weights, setup)

`function.py` is the node of autograd, `setup.py` what a ride is made of, `operator.py` the operator for
`torch.compile`, `module.py` the ride around a model's own experts. A schedule (`schedule.py`) never changes what is
computed: `chunks.py` has the order of the verbs inside a ride, and what it saves for its backward; `two_batch.py` and
`forward_backward.py` run two micro-batches half a layer apart, `split_backward.py` puts weight gradients off.
"""
