"""What is one configuration of a run?

candidate.py  its numbers and words, and its TOML
eager.py      why its steps are not CUDA graphs
stages.py     which layers each stage of its pipeline has
"""
