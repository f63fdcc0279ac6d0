"""Where do Carpool's rides enter a model of Transformers?

    experts_module    what an experts module computes, and what its parameters are
    rides             its `ExpertRides`: the core of one layer
    implementation    `ep_implementation="carpool"`, which gives each experts module its rides
    settings          transport, experts, schedule, ... of all layers of a model
    shared            shared experts beside a ride
    layers            which modules are decoder layers, experts and routers, and what they are called
    layouts, states   experts that have moved, and how the outside sees them
    refusals          what a layer refuses in its first forward

What changes a ride from outside (adapters, limits, replays) is known here by what it does, as a protocol in `rides`.
"""
