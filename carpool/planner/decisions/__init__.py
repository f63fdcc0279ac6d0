"""What does a run decide by itself?

chosen.py      decide or measure once, record it, take it again on resume
configured.py  a configuration of `carpool train` in the planner's words, with what a run decides by rules
rules.py       non-expert parameters whole on each rank or not; saved activations that fit into a budget; layers
               compiled or not
"""
