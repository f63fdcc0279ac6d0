"""Experts as grouped matrix products: `grouped.py` is the computation, `grouped_products.py` its six products, each
PyTorch's or one of Carpool's kernels, and `choices.py` says which."""
