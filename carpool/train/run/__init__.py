"""How does a run go, from its first line to its last? `run.py` makes it, `loop.py` takes its steps."""
