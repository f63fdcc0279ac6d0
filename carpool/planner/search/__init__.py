"""Which configuration is the best?

space.py        what a search is asked: the problem, what may vary, what people and published planners allow of that
enumeration.py  every configuration of a space that fits, without those that cannot be the best; bounds of time, bytes
plan.py         the best configurations: `plan`
moves.py        another way to them, by moves away from the bottleneck
why.py          why a plan is the best, in words
"""
