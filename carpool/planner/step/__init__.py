"""How long does a step take, and how many bytes does a rank need for it?

travel.py      how long tokens, parameters and gradients travel
lengths.py     how long the pieces of a layer take; state in host memory
events.py      a graph of events on streams, and when each of them runs; the same without the events, for searches
pipelines.py   orders of the stages of a pipeline, as events
graph.py       the event graph of a step
prediction.py  what is predicted of it
sizes.py       what a rank takes and saves, as numbers: of a plan; a run asks its model
peak.py        its memory as a timeline, of plans and of runs
"""
