"""The parts of an MoE layer that do not depend on who owns its parameters: `core.py` computes outputs from tokens and a
routing."""
