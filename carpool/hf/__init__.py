"""Hugging Face Transformers: importing this module registers `ep_implementation="carpool"`.

    import carpool.hf
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=4, ep_size=4, ep_implementation="carpool"))

Everything else of the script stays as it is. "carpool" picks the transport ("auto"); "carpool-dedup",
"carpool-alltoall", "carpool-gather", "carpool-hierarchical" and "carpool-nvlink" name one. On GPUs of one host
`set_transport(model, "nvlink", max_tokens=...)` takes the fastest; it has to know the most tokens that a rank will
have, so "auto" picks it only where that was said. `set_experts` says how experts are computed,
`set_activation_policies` which activations are saved, `rides(model)` gives each MoE layer's counters,
`CarpoolCallback` puts them into a Trainer's logs, `set_layout` moves experts, `set_schedule` says what runs beside
what, `compile_layers` compiles what is between rides, and `FastSteps` does so under a Trainer, with CUDA graphs.
`TraceRecorder` samples which experts tokens choose; `limit_routing` limits them to few ranks, and
`drop_choices` drops those beyond a capacity, which is lossy.

    seam                where rides enter a model
    routing, weights    what changes or shows what routers choose; how weights get in and out
    build_model         a model to train, sharded by sharding, tensor_parallel, context_parallel and pipeline_stages
    decoder_layers, documents, loss_head        what is computed between rides, and how
    step_graphs, fast_steps                     steps as CUDA graphs; the same under a Trainer
    adapters, expert_adapters, quantised_base   what trains, if it is not everything, and what does not
    held_experts        experts in host memory
    generation; callback, ride_metrics, trace_recorder, activation_sizes    text; what happens
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("transformers") is None:
    raise ImportError("carpool.hf needs transformers 5.23 or newer: pip install 'transformers>=5.23'")

from carpool.hf.adapters import synchronize_adapters, watch_adapters
from carpool.hf.decoder_layers import compile_layers, offload_layers
from carpool.hf.quantised_base import quantise_experts, quantised_while_loading
from carpool.hf.routing.replay import replay
from carpool.hf.routing.rollouts import ReplayedRollouts, record_rollout, routed_experts
from carpool.hf.routing.router_balance import BiasBalance, balance_loss
from carpool.hf.routing.router_limits import drop_choices, limit_routing, route_in_float32
from carpool.hf.seam.expert_rides import ExpertRides, rides
from carpool.hf.seam.find_modules import freeze_non_experts
from carpool.hf.seam.implementation import (
    CarpoolEP,
    install,
    register,
    set_activation_policies,
    set_experts,
    set_schedule,
    set_spare_slots,
    set_transport,
    transport,
)
from carpool.hf.seam.moved_experts import set_layout
from carpool.hf.trace_recorder import TraceRecorder  # imports tensor_parallel, which mends a style of transformers

if TYPE_CHECKING:
    from carpool.hf.callback import CarpoolCallback
    from carpool.hf.fast_steps import FastSteps

__all__ = [
    "BiasBalance",
    "CarpoolCallback",
    "CarpoolEP",
    "ExpertRides",
    "FastSteps",
    "ReplayedRollouts",
    "TraceRecorder",
    "balance_loss",
    "compile_layers",
    "drop_choices",
    "freeze_non_experts",
    "install",
    "limit_routing",
    "offload_layers",
    "quantise_experts",
    "quantised_while_loading",
    "record_rollout",
    "replay",
    "rides",
    "route_in_float32",
    "routed_experts",
    "set_activation_policies",
    "set_experts",
    "set_layout",
    "set_schedule",
    "set_spare_slots",
    "set_transport",
    "synchronize_adapters",
    "transport",
]


def __getattr__(name: str) -> Any:
    # Importing transformers' Trainer takes as long as all the rest.
    if name == "CarpoolCallback":
        from carpool.hf.callback import CarpoolCallback

        return CarpoolCallback
    if name == "FastSteps":
        from carpool.hf.fast_steps import FastSteps

        return FastSteps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
watch_adapters()
