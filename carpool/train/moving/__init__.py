"""Experts that move while a run goes on: when to look, what to ask the solver, whether to move."""
