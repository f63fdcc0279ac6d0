"""Hugging Face Transformers: importing this module registers `ep_implementation="carpool"`.

    import carpool.hf
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=4, ep_size=4, ep_implementation="carpool"))

Everything else of the script stays as it is. "carpool" picks the transport ("auto"); "carpool-dedup",
"carpool-alltoall", "carpool-gather", "carpool-hierarchical" and "carpool-nvlink" name one. On GPUs of one host
`set_transport(model, "nvlink", max_tokens=...)` takes the fastest; it has to know the most tokens that a rank will
have, so "auto" picks it only where that was said. `set_experts` says how experts are computed, `set_kept` what is kept
for the backward, `rides(model)` gives each MoE layer's counters, `CarpoolCallback` puts them into a Trainer's logs,
`set_layout` moves experts, `set_schedule` says what runs beside what, `compile_layers` compiles what is between rides.
`TraceRecorder` samples which experts tokens choose; `limit_routing` limits them to few ranks, and `drop_choices` drops
those beyond a capacity, which is lossy.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("transformers") is None:
    raise ImportError("carpool.hf needs transformers 5.23 or newer: pip install 'transformers>=5.23'")

from carpool.hf.activations.layer_policies import offload_layers
from carpool.hf.compute.compiled import compile_layers
from carpool.hf.finetune.adapters import synchronize_adapters, watch_adapters
from carpool.hf.finetune.freeze import freeze_dense
from carpool.hf.finetune.quantised_base import quantise_experts, quantised_while_loading
from carpool.hf.observe.trace import TraceRecorder
from carpool.hf.routing.balance import balance_loss
from carpool.hf.routing.bias import BiasBalance
from carpool.hf.routing.drops import drop_choices, route_in_float32
from carpool.hf.routing.limit import limit_routing
from carpool.hf.routing.replay import replay
from carpool.hf.routing.rollout import record_rollout
from carpool.hf.seam.implementation import CarpoolEP, install, register
from carpool.hf.seam.layouts import set_layout
from carpool.hf.seam.rides import ExpertRides, rides
from carpool.hf.seam.settings import set_experts, set_kept, set_schedule, set_transport, transport

if TYPE_CHECKING:
    from carpool.hf.observe.callback import CarpoolCallback

__all__ = [
    "BiasBalance",
    "CarpoolCallback",
    "CarpoolEP",
    "ExpertRides",
    "TraceRecorder",
    "balance_loss",
    "compile_layers",
    "drop_choices",
    "freeze_dense",
    "install",
    "limit_routing",
    "offload_layers",
    "quantise_experts",
    "quantised_while_loading",
    "record_rollout",
    "replay",
    "rides",
    "route_in_float32",
    "set_experts",
    "set_kept",
    "set_layout",
    "set_schedule",
    "set_transport",
    "synchronize_adapters",
    "transport",
]


def __getattr__(name: str) -> Any:
    # Importing transformers' Trainer takes as long as all the rest.
    if name == "CarpoolCallback":
        from carpool.hf.observe.callback import CarpoolCallback

        return CarpoolCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
watch_adapters()
