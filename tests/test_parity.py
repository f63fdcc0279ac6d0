"""The parity matrix: output and every gradient equal a single-process reference on the whole batch.

Four ranks always take part. With EP 2 they are two copies of an expert-parallel group of two, with EP 1 four copies
of a layer that holds all experts; so the averages of non-expert parameters and the sums of experts over copies are told
apart. The product transport x layout x EP is complete; all other settings are spread over it such that each pair of
values meets (tests/pairwise.py). Every case runs in one call of the pool, each is compared in a test of its own, and
the last tests break one reduction each and require that the comparison notices.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import carpool
from carpool import ActivationPolicies, ExpertLayout, Routing
from carpool.experts import ExpertWeights, slices
from carpool.layer import core
from carpool.replicas import slot_links
from carpool.replicas.slot_plan import Costs, SlotPlan
from carpool.ride.balanced import SpareSlotOptions
from carpool.ride.schedule import Schedule
from tests.layouts import EXPERTS, LAYOUTS, SLICED, layout_of
from tests.meshes.breakages import skipped_replica
from tests.mistakes import instead_of
from tests.pairwise import all_pairs, feasible_pairs
from tests.ranks import WORLD_SIZE, Ranks, mesh
from tests.reference import Answer, Problem, Spec, draw_parameters, draw_tokens, rank_loss, solve

# Largest |difference| over largest |reference|, per tensor. The reference is float64. In bf16 every stage rounds to 8
# bits (2^-9 = 0.002 each): the pre-activation, the activation, the partial sum, the gradients of each. The largest of
# some thousand elements of 50 cases was 2.2 % off.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# A tensor whose gradients are small beside others of its case is compared with the largest of those, times this ...
FLOOR = 1e-2
# ... and where the router's gradient is a difference of equal terms (one normalised weight is always 1), times this.
FLOOR_CANCELLED = 0.2

EXPERT_NAMES = {"up_proj", "down_proj", "up_bias", "down_bias"}
REPLAYED = ("one_expert", "unchosen", "holes", "no_pairs")  # what only a recorded routing can promise
FACTORS: dict[str, tuple[Any, ...]] = {
    "transport": ("gather", "alltoall", "dedup", "hierarchical", "local"),
    "layout": LAYOUTS,
    "ep": (4, 2, 1),
    "top_k": (1, 2, 3, 4, 5, 6, 7, 8),
    "tokens": ("ragged", "empty_ranks", *REPLAYED, "no_tokens"),
    "routing": ("router", "choices", "recorded"),
    "size": ((32, 24), (20, 36), (37, 19)),
    "shared": (0, 20),
    "normalize": (True, False),
    "experts": ("grouped", "reference"),
    "gated": (True, False),
    "bias": (False, True),
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu2"),
    "score": ("softmax", "sigmoid"),
    "balance": ("none", "aux", "aux+z"),
    "selection": ("plain", "groups", "bias"),
    "scaling": (1.0, 2.5),
    "schedule": ("none", "chunks 2", "chunks 5", "chunks 2 3", "chunks 4 1", "tiles 3"),
    "rows": ("save", "resend", "offload"),
    "hidden": ("save", "recompute", "offload"),
    "spare": (0, 1, 3, "2 saved"),
}
# For one rank.
FORBIDDEN: list[dict[str, Any]] = [{"transport": "local", "ep": ep} for ep in (2, 4)]
# An expert's hidden dimension is cut into equal slices.
FORBIDDEN += [{"layout": name, "size": (37, 19)} for name in SLICED]
# Spare slots hold whole experts.
FORBIDDEN += [{"layout": name, "spare": spare} for name in SLICED for spare in (1, 3, "2 saved")]
# Which keep nothing that could be computed again.
FORBIDDEN += [{"experts": "reference", "hidden": "recompute"}]
FORBIDDEN += [{"tokens": name, "routing": "router"} for name in REPLAYED]
PRODUCT = [
    cell
    for values in product(*(FACTORS[name] for name in ("transport", "layout", "ep")))
    for cell in [dict(zip(("transport", "layout", "ep"), values, strict=True))]
    if not any(pair.items() <= cell.items() for pair in FORBIDDEN)
]


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; fields are the factors above."""

    transport: str = "dedup"
    layout: str = "contiguous"
    ep: int = 4
    top_k: int = 3
    tokens: str = "ragged"
    routing: str = "router"
    size: tuple[int, int] = (32, 24)
    shared: int = 0
    normalize: bool = True
    experts: str = "grouped"
    gated: bool = True
    bias: bool = False
    activation: str = "silu"
    score: str = "softmax"
    balance: str = "none"
    selection: str = "plain"
    scaling: float = 1.0
    schedule: str = "none"
    rows: str = "save"
    hidden: str = "save"
    spare: int | str = 0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        """Transport, layout and EP, then whatever is not the default."""
        words = [self.transport, self.layout, f"ep{self.ep}"]
        for name, value in vars(self).items():
            if value == getattr(Case(), name) or name in ("transport", "layout", "ep"):
                continue
            match value:
                case bool():
                    words.append(name if value else f"not_{name}")
                case int() | float():
                    words.append(f"{name}{value}")
                case tuple():
                    words.append("x".join(map(str, value)))
                case _:
                    words.append(str(value).removeprefix("torch.").replace(" ", ""))
        return "-".join(words)

    @property
    def spec(self) -> Spec:
        return Spec(
            hidden=self.size[0],
            inner=self.size[1],
            experts=EXPERTS,
            top_k=self.top_k,
            score=self.score,
            normalize=self.normalize,
            scaling=self.scaling,
            num_groups=3 if self.selection == "groups" else 0,
            topk_groups=2 if self.selection == "groups" else 0,
            selection_bias=self.selection == "bias",
            aux=0.3 if self.balance != "none" else 0.0,
            z=0.1 if self.balance == "aux+z" else 0.0,
            activation=self.activation,
            gated=self.gated,
            bias=self.bias,
            shared=self.shared,
        )


