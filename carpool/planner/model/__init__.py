"""What is trained?

shape.py      sizes of a model from its config.json
routes.py     what its tokens choose: rows that a token sends inside a node and between nodes
"""
