"""Hugging Face Transformers: importing this module registers `ep_implementation="carpool"`.

    import carpool.hf
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=4, ep_size=4, ep_implementation="carpool"))

Everything else of the script stays as it is. "carpool" picks the transport ("auto"); "carpool-dedup",
"carpool-alltoall" and "carpool-gather" name one. `rides(model)` gives each MoE layer's counters.
"""

from __future__ import annotations

from carpool.hf.expert_parallel import CarpoolEP, ExpertRides, install, register, rides, set_transport, transport

__all__ = ["CarpoolEP", "ExpertRides", "install", "rides", "set_transport", "transport"]

register()
