"""What every MoE layer does, whoever owns its parameters: `core.py` takes tokens and a routing to outputs."""
