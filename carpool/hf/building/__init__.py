"""How does a model come into being, sharded over all ranks?"""
