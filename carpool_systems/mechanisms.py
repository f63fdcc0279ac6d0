"""What published systems are made of, and how a run shows it.

A mechanism is called KIND:NAME, such as "transport:alltoall". A recipe has it if a short run under the recipe does it:

    transport:alltoall      tokens were dispatched and combined by a transport of that name
    schedule:chunks         experts computed while the dispatch of a further chunk was under way
    saved:inputs-resent        a backward dispatched tokens a second time

Each is a predicate over what a rank of the run did (`carpool_systems.observe.Recorder`) and what the run has become:
functions that were called, verbs in their order, what was sent, saved or moved. No setting is looked at, so a setting
without effect shows nothing. `carpool recipes check` runs a recipe and says which of its mechanisms were observed;
tests/recipes runs them all, and a plain run, which must show none of those that make a system another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from carpool.activations.offload import Offloader
from carpool.activations.whole_layers import SavedRides
from carpool.experts import EXPERTS
from carpool.experts.gemm.grouped import GroupedExperts
from carpool.experts.gemm.grouped_products import GroupedProducts
from carpool.experts.host_experts import HostExperts
from carpool.layout import ExpertLayout
from carpool.memory.expert_cache import ExpertCache
from carpool.optim.in_backward import ConsumedGradients
from carpool.parallel import context, pipeline, sequence
from carpool.placement.policies import POLICIES, PREDICTORS
from carpool.placement.solvers import SOLVERS
from carpool.plugins.nearest import nearest
from carpool.recipes import Recipe, read
from carpool.replicas.slot_links import CollectiveLinks
from carpool.ride.forward_backward import ForwardBesideBackward
from carpool.ride.priority import RidesFirst
from carpool.ride.split_backward import SplitBackward
from carpool.routing import limit
from carpool.train.moving.solve import solve
from carpool.transport import TRANSPORTS
from carpool_systems.extensions import ExpertCopies, Snapshots
from carpool_systems.few_on_host import FewOnHost
from carpool_systems.merging import LSH, Condense
from carpool_systems.predictors import ActivationMatrices, Popularity
from carpool_systems.sequences import SequenceMoves
from carpool_systems.spare_plans import Eplb, ExpandShrink, MaximumRankOverlap, Symi
from carpool_systems.tiled_experts import Backward, Forward
from carpool_systems.tiles import TiledOrder

if TYPE_CHECKING:  # these need Transformers, and comparing recipes on a recording does not
    from carpool_systems.observe import Recorder, SpareRide

__all__ = ["BY_NAME", "MECHANISMS", "find", "load", "shown"]

Shown = Callable[["Recorder"], Any]


def _is_sparse(extension: Any) -> bool:
    from carpool_systems.sparse_snapshots import is_sparse

    if not isinstance(extension, Snapshots) or extension.taken is None:
        return False
    extension.taken.beside.wait()
    return is_sparse(extension.taken.files)


def _overlaps(extension: Any) -> bool:
    return isinstance(extension, ExpertCopies) and extension.kept is not None and extension.kept.overlaps()


def _placement() -> Any:
    from carpool.train.moving.runtime import Placement

    return Placement


# Kinds whose mechanisms are what a registry, a table or a plug-in has under that name.
BY_NAME: Mapping[str, Callable[[Recorder, str], Any]] = MappingProxyType({
    "transport": lambda seen, name: all(name in seen.transports[verb] for verb in ("dispatch", "combine")),
    "experts": lambda seen, name: name in EXPERTS and seen.called(EXPERTS[name].forward),
    "policy": lambda seen, name: (
        name in POLICIES and seen.called(POLICIES[name].find) and seen.called(_placement()._move)
    ),
    "solver": lambda seen, name: name in SOLVERS and seen.called(SOLVERS[name]),
    "predictor": lambda seen, name: name in PREDICTORS and seen.called(PREDICTORS[name]),
    "pipeline": lambda seen, name: seen.called(pipeline.Pipeline.step) and seen.made(pipeline._MADE_BY.get(name)),
})  # fmt: skip

MECHANISMS: Mapping[str, Shown] = MappingProxyType({
    # -- the order of verbs
    "schedule:chunks": lambda seen: seen.during("experts", "dispatch"),
    "schedule:two-batch": lambda seen: seen.during("attention", "dispatch") and seen.during("attention", "combine"),
    "schedule:tiles": lambda seen: seen.called(TiledOrder.forward) and seen.called(TiledOrder.backward),
    "experts:tiles": lambda seen: seen.called(Forward.part) and seen.called(Backward.part),
    "chunks:backward": lambda seen: any(ahead != back for ahead, back in seen.together),
    "beside:shared-experts": lambda seen: seen.during("shared experts", "dispatch"),
    "priority:rides": lambda seen: seen.called(RidesFirst.before_experts)
    and seen.directly_before("reduction", "experts back"),
    "pairs:overlapped": lambda seen: seen.called(ForwardBesideBackward.run),
    "weight-gradients:apart": lambda seen: seen.called(SplitBackward.weights),
    # -- who serves a token
    "top-k:1": lambda seen: seen.top_k == {1},
    "top-k:2": lambda seen: seen.top_k == {2},
    "balance:aux": lambda seen: (seen.record["aux_loss"] or 0) > 0,
    "capacity:drop": lambda seen: any(not kept_TK[expert_TK >= 0].all() for expert_TK, kept_TK in seen.drops),
    "capacity:first-choices-first": lambda seen: any(_first_came_first(*one) for one in seen.drops)
    and all(_first_came_first(*one) is not False for one in seen.drops),
    "second:random": lambda seen: any(_dropped_without_need(*one) for one in seen.drops),
    "router:float32": lambda seen: _routers_in_float32(seen),
    "init:small": lambda seen: 0.004 < seen.initial_std < 0.01,
    "limit:score": lambda seen: seen.called(limit._cover) and 0 < seen.ranks < max(seen.choices, default=0),
    "limit:groups": lambda seen: seen.called(limit.RoutingLimit._two_best)
    and 0 < seen.ranks < max(seen.choices, default=0),
    "freeze:non_expert": lambda seen: all(".gate." in name for name in seen.changed),
    # -- what survives a fault
    "copies:overlap": lambda seen: any(map(_overlaps, seen.run.built.extensions)),
    "snapshots:sparse": lambda seen: any(map(_is_sparse, seen.run.built.extensions)),
    # -- where experts live
    "policy:migrate": lambda seen: seen.called(solve) and seen.called(_placement()._use),
    "policy:place": lambda seen: not seen.called(_placement()._move) and any(
        own.layout != ExpertLayout.contiguous(own.num_experts, own.num_ranks) for own in seen.rides
    ),
    # -- what spare slots hold
    "spare:balance": lambda seen: _levels(seen) and any(map(_crosses_nodes, seen.spare_rides)),
    "spare:node": lambda seen: _levels(seen) and not any(map(_crosses_nodes, seen.spare_rides)),
    "spare:shadow": lambda seen: _serve_own(seen) and all(map(_busiest_everywhere, seen.spare_rides))
    and not all(map(_everywhere, _filled(seen))),
    "spare:subset": lambda seen: _serve_own(seen) and not any(map(_all_wanted, _filled(seen)))
    and any(_on_some(one) and not _most_wanted(one) for one in _filled(seen)),
    "spare:fetch": lambda seen: _serve_own(seen) and all(_all_wanted(one) and one.stayed for one in _filled(seen)),
    "spare:all": lambda seen: _serve_own(seen) and all(_everywhere(one) and one.stayed for one in _filled(seen)),
    "spare:needed": lambda seen: _serve_own(seen) and all(map(_most_wanted, seen.spare_rides))
    and not all(map(_all_wanted, _filled(seen))),
    "spare:eplb": lambda seen: _from_earlier(seen, Eplb)
    and all(4 * one.held_WE.sum() >= 3 * len(one.held_WE) * one.slots for one in _filled(seen)),
    "spare:expand_shrink": lambda seen: _from_earlier(seen, ExpandShrink),
    "spare:symi": lambda seen: _from_earlier(seen, Symi),
    "spare:mro": lambda seen: _from_earlier(seen, MaximumRankOverlap),
    "spare:refetched": lambda seen: seen.called(CollectiveLinks.fetch) > len(seen.spare_rides) > 0,
    "sliced:experts": lambda seen: 0 < 2 * max(seen.top_k, default=0) <= min(seen.choices, default=0),
    # -- what travels
    "merge:lsh": lambda seen: seen.called(LSH.alike) and seen.called(LSH.merged),
    "merge:condense": lambda seen: seen.called(Condense.alike) and seen.called(Condense.merged),
    "dispatch:fp8": lambda seen: torch.uint8 in seen.dtypes["dispatch"],
    "combine:bf16": lambda seen: seen.dtype == torch.float32 and torch.bfloat16 in seen.dtypes["combine"],
    "hidden:projected": lambda seen: 0 < max(seen.widths, default=0) < seen.run.built.model.config.hidden_size,
    "sequences:move": lambda seen: seen.called(SequenceMoves.move),
    # -- over which ranks
    "parallel:pipeline": lambda seen: seen.called(pipeline.Pipeline.step),
    "parallel:tensor": lambda seen: _between_tensor_ranks(seen),
    "parallel:context": lambda seen: seen.called(context.to_heads) or seen.called(context.ring_attention),
    "attention:ulysses": lambda seen: seen.called(context.to_heads) and seen.called(context.to_tokens),
    "folded:experts": lambda seen: all(own.num_ranks > seen.run.plan.degrees.dp for own in seen.rides),
    "tokens:whole-between-blocks": lambda seen: _between_tensor_ranks(seen)
    and 0 < min(seen.layer_tokens, default=0) == max(seen.embedded, default=0),
    "tokens:divided-between-blocks": lambda seen: 0 < max(seen.layer_tokens, default=0) < max(seen.embedded, default=0),
    "dropped:duplicates": lambda seen: 0 < max(seen.tokens, default=0) < min(seen.layer_tokens, default=0),
    "spread:node": lambda seen: seen.record["bytes_remote"] > 0 and not seen.record.get("bytes_network"),
    "parameters:sharded": lambda seen: seen.called(FSDPParamGroup.unshard),
    "speeds:measured": lambda seen: _speeds_measured(seen),
    # -- what is saved, and where
    "experts:fp8": lambda seen: seen.called(EXPERTS["fp8"].forward),
    "saved:inputs-resent": lambda seen: seen.events.count("dispatch_again"),
    "saved:activations-recomputed": lambda seen: seen.called(GroupedProducts.up, by=GroupedExperts.backward),
    "saved:activations-offloaded": lambda seen: seen.called(Offloader.put) and seen.called(Offloader.get),
    "saved:layers-recomputed": lambda seen: seen.events.count("attention") > 1.5 * seen.events.count("dispatch"),
    "saved:collectives": lambda seen: seen.called(SavedRides.ride, by=sequence),
    "moments:bfloat16": lambda seen: torch.bfloat16 in seen.moments,
    "optimizer:in-backward": lambda seen: seen.called(ConsumedGradients._flush),
    "host:optimizer-state": lambda seen: min(seen.state_bytes("streamed")) > 0 == max(seen.state_bytes("disk")),
    "disk:optimizer-state": lambda seen: min(seen.state_bytes("disk")) > 0,
    "host:experts": lambda seen: seen.away is not None and seen.away.bytes_in > 0 == max(seen.away.disk_bytes),
    "disk:experts": lambda seen: seen.away is not None and min(seen.away.disk_bytes) > 0,
    "prefetch:popularity": lambda seen: seen.called(Popularity.likely, by=HostExperts.choose),
    "cpu:experts": lambda seen: seen.called(FewOnHost._experts),
    "cache:trained-experts": lambda seen: seen.away is not None
    and 0 < seen.away.disk_bytes[1] < seen.away.bytes_out,
    "prefetch:activation-matrix": lambda seen: seen.called(ActivationMatrices.likely, by=HostExperts.choose),
    "cache:experts": lambda seen: seen.called(ExpertCache.put) and seen.away is not None and seen.away.hits.kept,
})  # fmt: skip


def find(mechanism: str) -> Shown | None:
    """What shows a mechanism; None if nobody has built anything of the kind."""
    if mechanism in MECHANISMS:
        return MECHANISMS[mechanism]
    kind, _, name = mechanism.partition(":")
    return partial(_by_name, kind, name) if kind in BY_NAME else None


def _filled(seen: Recorder) -> list[SpareRide]:
    """Rides in which a spare slot held an expert."""
    return [one for one in seen.spare_rides if one.held_WE.any()]


def _fullest(one: SpareRide, served_WE: torch.Tensor) -> int:
    """Choices of the fullest rank, if replicas serve these and homes the rest."""
    rest_E = one.load_WE.sum(0) - served_WE.sum(0)
    return int(torch.zeros_like(one.load_WE[:, 0]).index_add(0, one.home_E, rest_E).add(served_WE.sum(1)).max())


def _levels(seen: Recorder) -> bool:
    """Whether replicas, which serve other ranks' tokens too, always make the fullest rank less full."""
    rides = _filled(seen)
    return any((one.served_WE > one.load_WE).any() for one in rides) and all(
        _fullest(one, one.served_WE) < _fullest(one, torch.zeros_like(one.served_WE)) for one in rides
    )


