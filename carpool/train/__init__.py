"""The main job: train any transformers MoE model with expert parallelism, from one command.

Read in this order:

    config/        what a run is made of: file, overrides, errors
    data/          from files of text to batches, whose position is part of a checkpoint
    launch/        one process per device, whoever starts them; failures and signals
    run/           prepare.py, assemble.py, setup.py make a run; loop.py: its steps; beside them evaluate.py, finish.py
    checkpoints/   manager.py writes, reading.py reads, files.py has the format
    moving/        experts that move while a run goes on
"""