# Meetings of three that are risky: a rank that holds no expert at all, with each way to compute experts.
TRIPLES = [
    {"layout": "uneven", "ep": 4, "experts": experts, "bias": bias, "routing": "router"}
    for experts, bias in product(FACTORS["experts"], FACTORS["bias"])
]
CASES = [Case(**case) for case in all_pairs(FACTORS, FORBIDDEN, start=PRODUCT + TRIPLES)]
# Made of hops that other transports have: a few meetings each.
CASES += [
    Case(
        transport=transport,
        layout=layout,
        top_k=top_k,
        tokens=tokens,
        schedule=schedule,
        rows=rows,
        routing=routing,
        spare=spare,
    )
    for transport in ("1d", "2d", "2dh")
    for layout, spare, top_k, tokens, schedule, rows, routing in [
        ("permuted", 2, 5, "empty_ranks", "chunks 2 3", "resend", "router"),
        ("uneven", 0, 2, "holes", "chunks 5", "save", "recorded"),
    ]
]
BF16 = [
    Case(transport, layout, ep, top_k, bias=bias, shared=shared, spare=spare, dtype=torch.bfloat16)
    for transport, layout, ep, top_k, bias, shared, spare in [
        ("gather", "contiguous", 4, 4, False, 0, 0),
        ("alltoall", "uneven", 2, 8, True, 20, 0),
        ("dedup", "contiguous", 1, 2, False, 20, 0),
        ("dedup", "contiguous", 4, 8, False, 0, 2),
        ("hierarchical", "contiguous", 4, 8, True, 0, 2),
        ("hierarchical", "uneven", 2, 4, False, 20, 0),
        ("dedup", "permuted", 2, 4, True, 20, 2),
    ]
]
BF16 += [
    Case(transport=name, top_k=3, bias=True, spare=2, tokens="one_expert", routing="recorded", dtype=torch.bfloat16)
    for name in ("dedup", "alltoall", "gather", "hierarchical")
]
BF16 += [replace(BF16[6], experts="reference"), replace(BF16[3], routing="recorded", tokens="holes", size=(20, 36))]