def _crosses_nodes(one: SpareRide) -> bool:
    return bool((one.held_WE & (one.node_W.unsqueeze(1) != one.node_W[one.home_E])).any())


def _serve_own(seen: Recorder) -> bool:
    """Whether replicas serve their own rank's tokens, and no others."""
    rides = _filled(seen)
    return bool(rides) and all(torch.equal(one.served_WE, one.load_WE * one.held_WE) for one in rides)


def _busiest_everywhere(one: SpareRide) -> bool:
    """Whether experts with replicas are on all ranks, and none without has more choices."""
    load_E, everywhere_E = one.load_WE.sum(0), one.held_WE.sum(0) == len(one.load_WE) - 1
    least = load_E[everywhere_E].min() if everywhere_E.any() else load_E.max()
    return torch.equal(everywhere_E, one.held_WE.any(0)) and bool((load_E[~everywhere_E] <= least).all())


def _on_some(one: SpareRide) -> bool:
    """Whether an expert has replicas, and not on all ranks."""
    copies_E = one.held_WE.sum(0)
    return bool(((copies_E > 0) & (copies_E < len(one.load_WE) - 1)).any())


def _wanted(one: SpareRide) -> torch.Tensor:
    """(W, E) choices of each rank's tokens for experts of other ranks."""
    return one.load_WE * (torch.arange(len(one.load_WE)).unsqueeze(1) != one.home_E)


