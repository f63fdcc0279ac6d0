"""`carpool bench model`: a whole training step of a real configuration, contenders in turns in one run.

    settings.py     what can be asked, and the training configuration that it means
    contenders.py   who takes a step: the trainer, and transformers' own expert parallelism
    routing.py      which experts tokens choose: balanced, learned, or as a trace recorded it
    room.py         whether models fit into memory, and which fit together
    run.py          the benchmark: groups, rounds, profiles
    work.py         what a step has to do, by kind: the roofline
    results.py      what was measured, and its tables
    plot.py         and its picture

Ranks, rounds and files are those of the other benchmarks (`carpool.bench`).
"""
