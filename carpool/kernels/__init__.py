"""What the kernels of several rooms share: launching, multiprocessor budgets, ordered sums."""
