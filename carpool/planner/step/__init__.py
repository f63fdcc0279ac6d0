"""How long does a step take?

travel.py      how long rows, parameters and gradients travel
lengths.py     how long the pieces of a layer take
events.py      a graph of events on streams, and when each of them runs
clock.py       the same without the events, for searches
pipelines.py   orders of the stages of a pipeline, as events
graph.py       the event graph of a step
prediction.py  what is predicted of it
overlap.py     how long a ride in chunks takes
streaming.py   when copies of optimizer state in host memory are hidden
"""
