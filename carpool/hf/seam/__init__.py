"""Where do Carpool's rides enter a model of Transformers?

    experts_module    what an experts module computes, and what its parameters are
    expert_rides      its `ExpertRides`: the core of one layer
    implementation    `ep_implementation="carpool"`, which gives experts modules their rides; settings of layers
    find_modules      which modules are decoder layers, experts and routers, and what they are called
    shared            shared experts that compute while tokens travel
    moved_experts     experts that have moved, and how the outside sees them
    refusals          what a layer refuses in its first forward

What changes a ride from outside (adapters, limits, replays) is known here by what it does, as a protocol in
`expert_rides`.
"""
