"""What everything else should be: a model of the machine, a model of cost, and choices that are recorded.

    hardware.py   rates of links and of matrix products, by the device's name
    work.py       how long kinds of kernels take: latency, operations, bytes
    model_shape.py  sizes of a model from its config.json
    candidate.py  one configuration as numbers and words, and its TOML
    routes.py     rows that a token sends inside a node and between nodes
    travel.py     how long rows, parameters and gradients travel
    lengths.py    how long the pieces of a layer take
    step_graph.py   the event graph of a step
    step.py       what is predicted of it
    sizes.py      what a rank takes and keeps: of a plan; a run asks its model
    peak.py       its memory as a timeline, of plans and of runs
    held.py       what is in use beside tensors, and what a layer works with
    space.py      what a search is asked: the problem, and what may vary
    enumeration.py  every configuration of a space that fits, without those that cannot be the best
    bounds.py     how long a step takes at least
    search.py     the best configurations: `plan`
    moves.py      another way to them, by moves away from the bottleneck
    systems.py    what published planners would choose among the same
    kept.py       bytes that are kept for the backward, under which policies
    policies.py   the policies that fit into a budget and cost least
    cost.py       how long rides, matrix products and replicas take on that hardware
    events.py     a step as a graph of events on streams, and when each of them runs
    pipelines.py  orders of the stages of a pipeline, as events
    sampling.py   loads and rows of the ranks of a large run, drawn from a trace
    simulate.py   a step at any size: scaling, sensitivity, failures
    goodput.py    failures, and how often to write a checkpoint
    nodes.py      whether rows go to a node once and are passed on there
    streaming.py  when copies of optimizer state in host memory are hidden
    chosen.py     decide or measure once, record it, take it again on resume

Nothing here needs an accelerator, PyTorch or transformers.
"""
