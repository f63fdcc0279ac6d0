"""What is kept for the backward, where do experts wait, and how much is that?"""
