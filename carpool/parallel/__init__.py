"""Degrees of parallelism, process groups, and data, tensor, context and pipeline parallelism of non-expert
parameters."""
