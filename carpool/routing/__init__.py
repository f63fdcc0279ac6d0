"""Who serves a token: the router (`router.py`), its kernel, and limits on how many ranks a token may visit."""

from carpool.routing.router import DropOptions, Routed, Router, Routing, Rule, route, router_logits, sum_over

__all__ = ["DropOptions", "Routed", "Router", "Routing", "Rule", "route", "router_logits", "sum_over"]
