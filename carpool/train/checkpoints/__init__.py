"""Checkpoints: written whole or not at all, read on any number of ranks, experts in logical order."""