TOKENS = {"empty_ranks": (0, 9, 0, 4), "no_tokens": (0, 0, 0, 0)}
MAX_TOKENS = 11


@functools.cache
def problem(case: Case) -> Problem:
    """The numbers of a case: the same in every process, whatever the transport, layout and ranks."""
    spec = case.spec
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec} {case.tokens} {case.routing}".encode()))
    sizes = TOKENS.get(case.tokens, (7, 5, MAX_TOKENS, 3))
    parameters = draw_parameters(spec, generator, case.dtype)
    x = [draw_tokens(spec, parameters, size, generator, case.dtype) for size in sizes]
    projection = [torch.randn(size, spec.hidden, generator=generator) for size in sizes]
    result = Problem(spec, parameters, x, projection)
    if case.routing != "router":
        result.expert = [draw_choices(case.tokens, size, spec, generator) for size in sizes]
    if case.routing == "recorded":
        # Weights of absent choices are drawn too: they must not matter.
        result.weight = [torch.rand(size, spec.top_k, generator=generator) + 0.1 for size in sizes]
    return result


def draw_choices(tokens: str, count: int, spec: Spec, generator: torch.Generator) -> torch.Tensor:
    experts = torch.arange(spec.experts)
    if tokens == "unchosen":
        experts = experts[(experts != 0) & (experts != 7)]
    picks = [experts[torch.randperm(len(experts), generator=generator)[: spec.top_k]] for _ in range(count)]
    expert_TK = torch.stack(picks).int() if picks else torch.zeros(0, spec.top_k, dtype=torch.int32)
    if tokens == "holes":
        expert_TK[torch.rand(expert_TK.shape, generator=generator) < 0.5] = -1
    if tokens in ("one_expert", "no_pairs"):
        expert_TK[:] = -1
    if tokens == "one_expert":
        expert_TK[:, count % spec.top_k] = 5
    return expert_TK


# -- on the ranks ---------------------------------------------------------------------------------------------------


def spare_slots_of(case: Case) -> SpareSlotOptions | int:
    """Whose plans balance whatever it costs."""
    number, *saved = str(case.spare).split()
    return SpareSlotOptions(int(number), saved=bool(saved), costs=Costs()) if case.spare else 0


