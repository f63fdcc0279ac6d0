"""How does a plan become a model with its data, optimizer and objective on these ranks?"""
