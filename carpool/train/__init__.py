"""The main job: train any transformers MoE model with expert parallelism, from one command.

A folder answers one question, and imports only folders that stand above it here:

    config/        What is a run made of? File, overrides, errors.
    records/       What does it write and show? The files of its folder, and the terminal.
    launch/        In which processes, on which machine? Whoever starts them; failures and signals.
    data/          On which text? From files to batches, whose position is part of a checkpoint.
    moving/        Which experts move while it goes on?
    checkpoints/   How can it go on? manager.py writes, reading.py reads, checkpoint_files.py has the format.
    steps/         How is a step computed? Eagerly, as CUDA graphs, or through the stages of a pipeline.
    plan/          What will a run be? Settings and a machine in, all decisions out, each with its reason; a dry run.
    build/         How does a plan become a model on these ranks, with its data, optimizer and objective?
    run/           How does it go, from its first line to its last? run.py starts it, loop.py takes its steps.

Three files stand in the folder itself: blueprint.py says what is known of a model before it is built, extensions.py
what a plug-in package may add to a run, and lora.py puts adapters into the model.
"""
