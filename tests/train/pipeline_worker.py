"""Steps of a model cut into stages: whose pairs run at the same time, and that are recorded. Runs on every rank of a
pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from carpool.hf import install, rides
from carpool.hf.architecture_changes import add_change
from carpool.hf.build_model import build_model
from carpool.hf.decoder_layers import compile_layers, offload_layers, recompute_layers
from carpool.hf.pipeline_stages import cut_model, layer_number
from carpool.hf.routing.router_balance import find_routers
from carpool.hf.seam.implementation import set_schedule
from carpool.hf.seam.shared import overlap_shared_experts
from carpool.hf.sharding import keep_experts, replicate_dense
from carpool.parallel import fsdp
from carpool.parallel.degrees import Degrees
from carpool.parallel.meshes import Meshes
from carpool.parallel.replicated import replicated, sharded_parameters
from carpool.parallel.schedules import stages_of
from carpool.ride.priority import RidesFirst
from carpool.ride.schedule import Schedule
from carpool.ride.turns import HALF
from carpool.train.steps.pipeline_objective import PipelineObjective
from carpool.train.steps.stage_graphs import StageGraphs
from tests.hf.parity import gradient_errors
from tests.hf.tiny_models import VOCAB_SIZE, discover, tiny_config
from tests.replayed import Again

LENGTH, SEQUENCES, TOP_K, AUX = 7, 2, 2, 0.3
# More than two layers, so that there is something to cut; the first one of some is dense.
LAYERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}

# Embeddings of positions that ask how long a sequence is, and keep what they find: Phi-3.5-MoE's, and that of others.
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 4,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.0, "long_mscale": 1.1,
}  # fmt: skip
POSITIONS: dict[str, dict[str, Any]] = {
    "phimoe": _LONG,
    "qwen3_moe": _LONG,
    "olmoe": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def make_meshes(degrees: Degrees) -> Meshes:
    """Those of a run; each rank makes them once."""
    if degrees not in _MESHES:
        _MESHES[degrees] = Meshes(degrees, "cpu")
    return _MESHES[degrees]


_MESHES: dict[Degrees, Meshes] = {}


def batches_of(micro_batches: int, rank: int, ranks: int, padded: bool = False) -> list[dict[str, torch.Tensor]]:
    """This data-parallel rank's part of each micro-batch."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(micro_batches):
        ids = torch.randint(3, VOCAB_SIZE, (SEQUENCES * ranks, LENGTH), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch["labels"][0, : number + 1] = -100
        if padded:
            batch["padding"] = torch.zeros_like(ids, dtype=torch.bool)
            batch["padding"][:, LENGTH - 1 - number % 2 :] = True
            batch["labels"][batch["padding"]] = -100
        found.append({name: value.chunk(ranks)[rank] for name, value in batch.items()})
    return found


def objective_of(
    config: Any, schedule: str, degrees: Degrees, whole: Any, aux_coef: float, *, dense: str = "fsdp",
    paired: bool = False, recompute: str = "", priority: bool = False, offload: bool = False,
    shared_beside: bool = True, compiled: str = ""
) -> PipelineObjective:  # fmt: skip
    """Of a model with the weights of `whole`, cut into stages. `paired`: pairs run at the same time."""
    meshes, dtype = make_meshes(degrees), torch.float32
    settings: dict[str, Any] = {"top_k": TOP_K, "aux_coef": aux_coef, "autocast": None}
    rank, parts = dist.get_rank(), cut_model(whole, 2 * len(stages_of(schedule, 2)[0]))
    sizes = DistributedConfig(fsdp_size=degrees.fsdp, ep_size=degrees.ep, ep_implementation="carpool")
    own = [parts[stage] for stage in stages_of(schedule, 2)[degrees.coordinate(rank, "pp")]]
    how: dict[str, Any] = {"dtype": dtype, "seed": 3, "dense": dense, "meshes": meshes, "parts": own}
    model = build_model(config, distributed_config=sizes, **how)
    install(model)
    if recompute:
        recompute_layers(model, recompute == "with rides")
    if paired:
        settings["two_batch"] = True
        set_schedule(model, Schedule("two-batch"))
        overlap_shared_experts(model, shared_beside)
    if compiled:
        compile_layers(model, compiled)
    if offload:
        offload_layers(model)
    settings["rides_first"] = RidesFirst(model, rides(model)) if priority else None
    if dense == "zero1" and degrees.dp > 1:
        replicate_dense(model, False)
    else:
        keep_experts(model)
    group = meshes.group("pp")
    assert group is not None
    routers = dict.fromkeys(map(layer_number, find_routers(whole)), 8)
    settings |= {"schedule": schedule, "group": group, "stage_group": meshes.stage_group(), "routers": routers}
    return PipelineObjective(model, parts, dtype=dtype, dp_size=degrees.dp, **settings)


def compare_with_one_process(families: list[str]) -> dict[str, float]:
    """Of each family, the largest error of the loss and of this stage's gradients, against the model of Transformers in
    one process."""
    return {family: _error_of_stages(family) for family in families}


def _error_of_stages(family: str) -> float:
    positions = {"rope_parameters": POSITIONS[family]} if family in POSITIONS else {}
    config = tiny_config(discover()[family], **positions)
    whole = build_model(config, distributed_config=None, dtype=torch.float32, seed=3)
    batches = batches_of(2, 0, 1)
    tokens, total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches), 0.0
    for batch in batches:
        logits_BLV = whole(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits_BLV.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="sum")
        (loss / tokens).backward()
        total += float(loss / tokens)
    objective = objective_of(config, "1F1B", Degrees(pp=2, fsdp=1, ep=1), whole, 0.0)
    found = objective.backward(batches).loss
    expected = {name for name, p in whole.named_parameters() if p.grad is not None}
    own = {name: p for name, p in objective.model.named_parameters() if name in expected}
    errors, missing = gradient_errors(whole, {name: p.grad for name, p in own.items() if p.grad is not None})
    assert errors and not set(missing) & own.keys(), family
    return max(abs(found / total - 1), *errors.values())


