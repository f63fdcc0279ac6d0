"""What all MoE layers share.

core.py      outputs from tokens and a routing, whoever owns the parameters: `carpool.MoE` or a model of Transformers
module.py    the rest of `carpool.MoE`: settings, counters, state dicts, reduction of gradients
recorder.py  `carpool.record`: which experts tokens choose
checks.py    of constructor arguments, and of recordings that are replayed
"""