def _all_wanted(one: SpareRide) -> bool:
    return torch.equal(one.held_WE, _wanted(one) > 0)


def _everywhere(one: SpareRide) -> bool:
    """Whether every rank has every expert."""
    return bool((one.held_WE.sum(0) == len(one.load_WE) - 1).all())


def _most_wanted(one: SpareRide) -> bool:
    """Whether each rank holds what most of its own tokens want, as far as its slots go."""
    best_WS = _wanted(one).sort(descending=True).values[:, : one.slots]
    held_WS = (_wanted(one) * one.held_WE).sort(descending=True).values[:, : one.slots]
    return torch.equal(best_WS, held_WS) and bool((_wanted(one)[one.held_WE] > 0).all())


def _from_earlier(seen: Recorder, planner: type[Any]) -> bool:
    """Whether copies share each expert's load equally, and a layer's first ride had none."""
    first = {one.layer: one for one in reversed(seen.spare_rides)}
    rides = _filled(seen)
    return (
        bool(seen.called(planner.change) and rides)
        and not any(one.held_WE.any() for one in first.values())
        and all(
            torch.equal(one.served_WE, one.held_WE * (one.load_WE.sum(0) // (1 + one.held_WE.sum(0)))) for one in rides
        )
    )


def _between_tensor_ranks(seen: Recorder) -> int:
    """How many collectives ranks that divide attention's heads took."""
    return seen.called(sequence._all_reduce) + seen.called(sequence._all_gather)


def _speeds_measured(seen: Recorder) -> Any:
    from carpool.train.plan.division import _measured

    return seen.called(_measured)


def _routers_in_float32(seen: Recorder) -> Any:
    from carpool.hf.routing.router_limits import _InFloat32

    return seen.called(_InFloat32.__call__) and seen.dtype != torch.float32


def _by_name(kind: str, name: str, seen: Recorder) -> Any:
    return BY_NAME[kind](seen, name)


def shown(seen: Recorder, more: Iterable[str] = ()) -> set[str]:
    """The mechanisms that a rank has shown: of all that have a name here, and of `more`."""
    listed: Mapping[str, Iterable[str]] = {
        "transport": TRANSPORTS,
        "experts": EXPERTS,
        "policy": POLICIES,
        "predictor": PREDICTORS,
    }
    names = {*MECHANISMS, *more, *(f"{kind}:{name}" for kind, names in listed.items() for name in names)}
    found = {name: find(name) for name in names}
    return {name for name, show in found.items() if show is not None and show(seen)}


def load(name: str) -> Recipe:
    """A recipe that this version can follow, by name or from the path of a TOML file.

    Raises:
        ValueError: there is none, it is no recipe, it lacks something, or names a mechanism that nothing shows."""
    recipe = read(name)
    for mechanism in recipe.missing:
        if find(mechanism) is not None:
            raise ValueError(
                f"recipe {recipe.name}: {mechanism} is not missing any more: choose it, and name it as a mechanism"
            )
    recipe.check_complete()
    for mechanism in recipe.mechanisms:
        if find(mechanism) is None:
            near = nearest(mechanism, MECHANISMS)
            known = ", ".join((*MECHANISMS, *(f"{kind}:NAME" for kind in BY_NAME)))
            hint = f"did you mean {near}?" if near else f"known are {known}"
            raise ValueError(f"recipe {recipe.name}: there is no mechanism {mechanism!r}; {hint}")
    return recipe


def _first_came_first(expert_TK: torch.Tensor, kept_TK: torch.Tensor) -> bool | None:
    """Whether experts that dropped a first choice serve no later one. None: no first choice was dropped."""
    full = set(expert_TK[:, 0][~kept_TK[:, 0] & (expert_TK[:, 0] >= 0)].tolist())
    return not full & set(expert_TK[:, 1:][kept_TK[:, 1:]].tolist()) if full else None


def _dropped_without_need(expert_TK: torch.Tensor, kept_TK: torch.Tensor) -> bool:
    """Whether a second choice was dropped by an expert that serves fewer than another does."""
    served_E = torch.bincount(expert_TK[kept_TK].long(), minlength=int(expert_TK.max()) + 1)
    dropped = expert_TK[:, 1:2][~kept_TK[:, 1:2] & (expert_TK[:, 1:2] >= 0)].long()
    return bool((served_E[dropped] < served_E.max()).any())