def build(case: Case) -> carpool.MoE:
    """This rank's layer with the parameters of the case."""
    spec, grid = case.spec, mesh((WORLD_SIZE // case.ep, case.ep), ("edp", "ep"))
    moe = carpool.MoE(
        spec.hidden,
        spec.inner,
        spec.experts,
        spec.top_k,
        ep_mesh=grid["ep"],
        edp_mesh=grid["edp"],
        layout=layout_of(case.layout, case.ep),
        transport=case.transport,
        max_tokens=MAX_TOKENS,
        schedule=schedule_of(case),
        experts=case.experts,
        activation_policies=ActivationPolicies(case.rows, case.hidden),  # type: ignore[arg-type]
        activation=spec.activation,
        gated=spec.gated,
        bias=spec.bias,
        shared_intermediate_size=spec.shared,
        router={
            "score": spec.score,
            "normalize": spec.normalize,
            "scaling_factor": spec.scaling,
            "num_groups": spec.num_groups,
            "topk_groups": spec.topk_groups,
            "aux_loss_coef": spec.aux,
            "z_loss_coef": spec.z,
            "bias_update_rate": 0.1 if spec.selection_bias else 0.0,
        },
        spare_slots=spare_slots_of(case),
        dtype=case.dtype,
    )
    with torch.no_grad():
        for name, value in problem(case).parameters.items():
            if name == "selection_bias":
                moe.router.bias_E.copy_(value)
            else:
                local = homes_of(name, value, spec, moe.layout, moe.rank) if name in EXPERT_NAMES else value
                moe.get_parameter(name).copy_(local)
    if moe.layout.slices > 1:
        # Cut by the layer itself, too.
        given = {name: problem(case).parameters[name] for name in moe.state_dict() if name in EXPERT_NAMES}
        moe.load_logical_state_dict(moe.logical_state_dict() | given)
    return moe


def homes_of(name: str, whole_E: torch.Tensor, spec: Spec, layout: ExpertLayout, rank: int) -> torch.Tensor:
    """The rows of a parameter that a rank is home to: experts, or slices of them, cut here by their definition."""
    inner = spec.inner // layout.slices

    def row(number: int) -> torch.Tensor:
        expert, i = divmod(number, layout.slices)
        whole, columns = whole_E[expert], slice(i * inner, (i + 1) * inner)
        if name == "down_proj":
            return whole[:, columns]
        if name == "down_bias":
            return whole if i == 0 else torch.zeros_like(whole)
        return torch.cat([half[columns] for half in whole.split(spec.inner)])

    return torch.stack([row(number) for number in layout.homes[rank]]) if layout.homes[rank] else whole_E[:0]


def schedule_of(case: Case) -> Schedule:
    name, *pieces = case.schedule.split()
    return Schedule(name, *map(int, pieces))  # type: ignore[arg-type]  # one of the names


def step(case: Case) -> dict[str, Any]:
    """One forward and backward on this rank; what came out, as numpy arrays."""
    rank = torch.distributed.get_rank()
    numbers = problem(case)
    moe = build(case)
    device = moe.up_proj.device
    x = numbers.x[rank].to(device, copy=True).requires_grad_()
    routing = weight = None
    if numbers.expert is not None:
        weight = None if numbers.weight is None else numbers.weight[rank].to(device, copy=True).requires_grad_()
        routing = Routing(numbers.expert[rank].to(device), weight)
    y = moe(x, routing=routing)
    loss = rank_loss(y.float(), numbers.projection[rank].to(device)) + moe.aux_loss
    loss.backward()
    carpool.reduce_gradients(moe, mesh((WORLD_SIZE // case.ep, case.ep), ("edp", "ep"))["ep"], edp_mesh(case))
    gradients = {name: p.grad for name, p in moe.named_parameters()}
    gradients[f"x {rank}"] = x.grad / WORLD_SIZE  # the loss of the batch is the mean over ranks
    if weight is not None:
        gradients[f"weight {rank}"] = weight.grad / WORLD_SIZE
    return {
        "y": y.detach().float().cpu().numpy(),
        "expert": moe.routing.expert_TK.cpu().numpy(),
        "aux": moe.aux_loss.item(),
        "gradients": {name: g.float().cpu().numpy() for name, g in gradients.items()},
    }


def edp_mesh(case: Case) -> Any:
    return mesh((WORLD_SIZE // case.ep, case.ep), ("edp", "ep"))["edp"]


def run_cases(cases: list[Case], broken: str = "") -> list[dict[str, Any]]:
    results = []
    for case in cases:
        try:
            with BREAKING[broken](case) if broken else ExitStack():
                results.append(step(case))
        except Exception as error:
            raise RuntimeError(f"case {case}") from error
    return results


# -- comparing ------------------------------------------------------------------------------------------------------


@functools.cache
def answer(case: Case) -> Answer:
    return solve(problem(case))


def differences(case: Case, results: list[dict[str, Any]]) -> dict[str, str]:
    """What differs from the reference beyond the tolerance: name -> by how much, and where."""
    expected, layout = answer(case), layout_of(case.layout, case.ep)
    allowed = TOLERANCE[case.dtype]
    cancelled = case.normalize and (case.top_k == 1 or case.tokens == "one_expert")
    largest = max(float(g.abs().max()) for g in expected.gradients.values() if g.numel())
    found: dict[str, str] = {}

    def check(name: str, got: np.ndarray, want: torch.Tensor, scale: float, where: str = "") -> None:
        if tuple(got.shape) != tuple(want.shape):
            found[name] = f"shape {got.shape} instead of {tuple(want.shape)}{where}"
        elif want.numel():
            error = np.abs(got - want.numpy())
            if not error.max() <= allowed * scale:
                at = tuple(int(i) for i in np.unravel_index(int(np.nanargmax(error)), error.shape))
                ratio = float((got * want.numpy()).sum() / max(1e-30, float(want.square().sum())))
                found[name] = (
                    f"max-norm relative error {error.max() / scale:.1e} (allowed {allowed:.0e}) at {at}{where}: "
                    f"{got[at]:.6g} instead of {want[at].item():.6g}; overall {ratio:.3f} times the reference"
                )

    for rank, result in enumerate(results):
        check(f"y {rank}", result["y"], expected.y[rank], max(1e-30, max_abs(torch.cat(expected.y))))
        check(f"aux {rank}", np.array(result["aux"]), expected.aux, max(1e-30, float(expected.aux)))
        if not np.array_equal(np.sort(result["expert"], 1), np.sort(expected.expert[rank].numpy(), 1)):
            found[f"expert {rank}"] = "other experts were chosen"
        homes = layout.homes[rank % case.ep]
        for name, got in result["gradients"].items():
            want = expected.gradients[name]
            floor = FLOOR_CANCELLED if cancelled and name == "router.weight" else FLOOR
            scale = max(max_abs(want), floor * largest, 1e-30)
            if name in EXPERT_NAMES:
                rows = homes_of(name, want, case.spec, layout, rank % case.ep)
                check(name, got, rows, scale, f" of experts {homes} on rank {rank}")
            else:
                check(name, got, want, scale, f" on rank {rank}")
        missing = {n for n in expected.gradients if n[-1].isalpha() or n.endswith(f" {rank}")} - set(
            result["gradients"]
        )
        found |= {name: f"no gradient on rank {rank}" for name in missing}
    return found


def max_abs(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def compare(case: Case, results: list[dict[str, Any]]) -> None:
    found = differences(case, results)
    assert not found, f"{case}\n" + "\n".join(f"  {name}: {what}" for name, what in sorted(found.items()))


# -- the matrix -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(ranks: Ranks) -> dict[Case, list[dict[str, Any]]]:
    cases = CASES + BF16
    return dict(zip(cases, zip(*ranks(run_cases, cases), strict=True), strict=True))


@pytest.mark.parametrize("case", CASES + BF16, ids=str)
def test_output_and_every_gradient_equal_the_reference(case: Case, outcomes: dict[Case, Any]) -> None:
    compare(case, outcomes[case])


def test_the_matrix_holds_the_small_product_and_every_pair() -> None:
    rows = [vars(case) for case in CASES]
    for cell in PRODUCT:
        assert any(cell.items() <= row.items() for row in rows), f"missing {cell}"
    met = {frozenset(pair) for row in rows for pair in combinations([(n, row[n]) for n in FACTORS], 2)}
    assert not [pair for pair in feasible_pairs(FACTORS, FORBIDDEN) if pair not in met]
    assert len(CASES) == len(set(CASES)) < 150


def test_pairs_are_few_complete_and_deterministic() -> None:
    assert len(all_pairs({"a": [0, 1], "b": [0, 1], "c": [0, 1]})) == 4
    factors = {"a": [0, 1, 2], "b": [0, 1], "c": [0, 1, 2, 3]}
    forbidden = [{"a": 2, "c": 3}]
    cases = all_pairs(factors, forbidden, start=[{"c": 3}])
    assert cases == all_pairs(factors, forbidden, start=[{"c": 3}])
    assert cases[0]["c"] == 3 and cases[0]["a"] != 2
    met = {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}
    assert met == set(feasible_pairs(factors, forbidden)) and len(cases) < 3 * 2 * 4


# -- the matrix has teeth: each way of being silently wrong is found, and only where it is -----------------------------


@instead_of(carpool, "reduce_gradients")
def experts_times_ep(right: Any, case: Case, model: carpool.MoE, *meshes: Any) -> None:
    """Experts' gradients as a mean over their copies instead of over all ranks: too large by the EP degree."""
    right(model, *meshes)
    for parameter in model.expert_parameters():
        parameter.grad *= case.ep


@instead_of(carpool, "reduce_gradients")
def copies_not_summed(right: Any, case: Case, model: carpool.MoE, *meshes: Any) -> None:
    """Each copy of the expert group keeps its own experts' gradients."""
    keep = {p: p.grad.clone() for p in model.expert_parameters()}
    right(model, *meshes)
    for parameter, grad in keep.items():
        parameter.grad = grad / WORLD_SIZE


@instead_of(carpool, "reduce_gradients")
def dense_over_ep_only(right: Any, case: Case, model: carpool.MoE, ep_mesh: Any, edp_mesh: Any) -> None:
    """The router's and the shared expert's gradients averaged within one copy of the expert group."""
    experts = {p: p.grad.clone() for p in model.expert_parameters()}
    right(model, ep_mesh)
    for parameter, grad in experts.items():
        parameter.grad = grad
        torch.distributed.all_reduce(grad, group=edp_mesh.get_group())
        grad /= WORLD_SIZE


@instead_of(slot_links, "_arrive")
def stale_copies(right: Any, case: Case, *given: Any) -> torch.Tensor:
    """The backward computes with copies of other weights than the forward."""
    rows: torch.Tensor = right(*given)
    if torch._C._current_graph_task_id() != -1:
        rows *= 0.9
    return rows


@instead_of(slot_links.CollectiveLinks, "take")
def misplaced_copies(right: Any, case: Case, self: slot_links.CollectiveLinks, plan: SlotPlan) -> Any:
    """Copies lie in other spare slots than the ranks believe whose tokens they serve."""
    return right(self, plan._replace(expert_WS=plan.expert_WS.roll(1, 1)))


@contextmanager
def forgotten_router_term(case: Case) -> Iterator[None]:
    """The routing weights get no gradient."""
    cls = carpool.transport.TRANSPORTS[case.transport]
    right = cls.combine_gradients

    def wrong(self: Any, route: Any, dx_RH: torch.Tensor, dweight_RJ: torch.Tensor) -> Any:
        return right(self, route, dx_RH, torch.zeros_like(dweight_RJ))

    with mock.patch.object(cls, "combine_gradients", wrong):
        yield


@instead_of(core, "weights_of_slices")
def bias_of_each_slice(right: Any, case: Case, weights: ExpertWeights, first_S1: torch.Tensor) -> Any:
    """Down's bias is added, and trained, by each slice of an expert instead of the first alone."""
    return right(weights, torch.ones_like(first_S1))


@instead_of(Routing, "of_slices")
def weight_of_one_slice(right: Any, case: Case, self: Routing, slices: int) -> Routing:
    """A routing weight gets the gradient of the first slice alone."""
    wide = right(self, slices)
    first = torch.arange(wide.weight_TK.shape[1]) % slices == 0
    return replace(wide, weight_TK=torch.where(first, wide.weight_TK, wide.weight_TK.detach()))


@instead_of(Routing, "of_slices")
def weight_once_per_slice(right: Any, case: Case, self: Routing, slices: int) -> Routing:
    """A routing weight's gradient is counted once more for each slice."""
    assert self.weight_TK is not None
    weight_TK = self.weight_TK.detach() + slices * (self.weight_TK - self.weight_TK.detach())
    return right(replace(self, weight_TK=weight_TK), slices)  # type: ignore[no-any-return]


@instead_of(slices, "_columns")
def gate_apart_from_up(right: Any, case: Case, *args: Any) -> tuple[Any, int]:
    """Gate and up are cut as if they were one: the first slices have gates, the last ones have ups."""
    return right(*args)[0], 1


@instead_of(carpool.Router, "__init__")
def local_statistics(right: Any, case: Case, self: carpool.Router, *args: Any, **kwargs: Any) -> None:
    """Balance statistics of this rank's tokens instead of the batch's."""
    right(self, *args, **kwargs | {"groups": ()})


@instead_of(carpool.Router, "__init__")
def statistics_of_one_copy(right: Any, case: Case, self: carpool.Router, *args: Any, **kwargs: Any) -> None:
    """Balance statistics reduced over the expert-parallel group, not over its copies."""
    right(self, *args, **kwargs | {"groups": kwargs["groups"][:1]})


BREAKING: dict[str, Callable[[Case], Any]] = {
    "skipped_replica": lambda _: skipped_replica(),
    **{
        fn.__name__: fn
        for fn in (
            experts_times_ep,
            copies_not_summed,
            dense_over_ep_only,
            stale_copies,
            misplaced_copies,
            forgotten_router_term,
            bias_of_each_slice,
            weight_of_one_slice,
            weight_once_per_slice,
            gate_apart_from_up,
            local_statistics,
            statistics_of_one_copy,
        )
    },
}
SLICES = Case(layout="sliced 2", ep=4, bias=True)
TWO_COPIES = Case(ep=2, shared=20, bias=True, balance="aux+z")
# All tokens choose expert 5, which is at home on rank 1.
SPARE = Case(bias=True, spare=2, tokens="one_expert", routing="choices", top_k=2)
DENSE_NAMES = {"router.weight", "shared.up.weight", "shared.down.weight"}
X_NAMES = {f"x {r}" for r in range(WORLD_SIZE)}
AUX_NAMES = {f"aux {r}" for r in range(WORLD_SIZE)}
Y_NAMES = {f"y {r}" for r in range(WORLD_SIZE)}


@pytest.mark.parametrize(
    ("broken", "case", "noticed"),
    [
        ("experts_times_ep", TWO_COPIES, EXPERT_NAMES),
        ("experts_times_ep", replace(TWO_COPIES, ep=4, transport="alltoall"), EXPERT_NAMES),
        ("copies_not_summed", TWO_COPIES, EXPERT_NAMES),
        ("dense_over_ep_only", TWO_COPIES, DENSE_NAMES),
        ("skipped_replica", replace(TWO_COPIES, spare=2), EXPERT_NAMES),
        ("forgotten_router_term", TWO_COPIES, {"router.weight"} | X_NAMES),
        ("forgotten_router_term", replace(TWO_COPIES, ep=4, transport="gather"), {"router.weight"} | X_NAMES),
        ("forgotten_router_term", replace(TWO_COPIES, ep=4, transport="hierarchical"), {"router.weight"} | X_NAMES),
        ("skipped_replica", SPARE, EXPERT_NAMES),
        ("stale_copies", SPARE, {"up_proj", "up_bias"} | X_NAMES - {"x 1"}),
        ("misplaced_copies", SPARE, EXPERT_NAMES | (X_NAMES | Y_NAMES) - {"x 1", "y 1"}),
        ("bias_of_each_slice", SLICES, {"down_bias"}),
        ("bias_of_each_slice", replace(SLICES, layout="sliced_uneven 4", ep=2), {"down_bias"}),
        ("weight_of_one_slice", SLICES, {"router.weight"} | X_NAMES),
        ("weight_once_per_slice", SLICES, {"router.weight"} | X_NAMES),
        ("gate_apart_from_up", SLICES, EXPERT_NAMES | {"router.weight"} | X_NAMES | Y_NAMES),
        ("local_statistics", TWO_COPIES, {"router.weight"} | X_NAMES | AUX_NAMES),
        ("statistics_of_one_copy", TWO_COPIES, {"router.weight"} | X_NAMES | AUX_NAMES),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value),
)
def test_a_broken_reduction_is_noticed(broken: str, case: Case, noticed: set[str], ranks: Ranks) -> None:
    case = replace(case, size=(20, 36))
    compare(case, [r[0] for r in ranks(run_cases, [case])])
    results = [r[0] for r in ranks(run_cases, [case], broken)]
    with pytest.raises(AssertionError):
        compare(case, results)
    assert set(differences(case, results)) == noticed


def test_two_runs_are_bitwise_equal(ranks: Ranks, outcomes: dict[Case, Any]) -> None:
    cases = CASES[:: len(CASES) // 10] + BF16[::3]
    for rank, results in enumerate(ranks(run_cases, cases)):
        for case, again in zip(cases, results, strict=True):
            once = outcomes[case][rank]
            assert again["y"].tobytes() == once["y"].tobytes(), f"{case}: y of rank {rank}"
            for name, gradient in again["gradients"].items():
                assert gradient.tobytes() == once["gradients"][name].tobytes(), f"{case}: {name} of rank {rank}"
