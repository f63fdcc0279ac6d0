"""What everything else should be: a model of the machine, a model of cost, and choices that are recorded.

    machine/        what can the machine do?                    rates of links and kernels, costs of a layer
    model/          what is trained?                            sizes from a config.json; which experts tokens choose
    transports.py   what do transports say of themselves?       which can be used, what they send; what "auto" becomes
    candidate.py    what is one configuration of a run?         numbers and words, and its TOML
    step/           what does its step take?                    lengths, an event graph of them, a prediction; memory
    decisions/      what does a run decide by a rule?           data parallelism, saved activations; the record
    search/         which configuration is the best?            enumeration, bounds, reasons
    simulator/      what would a large run be like?             drawn routing, slow ranks, failures

`decisions`, `search` and `simulator` do not import each other. Nothing here needs an accelerator or transformers, and
no transport, solver or published planner is named: the registries are asked.
"""