class Pairs(NamedTuple):
    """A step whose pairs run at the same time, beside one whose pairs run one after the other.

    Attributes:
        equal: loss and gradients are those of the latter, bit by bit.
        order: of each pair, what is launched and computed in turn: (what, 0 of the forward or 1 of the backward).
        whole: whether FSDP takes each forward of a pair for one of the whole model.
    """

    equal: bool
    order: list[tuple[str, int]]
    whole: bool


def compare_pairs(family: str, schedule: str, micro_batches: int, ep: int = 1, **how: Any) -> Pairs:
    """Steps of a schedule on two ranks or four."""
    sparse = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"] * 8} if family == "deepseek_v3" else {}
    how |= {"sizes": {"num_hidden_layers": 8, **sparse}, "aux": 0.0 if family == "deepseek_v3" else AUX}
    apart, paired = (Steps(family, schedule, micro_batches, ep, paired=paired, **how) for paired in (False, True))
    (one, expected), (seen, roots) = apart.step(0), _watch(paired.objective.model)
    other, ours = paired.step(0)
    equal = one == other and _same(ours, expected)
    return Pairs(equal, [entry for entry in seen if entry[1] >= 0], all(roots))


class Steps:
    """Of a model in stages, whose micro-batches are drawn: what a step computes. `further`: how many
    multi-token prediction layers it has."""

    def __init__(
        self,
        family: str,
        schedule: str,
        micro_batches: int,
        ep: int = 1,
        aux: float = AUX,
        sizes: Any = None,
        further: int = 0,
        **how: Any,
    ) -> None:
        # Each forward has its own drop-out, recorded or not; a backward beside it draws nothing.
        sizes = sizes or {"num_hidden_layers": 4, **LAYERS.get(family, {})}
        config = tiny_config(discover()[family], attention_dropout=0.5, **sizes)
        if further:
            add_change(config, "mtp", {"depth": further})
        degrees = Degrees(pp=2, fsdp=dist.get_world_size() // 2, ep=ep)
        whole = build_model(config, distributed_config=None, dtype=torch.float32, seed=3)
        torch._dynamo.reset()
        self.objective = objective_of(config, schedule, degrees, whole, aux, **how)
        if further:
            self.objective.train_mtp(0.3)
        rank = degrees.dp_rank(dist.get_rank())
        self.batches = [batches_of(micro_batches, rank, degrees.dp, padded) for padded in (False, True)]
        for batch in self.batches[0]:
            # As in a run, all batches have the same entries.
            batch["padding"] = torch.zeros_like(batch["input_ids"], dtype=torch.bool)

    def step(self, number: int) -> tuple[Any, dict[str, Any]]:
        model = self.objective.model
        model.zero_grad()
        torch.manual_seed(number)
        loss = self.objective.backward(self.batches[number])
        if (kept := replicated(model)) is not None:
            kept.finish()
        with sharded_parameters(model):
            return loss, {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


class _Fails(Again):
    """Cannot record what comes in the middle of a step."""

    number = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.number == 3:
            raise RuntimeError("no")
        self.number += 1
        return super().record(work)


def replay(family: str, schedule: str, micro_batches: int, fails: bool = False, **how: Any) -> list[bool]:
    """Of each step of a run whose stages are recorded in the third: whether its losses and gradients are those of a
    step that is not, bit by bit. `fails`: rank 0 cannot record it."""
    steps = Steps(family, schedule, micro_batches, **how)
    objective, expected = steps.objective, [steps.step(number) for number in (0, 1)]
    told: list[str | None] = []
    layers = list(rides(objective.model).values())
    kind = _Fails if fails and dist.get_rank() == 0 else Again
    objective.graphs = StageGraphs(objective, layers, told.append, not fails, lambda: kind(objective.split))
    found = []
    for number in (0, 1, 1, 0):
        loss, gradients = steps.step(number)
        found.append(loss == expected[number][0] and _same(gradients, expected[number][1]))
    assert told == [("another rank could not" if kind is Again else "RuntimeError: no") if fails else None], told
    return found


def compiled_error(family: str, schedule: str, micro_batches: int, **how: Any) -> float:
    """The largest difference of a loss or gradient of compiled stages from that of eager ones. Layers share graphs."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    (loss, expected), (ours, gradients) = (
        Steps(family, schedule, micro_batches, compiled=compiled, **how).step(0) for compiled in ("", "eager")
    )
    assert 0 < stats["unique_graphs"] - before < 16
    errors = (
        float((_local(gradients[name]) - _local(one)).abs().max()) for name, one in expected.items() if one is not None
    )
    return max(abs(ours.loss - loss.loss), *errors)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Bit by bit, of this rank's shards."""
    pairs = [(ours[name], gradient) for name, gradient in theirs.items()]
    return any(g is not None for g, _ in pairs) and all(
        g is e is None or (g is not None and e is not None and torch.equal(_local(g), _local(e))) for g, e in pairs
    )


def _watch(model: Any) -> tuple[list[tuple[str, int]], list[bool]]:
    """What is launched and computed from now on, with the half that does it; -1: there are no halves. And of each
    attention in a forward of a pair, whether FSDP's root is in that forward."""
    seen: list[tuple[str, int]] = []
    roots: list[bool] = []

    def watch(owner: Any, name: str, what: str) -> None:
        own = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            half = HALF.get()
            seen.append((what, -1 if half is None else half.number))
            if seen[-1] == ("attention", 0):
                roots.extend(one._state_ctx.iter_forward_root is one for one in fsdp.states(model) if one._is_root)
            return own(*args, **kwargs)

        object.__setattr__(owner, name, called)

    for layer in rides(model).values():
        transport = layer.prepare(TOP_K, model.config.hidden_size)
        for verb in ("dispatch", "combine", "dispatch_gradients", "combine_gradients"):
            watch(transport, verb, verb)
        watch(layer.compute, "forward", "experts")
        watch(layer.compute, "backward", "experts' backward")
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            watch(module, "forward", "attention")
    return seen, roots
