"""What all MoE layers share.

core.py      outputs from tokens and a routing; `carpool.MoE` or a model of Transformers owns the parameters
module.py    the rest of `carpool.MoE`: settings, counters, state dicts, reduction of gradients
recorder.py  `carpool.record`: which experts tokens choose
checks.py    of constructor arguments, and of recordings that are replayed
"""
