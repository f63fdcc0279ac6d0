"""How is a step computed? Eagerly, as CUDA graphs, or through stages of a pipeline; with capacity for all tokens."""
