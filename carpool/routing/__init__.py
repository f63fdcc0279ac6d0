"""Who serves a token: routers, what becomes of their logits (`selection.py`, `kernel.py`), balance losses and
biases, drops, and limits on how many ranks a token may visit."""

from carpool.routing.router import Router, route, router_logits
from carpool.routing.routing import DropOptions, Routed, Routing, Rule, sum_over

__all__ = ["DropOptions", "Routed", "Router", "Routing", "Rule", "route", "router_logits", "sum_over"]
