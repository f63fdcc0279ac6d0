"""One process per device: who starts them, what they exchange about themselves, what a failure says.

start      passes the job to ranks by PyTorch's elastic agent, which starts, watches and ends them
worker     a rank: its process group, its end with its agent, output that may be closed
failure    a rank's error as a file; which rank failed first, and the message
elastic    agents that come and go, on PyTorch's elastic agent and rendezvous
regroup    a group of fewer ranks: its mesh, and its share of the same steps
stopping   SIGTERM and SIGUSR1 end a run after a checkpoint
roll_call  which ranks still answer, to name a node that is gone
ranks      work that succeeds or fails on all ranks alike: one that raises alone leaves the others in a collective
machine    what a run runs on, found by its ranks or imagined for a dry run
"""
