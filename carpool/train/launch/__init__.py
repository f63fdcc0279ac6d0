"""One process per device, and on which machine: who starts them, what they receive and exchange, what a failure says.

PyTorch's elastic agent (`torch.distributed.launcher.api.elastic_launch`) starts the ranks, watches them and ends all
when one fails. What is here is what it does not do:

    start      passes the job to ranks, and turns what the agent raises into one error for a person; before that, it
               refuses settings, which each rank would import the model's code to find the same
    worker     a rank: its process group, its end with its agent, its error as a file, output that may be closed
    failure    which rank failed first, and the message: the agent names the first that it noticed
    stopping   SIGTERM and SIGUSR1 end a run after a checkpoint (exit code 75): the agent ends ranks at once
    roll_call  which ranks still answer, to name a node that is gone: a collective says only that it took too long
    ranks      work that fails on all ranks alike: a rank that raises alone leaves the others in a collective
    machine    what a run runs on, found by its ranks or imagined for a dry run
"""
