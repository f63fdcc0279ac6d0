"""Who serves a token: routers, from tokens to logits (`logits.py`) to choices, weights and balance losses (`router.py`
in plain PyTorch, `kernel.py` on CUDA), drops (`routing.py`), and limits on ranks per token (`limit.py`)."""

from carpool.routing.router import Router, route, router_logits
from carpool.routing.routing import DropOptions, Routed, Routing, Rule, sum_over

__all__ = ["DropOptions", "Routed", "Router", "Routing", "Rule", "route", "router_logits", "sum_over"]
