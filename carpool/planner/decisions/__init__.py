"""What does a run decide by itself?

chosen.py      decide or measure once, record it, take it again on resume
configured.py  a configuration of `carpool train` in the planner's words, with what a run decides by rules
dense.py       whether dense parameters are whole on each rank
policies.py    the policies of what is kept that fit into a budget and cost least
transport.py   which transport "auto" is: whether rows go to a node once and are passed on there
"""
