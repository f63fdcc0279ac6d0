"""What a short training run does, written down: the functions that were called, verbs in their order, what was sent.

    with Recorder() as seen:
        run = start_run(config, None, "observe")
        seen.begin(run)
        loop(run)
    seen.called(Merger._hashed)                       how often
    seen.called(SavedRides.ride, by=sequence)          how often, if a function of that module called it
    seen.events                                       ["attention", "dispatch", "dispatch came", "experts", ...]

A recipe's mechanism is a predicate over this (`carpool_systems.mechanisms`), so that a mechanism counts if it happened,
and not if a setting asks for it. Python's tracing sees every call of a function, on all threads. Verbs are wrapped in
their classes, because when a verb's answer was waited for is no call of a named function.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from carpool.experts import EXPERTS
from carpool.experts.host_experts import HostExperts, host_experts
from carpool.hf import install
from carpool.hf.generation import Sampling, generate
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.memory.next_experts import PREDICTORS
from carpool.placement.table import place
from carpool.placement.trace import Trace
from carpool.recipes import Recipe
from carpool.replicas.slot_plan import SlotPlan
from carpool.replicas.slot_planners import SLOT_PLANNERS, SlotPlanner
from carpool.ride.balanced import SpareSlots
from carpool.ride.chunks import _last_gradients
from carpool.routing.routing import DropOptions, Routing
from carpool.train.config import Config, load_config
from carpool.train.config.schema_base import toml_value
from carpool.train.run.loop import loop
from carpool.train.run.run import Run, start_run
from carpool.transport import TRANSPORTS, Transport
from carpool.transport.base import Pending

VERBS = ("dispatch", "combine", "dispatch_gradients", "combine_gradients", "dispatch_again")
# What calls of the model, of FSDP and of slots are called among events, by how the function's name ends.
_NAMES = {
    "Attention.forward": "attention",
    "DecoderLayer.forward": "layer",
    ".Embedding.forward": "embedding",
    "SharedExperts.compute": "shared experts",
    "FSDPParamGroup.post_backward": "reduction",
    "SlotFiller.wait": "fill",
    ".assign": "assign",
}
# Parts of paths of installed files whose functions mechanisms may be made of. Plug-ins may be installed, too.
_LIBRARIES = (*sysconfig.get_paths().values(), "<")
_LOOKED_AT = ("carpool", "distributed/fsdp", "distributed/pipelining")
# A run that four processes take a few seconds for. `[recipe.small]` makes a recipe one that fits.
BASE = (
    "model.model_type=olmoe", "model.config.hidden_size=32", "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4",
    "model.config.num_experts=8", "model.config.num_experts_per_tok=3", "model.config.router_aux_loss_coef=0.0",
    "data.sequence_length=32", "data.max_bytes=40000", "training.per_device_train_batch_size=2",
    "training.max_steps=3", "training.save_steps=none", "training.eval_steps=none", "training.eval_on_start=false",
    "training.warmup_steps=1", "training.sample_prompt=none", "training.save_pretrained=false",
    "training.report_to=[]", "training.cuda_graphs=off", "parallelism.ranks_per_node=2",
)  # fmt: skip


def code_of(function: Any) -> CodeType:
    """Of a function, also of one behind decorators, `functools.partial` or a closure that hands its arguments on."""
    function = inspect.unwrap(getattr(function, "func", function))
    for cell in getattr(function, "__closure__", None) or ():
        if inspect.isfunction(cell.cell_contents):
            return code_of(cell.cell_contents)
    return getattr(function, "__func__", function).__code__  # type: ignore[no-any-return]


class SpareRide(NamedTuple):
    """What spare slots held in a ride of a layer.

    Attributes:
        layer: a number of the layer.
        load_WE: (W, E) choices of each rank's tokens.
        held_WE, served_WE: whether a spare slot of the rank holds the expert, and the choices that it serves.
        home_E, node_W: the rank of each expert's home, and the node of each rank.
        slots: spare slots of a rank.
        stayed: whether all choices of this rank's tokens were served on it.
    """

    layer: int
    load_WE: torch.Tensor
    held_WE: torch.Tensor
    served_WE: torch.Tensor
    home_E: torch.Tensor
    node_W: torch.Tensor
    slots: int
    stayed: bool

    @classmethod
    def of(
        cls, layer: int, load_WE: torch.Tensor, home_E: torch.Tensor, node_W: torch.Tensor, plan: SlotPlan, stayed: bool
    ) -> SpareRide:
        load_WE, served_WE = load_WE.long(), torch.zeros_like(load_WE, dtype=torch.int64)
        held_WE = served_WE.bool()
        ranks, places = torch.nonzero(plan.expert_WS >= 0, as_tuple=True)
        experts = plan.expert_WS[ranks, places].long()
        held_WE[ranks, experts], served_WE[ranks, experts] = True, plan.choices_WS[ranks, places].long()
        return cls(layer, load_WE, held_WE, served_WE, home_E, node_W, plan.expert_WS.shape[1], stayed)


class Recorder:
    """Inside, what this process does is written down.

    Attributes:
        calls: how often each function was called; callers: by which.
        events: in order, verbs (each with "came" once it was waited for), "attention", "shared experts", "experts",
            "experts back", "weight gradients", "reduction" (of FSDP), and "fill" (slots that were on their way before
            their layer asked).
        transports: by verb, the names of the transports that were asked; dtypes: of what they sent by all-to-alls.
        top_k: of routers; tokens, choices, widths: of rides, T, choices of a token, and hidden sizes; ranks: the most
            ranks that a token went to; together: pieces that make a chunk, in forward and backward.
        embedded, layer_tokens: tokens that an embedding, and a decoder layer, were given.
        drops: (expert_TK, kept_TK) of each layer that may drop choices.
        spare_rides: of each ride with spare slots, what these held.
        run: that is observed; rides: its layers; away: its experts in host memory; initial_std: of its first attention
            weight before the first step.
    """

    run: Run
    rides: Sequence[Any]
    away: HostExperts | None
    ranks: int
    initial_std: float

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.callers: dict[CodeType, set[CodeType]] = defaultdict(set)
        self.events: list[str] = []
        self.transports: dict[str, set[str]] = defaultdict(set)
        self.dtypes: dict[str, set[torch.dtype]] = defaultdict(set)
        self.top_k: set[int] = set()
        self.tokens: set[int] = set()
        self.choices: set[int] = set()
        self.widths: set[int] = set()
        self.ranks = 0
        self.together: set[tuple[int, int]] = set()
        self.embedded: set[int] = set()
        self.layer_tokens: set[int] = set()
        self.drops: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.spare_rides: list[SpareRide] = []
        self._planned: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, SlotPlan]] = []
        self._verb = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._named: dict[CodeType, str | None] = {code_of(_last_gradients): "weight gradients"}
        for name in EXPERTS:
            self._named |= {
                code_of(getattr(EXPERTS[name], verb)): what
                for verb, what in (("forward", "experts"), ("backward", "experts back"))
                if hasattr(EXPERTS[name], verb)
            }

    # -- what is asked ----------------------------------------------------------------------------------------------

    def called(self, function: Any, by: Any = None) -> int:
        """How often a function was called; with `by`, 0 unless that function, or one of that module, called it."""
        code = code_of(function)
        if inspect.ismodule(by):
            return self.calls[code] if by.__file__ in {caller.co_filename for caller in self.callers[code]} else 0
        return self.calls[code] if by is None or code_of(by) in self.callers[code] else 0

    def made(self, cls: type | None) -> int:
        """How many objects of a class, itself with a constructor, were made."""
        return 0 if cls is None else self.called(cls.__init__)  # type: ignore[misc]

    def during(self, what: str, verb: str) -> int:
        """How often `what` was computed while a verb was under way: asked for, and not waited for."""
        found = under_way = 0
        for event in self.events:
            under_way += (event == verb) - (event == f"{verb} came")
            found += event == what and under_way > 0
        return found

    def directly_before(self, what: str, other: str) -> bool:
        """Whether `what` happened with nothing between it and the next `other`."""
        return any(pair == (what, other) for pair in pairwise(self.events))

    @property
    def record(self) -> dict[str, Any]:
        """Of the last step."""
        record: dict[str, Any] = self.run.records.steps[-1]
        return record

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters."""
        return self.run.plan.dtype

    @property
    def changed(self) -> list[str]:
        """Names of matrices that are no experts' and were changed: those of routers end with ".gate.weight"."""
        return [name for name, value in self._values().items() if not torch.equal(value, self._before[name])]

    @property
    def moments(self) -> set[torch.dtype]:
        """The dtypes of the optimizer's moments."""
        states = self.run.built.optimizer.state.values()
        return {value.dtype for state in states for name, value in state.items() if "avg" in name}

    def state_bytes(self, where: str) -> tuple[int, int]:
        """Of the optimizer's state: what has come from host memory ("streamed") or "disk", and gone there."""
        found: tuple[int, int] = getattr(self.run.built.optimizer, f"{where}_bytes", (0, 0))
        return found

    # -- what is written down -----------------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Before the first step. Verbs and layers of the start, where things are measured, do not count."""
        self.run, self.rides, self.away = run, run.built.rides, host_experts(run.built.model)
        for of_start in (self.spare_rides, self.events, self.layer_tokens, self.embedded, self.tokens):
            of_start.clear()
        self._before = self._values()
        self.initial_std = next((float(one.float().std()) for name, one in self._before.items() if "attn" in name), 0.0)

    def _values(self) -> dict[str, torch.Tensor]:
        named = self.run.built.model.named_parameters()
        local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in named}
        return {name: one.detach().clone() for name, one in local.items() if one.dim() > 1 and ".experts." not in name}

    def __enter__(self) -> Recorder:
        for cls in {owner for name in TRANSPORTS for owner in TRANSPORTS[name].__mro__ if issubclass(owner, Transport)}:
            for verb in (*VERBS, "plan", "plan_pieces"):
                if verb in vars(cls):
                    self._replace(cls, verb, self._watched(verb, vars(cls)[verb]))
        self._replace(dist, "all_to_all_single", self._sending(dist.all_to_all_single))
        self._replace(DropOptions, "kept", self._dropping(DropOptions.kept))
        for cls in {owner for name in SLOT_PLANNERS for owner in SLOT_PLANNERS[name].__mro__ if "plan" in vars(owner)}:
            self._replace(cls, "plan", self._planning(vars(cls)["plan"]))
        self._replace(SpareSlots, "assign", self._assigning(SpareSlots.assign))
        # Backward passes of a GPU belong to threads of autograd's own, which nothing traces: they stay on this one.
        threads = torch.autograd.set_multithreading_enabled(False)
        self._undo.append(lambda: threads.__exit__(None, None, None))
        # A trace function that returns None is called when a function begins, and for nothing else.
        threading.settrace(self._see)
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        for undo in reversed(self._undo):
            undo()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        old = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, old))

    def _see(self, frame: FrameType, *_: Any) -> None:
        code = frame.f_code
        name = self._named.get(code, "?")
        if name == "?":
            endings = (what for ending, what in _NAMES.items() if f".{code.co_qualname}".endswith(ending))
            # Python's own functions and most of libraries' are none that a mechanism is made of.
            library = code.co_filename.startswith(_LIBRARIES) and not any(one in code.co_filename for one in _LOOKED_AT)
            name = self._named[code] = next(endings, None if library else "")
        if name is None:
            return
        self.calls[code] += 1
        if frame.f_back is not None:
            self.callers[code].add(frame.f_back.f_code)
        given = frame.f_locals if name else {}
        if name == "layer":
            self.layer_tokens.add(given["hidden_states"].shape[:-1].numel())
        elif name == "embedding":
            self.embedded.add(given["input"].numel())
        elif name == "assign":
            self.top_k |= {given["expert_TK"].shape[1]} if "expert_TK" in given else set()
        elif name and given.get("ahead") is not False:
            self.events.append(name)

    def _watched(self, verb: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(transport: Transport, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._verb, "now", None) is not None:  # one verb in terms of another
                return original(transport, *args, **kwargs)
            if verb.startswith("plan"):
                self._plan(transport, *args)
                return original(transport, *args, **kwargs)
            self.events.append(verb)
            self.transports[verb].add(transport.name)
            if verb == "dispatch":
                self.widths.add(args[0].shape[1])
            with self._inside(verb):
                pending = original(transport, *args, **kwargs)

            def finish() -> Any:
                with self._inside(verb):
                    value = pending.wait()
                self.events.append(f"{verb} came")
                return value

            return Pending(finish)

        return called

    @contextmanager
    def _inside(self, verb: str) -> Iterator[None]:
        before, self._verb.now = getattr(self._verb, "now", None), verb
        try:
            yield
        finally:
            self._verb.now = before

    def _plan(self, transport: Transport, given: Any, _weight: Any, _traffic: Any, *together: Any) -> None:
        chunks = (given,) if isinstance(given, torch.Tensor) else given
        self.together |= {one for one in together if isinstance(one, tuple)}
        self.tokens.add(sum(len(slot_TK) for slot_TK in chunks))
        for slot_TK in chunks:
            self.choices.add(slot_TK.shape[1])
            rank_TK = torch.where(slot_TK < 0, -1, slot_TK // transport.slots_per_rank).tolist()
            self.ranks = max(self.ranks, *(len(set(rank_K) - {-1}) for rank_K in rank_TK), 0)

    def _planning(self, original: Callable[..., SlotPlan]) -> Callable[..., SlotPlan]:
        def planned(
            planner: SlotPlanner, load_WE: torch.Tensor, home_E: torch.Tensor, spare: int, *args: Any
        ) -> SlotPlan:
            plan = original(planner, load_WE, home_E, spare, *args)
            self._planned.append((load_WE, home_E, args[-1], plan))
            return plan

        return planned

    def _assigning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def assigned(spare: SpareSlots, *args: Any) -> Any:
            slot_TK, plan = original(spare, *args)
            stayed = bool((slot_TK[slot_TK >= 0] // spare.per_rank == spare.rank).all())
            self.spare_rides.append(SpareRide.of(id(spare), *self._planned.pop(), stayed))
            return slot_TK, plan

        return assigned

    def _dropping(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def kept(options: DropOptions, routing: Routing, *args: Any) -> torch.Tensor:
            kept_TK = original(options, routing, *args)
            self.drops.append((routing.expert_TK.clone(), kept_TK))
            return kept_TK

        return kept

    def _sending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def sent(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if (verb := getattr(self._verb, "now", None)) is not None:
                self.dtypes[verb].add(given.dtype)
            return original(output, given, *args, **kwargs)

        return sent


def observe(recipe: Recipe | None, folder: Path, overrides: Sequence[str] = ()) -> set[str]:
    """The mechanisms that any rank showed in a short run under a recipe. All ranks together.

    Args:
        recipe: None: a run without a recipe.
        folder: for the run, and for its data, which several runs share.
        overrides: further settings."""
    from carpool_systems.mechanisms import shown

    path, name, small = (None, "plain", {}) if recipe is None else (recipe.path, recipe.name, recipe.small)
    base = BASE if "model.model_type" not in small else [one for one in BASE if not one.startswith("model.")]
    settings = [*base, f"training.output_dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]
    settings += [*(f"{key}={toml_value(value)}" for key, value in small.items()), *overrides]
    with Recorder() as seen:
        if recipe is not None and recipe.get("placement", "policy") == "place":
            settings.append(f"moe.layout={_placed(recipe.get('placement', 'solver'), folder)}")
        run = start_run(load_config(path, settings), None, "carpool recipes check")
        try:
            seen.begin(run)
            loop(run)
            if recipe is not None and recipe.generate:
                texts = _generate(run.built.model.config, **recipe.generate)
                found = shown(seen, recipe.mechanisms)
                seen.away = texts
                found |= shown(seen)
            else:
                found = shown(seen, () if recipe is None else recipe.mechanisms)
        finally:
            run.close()
    gathered: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    return set().union(*gathered)


def check_rank(config: Config, names: Sequence[str], folder: str) -> None:
    """One rank's part of `carpool recipes check`: a line for each mechanism of the recipes.

    Raises:
        ValueError: a recipe whose mechanism was not observed."""
    from carpool_systems.mechanisms import load

    disable_progress_bar()
    device, absent = f"parallelism.device={config.parallelism.device}", []
    for recipe in map(load, names):
        with redirect_stdout(StringIO()):
            found = observe(recipe, Path(folder), [device])
        for mechanism in recipe.mechanisms:
            if dist.get_rank() == 0:
                print(f"{recipe.name:<20} {mechanism:<32} {'observed' if mechanism in found else 'NOT OBSERVED'}")
            if mechanism not in found:
                absent.append(f"{recipe.name}: {mechanism}")
    if absent:
        raise ValueError(f"not observed in a run of 3 steps: {', '.join(absent)}")


def _placed(solver: str, folder: Path) -> Path:
    """A file of layouts that a solver found for random choices of the model of `BASE`."""
    generator, ranks = np.random.default_rng(0), dist.get_world_size()
    expert_LTK = generator.permuted(np.tile(np.arange(8), (2, 256, 1)), axis=2)[:, :, :3].astype(np.int16)
    layers = tuple(f"model.layers.{number}.mlp.experts" for number in range(2))
    trace = Trace(expert_LTK, np.arange(256) // 16, layers, {"num_experts": 8})
    path = folder / f"{solver}.json"
    found = place(trace, ranks=ranks, solvers=(solver,)).layouts
    if dist.get_rank() == 0:
        found.save(path)
    dist.barrier()
    return path


def _generate(config: Any, predictor: str, memory: int) -> HostExperts:
    """Two short texts by a new model whose experts come from host memory, as `carpool generate --experts host`."""
    model = AutoModelForCausalLM.from_config(config)
    install(model)
    away = keep_experts_in_host_memory(model.eval(), predictor=PREDICTORS[predictor], cache_bytes=memory)
    for text in ([1, 2, 3], [4, 5, 6]):
        generate(model, [text], Sampling(max_new_tokens=5), end=())
    return away
