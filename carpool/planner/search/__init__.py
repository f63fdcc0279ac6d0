"""Which configuration is the best?

space.py        what a search is asked: the problem, and what may vary
constraints.py  what people allow of that
enumeration.py  every configuration of a space that fits, without those that cannot be the best
memories.py     how many bytes each of them needs
bounds.py       how long a step takes at least
plan.py         the best configurations: `plan`
moves.py        another way to them, by moves away from the bottleneck
systems.py      what published planners would choose among the same
why.py          why a plan is the best, in words
"""
