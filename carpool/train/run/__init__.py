"""A run: what is decided of it (`prepare.py`), its model (`assemble.py`), all that it is made of (`setup.py`), a step
(`step.py`), the loop (`loop.py`), and what it records."""
