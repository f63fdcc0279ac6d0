"""How many bytes does a rank need?

sizes.py      what a rank takes and keeps: of a plan; a run asks its model
kept.py       bytes that are kept for the backward, under which policies
held.py       what is in use beside tensors, and what a layer works with
peak.py       all of it as a timeline, of plans and of runs
"""
