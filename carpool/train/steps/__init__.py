"""How is a step computed? Eagerly, as CUDA graphs, through the stages of a pipeline; and with room for all rows."""
