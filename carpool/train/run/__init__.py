"""A run: what it is made of (`setup.py`), a step (`step.py`), the loop (`loop.py`), and what it records."""
