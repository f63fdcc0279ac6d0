"""What would a large run be like?

simulate.py   a configuration on any number of GPUs: scaling, sensitivity, failures
sampling.py   loads and rows of all ranks, drawn from a trace
goodput.py    failures, and how often to write a checkpoint
"""
