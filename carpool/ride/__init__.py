"""What happens between plan and sum, forward and backward: `function.py` is the autograd function."""
