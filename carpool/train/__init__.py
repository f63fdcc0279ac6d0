"""The main job: train any transformers MoE model with expert parallelism, from one command.

A folder answers one question, and imports only folders that stand above it here:

    config/        What is a run made of? File, overrides, errors.
    records/       What does it write and show? The files of its folder, and the terminal.
    launch/        In which processes, on which machine? Whoever starts them; failures and signals.
    data/          On which text? From files to batches, whose position is part of a checkpoint.
    model/         Which model, before it is built? Its source, shapes, operations and adapters.
    moving/        Which experts move while it goes on?
    checkpoints/   How can it go on? manager.py writes, reading.py reads, files.py has the format.
    steps/         How is a step computed? Eagerly, as CUDA graphs, or through the stages of a pipeline.
    estimate/      How much memory will a rank need, and does the run fit?
    decisions/     What does Carpool choose? Each choice is recorded, and taken again when the run is resumed.
    prepare/       What is a run before there is a model? Checked, decided, and shown by a dry run.
    assembly/      How does the model come onto these ranks? Built, with its rides, its loss and its optimizer.
    run/           How does it go, from its first line to its last? setup.py makes it, loop.py takes its steps.
"""
