"""What everything else should be: a model of the machine, a model of cost, and choices that are recorded.

    machine/        what can the machine do?                    rates of links and kernels, costs of a layer
    model/          what is trained?                            sizes from a config.json; which experts tokens choose
    configuration/  what is one configuration of a run?         as numbers and words, and its TOML
    step/           how long does its step take?                lengths of pieces, an event graph of them, a prediction
    memory/         how many bytes does a rank need for it?     a timeline, of plans and of runs
    decisions/      what does a run decide by a rule?           data parallelism, kept policies; the record
    transports.py   what do transports say of themselves?       which can be used, what they send; what "auto" becomes
    search/         which configuration is the best?            enumeration, bounds, published planners, reasons
    simulator/      what would a large run be like?             drawn routing, slow ranks, failures

`decisions`, `search` and `simulator` do not import each other. Nothing here needs an accelerator or transformers, and
no transport, solver or published planner is named: the registries are asked.
"""
