"""The main job: train any transformers MoE model with expert parallelism, from one command.

Read in this order:

    schema, config    what a run is made of; file, overrides, errors
    tokenizer, data   from files of text to a cache of tokens
    loader            from tokens to batches, whose position is part of a checkpoint
    launch, worker    one process per device, whoever starts them
    loop              the steps themselves
"""
