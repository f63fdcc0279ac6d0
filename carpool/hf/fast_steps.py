"""Compiled layers and CUDA graphs in scripts of transformers' Trainer, and of whatever is built on it (TRL).

    trainer = SFTTrainer(model, arguments, train_dataset=data)
    carpool.hf.FastSteps.add_to(trainer)

Decoder layers are compiled (`compile_layers`). What is captured is the body of the model, from tokens to the last
hidden states: one graph for its forward and one for its backward, so that all around it stays the Trainer's, and eager.
The output layer and any loss, gradient accumulation, clipping, the optimizer and the scaling of losses do not notice.

    micro-batch 1     eager: transports are made
    2, 3              compiled, still eager
    4                 captured, then replayed; later ones are replayed

To autograd a replayed forward is one node, whose backward replays the other graph. The first micro-batch of a step
makes gradients and others add to them, so with gradient accumulation there are two pairs of graphs. Evaluation, text
that is generated, and batches of another shape run eagerly. Where nothing can be captured, or choices are replayed, one
line says why, and layers stay compiled.

Where the Trainer uses no more than the model's own loss, that is computed in chunks, without all logits (`loss_head`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from carpool.hf.decoder_layers import compile_layers, draws_random_numbers, eagerly, recompute_layers
from carpool.hf.documents import fastest_attention, unpacked, why_not_packed
from carpool.hf.loss_head import HeadLoss, known_change, logit_change, next_tokens, output_layer, why_whole
from carpool.hf.seam.expert_rides import ExpertRides, required_rides
from carpool.hf.seam.find_modules import decoder_layers
from carpool.hf.step_graphs import EAGER_STEPS, Edge, NodeGraphs, Tensors, copy, why_model_waits
from carpool.kernels.capture import Recorder
from carpool.kernels.cross_entropy import IGNORED
from carpool.planner.candidate import RANDOM

# Batches of other shapes, one after the other, before the graphs of the first shape are given back.
_PATIENCE = 8
# Stands for a tensor among what a model returns.
_TENSOR = object()


class FastSteps(TrainerCallback):
    """Makes the steps of a Trainer faster, from the start of training to its end.

    Args:
        compiled: whether decoder layers are compiled. None: on GPUs, but not what goes from token to token (Mamba).
        captured: whether the model's forward and backward become CUDA graphs, where they can be.
        backend: of torch.compile.

    Attributes:
        why_not: why nothing is captured; None: it is, or will be.

    Raises:
        ValueError: at the start of training, for a model without Carpool layers, or with `torch_compile` of
            TrainingArguments, which compiles around them.
    """

    def __init__(self, compiled: bool | None = None, captured: bool = True, backend: str = "inductor") -> None:
        self.compiled, self.captured, self.backend = compiled, captured, backend
        self.why_not: str | None = None
        self._graphs: BodyGraphs | None = None
        self._undo: list[Callable[[], None]] = []
        self._says = self._in_chunks = False

    @classmethod
    def add_to(cls, trainer: Trainer, **settings: Any) -> FastSteps:
        """Add one to a Trainer. `callbacks=[FastSteps()]` works too, but does not know whether somebody uses logits."""
        callback = cls(**settings)
        own = type(trainer).compute_loss is Trainer.compute_loss and "compute_loss" not in vars(trainer)
        callback._in_chunks = own and trainer.compute_loss_func is None and trainer.label_smoother is None
        trainer.add_callback(callback)
        return callback

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **given: Any) -> None:
        model = given["model"]
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        layers, self._says = list(required_rides(base).values()), state.is_world_process_zero
        if args.torch_compile:
            raise ValueError("torch_compile=True compiles the whole model; leave it out, FastSteps compiles its layers")
        device = next(model.parameters()).device
        if again := any(getattr(layer, "gradient_checkpointing", False) for layer in decoder_layers(base)):
            # As Transformers does it, but rides are not repeated, and the state of random numbers is not asked for.
            recompute_layers(base, ride_again=False)
        by_default = device.type == "cuda" and why_not_packed(base) is None
        compiles = by_default if self.compiled is None else self.compiled
        if compiles and not hasattr(base, "_carpool_compiled"):
            object.__setattr__(base, "_carpool_compiled", compile_layers(base, self.backend))
        body = base.base_model
        self._known(self._why_not(args, base, body, again))
        if self.why_not is None:
            several = args.gradient_accumulation_steps > 1
            self._graphs = BodyGraphs(body, layers, self._known, several, lambda: why_model_waits(base, layers))
        # What is computed again must find the attention that it had, and a Trainer's backward has no context of ours.
        self._replace(body, self._body_forward(body, nullcontext if again else partial(fastest_attention, device)))
        if self._in_chunks and _has_plain_loss(base):
            self._replace(base, _forward_in_chunks(base))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._graphs is not None:
            self._graphs.begin_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for undo in self._undo:
            undo()
        if self._graphs is not None:
            self._graphs.forget()
        self._undo, self._graphs = [], None

    def _why_not(self, args: TrainingArguments, base: Any, body: nn.Module, again: bool) -> str | None:
        """Why nothing is captured, as far as it is known before the first step; None: it may be."""
        parameters, head = list(base.parameters()), output_layer(base)
        tied = {id(p) for p in body.parameters() if p.requires_grad} & set(map(id, head.parameters() if head else ()))
        reasons = {
            "that was asked for": not self.captured,
            "there is no GPU": parameters[0].device.type != "cuda",
            "ranks average gradients during the backward, from the host": args.world_size > 1 or args.n_gpu > 1,
            RANDOM: again and draws_random_numbers(base),
            "activations are offloaded (activation_offloading)": getattr(args, "activation_offloading", False),
            "the output layer and the embedding are one parameter, which is trained": bool(tied),
            "the optimizer updates parameters during the backward": any(
                getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters
            ),
        }
        return next((why for why, holds in reasons.items() if holds), None)

    def _known(self, why_not: str | None) -> None:
        self.why_not = why_not
        if self._says and why_not is not None:
            print(f"FastSteps: no CUDA graphs, because {why_not}", flush=True)

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = vars(module).get("forward")

        def undo() -> None:
            del module.forward
            if before is not None:
                module.forward = before

        module.forward = forward
        self._undo.append(undo)

    def _body_forward(self, body: nn.Module, around: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
        own = body.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (body.training and torch.is_grad_enabled()):
                with eagerly():
                    return own(*args, **kwargs)
            with around():
                if self._graphs is None or args:
                    return own(*args, **kwargs)
                return self._graphs.forward(own, kwargs)

        return forward


def _has_plain_loss(base: Any) -> bool:
    """Whether a model's loss is the cross-entropy of the next token, of an output layer that can compute it."""
    if base.loss_function is not ForCausalLMLoss or getattr(base.config, "output_router_logits", False):
        return False
    return why_whole(base) is None and (logit_change(base) is not None or known_change(base) is None)


def _forward_in_chunks(base: Any) -> Callable[..., Any]:
    """The forward of a model that is asked for a loss, and then has no logits."""
    own, head = base.forward, HeadLoss(base)
    head.model = own

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if args or labels is None or "ignore_index" in kwargs or not (base.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        of_loss = ("labels", "shift_labels", "num_items_in_batch")
        given = {name: value for name, value in kwargs.items() if name not in of_loss}
        target_BL = kwargs.get("shift_labels")
        target_BL = next_tokens(labels) if target_BL is None else target_BL.reshape(labels.shape)
        total, out = head(given.pop("input_ids", None), target_BL, **given)
        number = kwargs.get("num_items_in_batch")
        loss = total / ((target_BL != IGNORED).sum() if number is None else number)
        return type(out)(**{**out, "loss": loss, "logits": None})

    return forward


class BodyGraphs(NodeGraphs):
    """The graphs of the body of a model, whose output layer and loss are eager.

    Args:
        several: a step has several micro-batches.
        why_not: asked before a capture, when there are transports.

    Attributes:
        waiting: a forward's backward is still to come. What is computed meanwhile is eager, as graphs hold one
            micro-batch.
    """

    def __init__(
        self,
        body: nn.Module,
        layers: Sequence[ExpertRides],
        known: Callable[[str | None], None],
        several: bool,
        why_not: Callable[[], str | None],
        recorder: Callable[[], Recorder] = Recorder,
    ) -> None:
        self.several, self.why_not, self.waiting = several, why_not, False
        self._trained = [parameter for parameter in body.parameters() if parameter.requires_grad]
        self._others, self._told = 0, False
        # There is no step to compute: the Trainer does that.
        super().__init__(body, layers, lambda *_: None, known, recorder=recorder)

    def forget(self) -> None:
        super().forget()
        self._leaves: list[Any] = []
        self._template: list[Any] = []

    def begin_step(self) -> None:
        """Before the first micro-batch of a step, whose graph makes gradients and adds to none."""
        self.waiting = False
        if not self._failed and any(one.grad is not None for one in self._trained):
            self._refuse("gradients are there when a step begins: set them to None (zero_grad(set_to_none=True))")

    def forward(self, own: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """The body's forward, by a graph where there is one. `own`: the same eagerly."""
        if not self._failed and any(layer.replay is not None for layer in self.layers):
            self._refuse("choices are replayed (carpool.hf.replay), others in each forward")
        if self._failed or self.waiting:
            return own(**kwargs)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all()):
            # As Transformers does, which cannot look at it in a capture.
            kwargs = {**kwargs, "attention_mask": None}
        if kwargs.get("position_ids") is not None:
            self._refuse("batches have position_ids (packed documents), whose ends the host reads")
            return own(**kwargs)
        with unpacked():
            place = self._place(own, kwargs)
            if place is None:
                return own(**kwargs)
        for static, leaf in zip(self._leaves, pytree.tree_leaves(kwargs), strict=True):
            if isinstance(leaf, torch.Tensor):
                static.copy_(leaf)
        self._join_copies()
        self.waiting = True
        made = iter(self.node(place))
        whole = [next(made) if one is _TENSOR else one for one in self._template]
        return pytree.tree_unflatten(whole, self._out_spec)

    def _refuse(self, why: str) -> None:
        self._failed = True
        self.known(why)

    def _place(self, own: Callable[..., Any], kwargs: dict[str, Any]) -> bool | None:
        """Whether the graphs of a step's first micro-batch compute this one, or those of others; None: no graphs."""
        leaves, spec = pytree.tree_flatten(kwargs)
        shapes = (spec, *((one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in leaves))
        if shapes != self._shapes:
            self._others += 1
            if self._captured and self._others < _PATIENCE:
                return None
            if not self._told and self._others == _PATIENCE:
                self.known("batches differ in shape: pad them to one length (pad_to_multiple_of), or pack them")
                self._told = True
            self.forget()
            self._shapes = shapes
        elif self._captured:
            self._others = 0
        first = all(one.grad is None for one in self._trained)
        if not self._captured:
            self._eager += first
            # One more than in a run, whose transports are there from the start.
            if not first or self._eager <= EAGER_STEPS + 1:
                return None
            if (why := self.why_not()) is not None:
                self._refuse(why)
                return None
            self._own, self._spec = own, spec
            batch: dict[str, Any] = {str(number): one for number, one in enumerate(leaves)}
            if not self._capture([batch], None):
                return None
        if first:
            return True
        return False if self.several and self._adds() else None

    def _adds(self) -> bool:
        """Whether gradients are where the graphs of further micro-batches add to them."""
        return all(parameter.grad is gradient for parameter, gradient in self._gradients)

    def _record(self, batches: Sequence[Any], before_backward: Any) -> None:
        self._leaves = [one.clone() if isinstance(one, torch.Tensor) else one for one in batches[0].values()]
        recorder, self._edge = self.recorder(), Edge(self._sums.device)
        for first in (True, False) if self.several else (True,):
            flying: list[tuple[Tensors, Tensors]] = []

            def forward(flying: list[tuple[Tensors, Tensors]] = flying) -> None:
                self._restart_arenas()
                flying[:] = [self._edge.forward(self._compute)]

            def backward(flying: list[tuple[Tensors, Tensors]] = flying) -> None:
                self._edge.backward(*flying.pop())
                self._join_copies()

            self._record_one(("forward", first), recorder, forward)
            # Made now, outside of the capture.
            assert self._edge.dmade
            self._record_one(("backward", first), recorder, backward)
        self._restart_arenas()

    def _compute(self, _: Tensors) -> Tensors:
        """The tensors among what the body returns."""
        out, self._out_spec = pytree.tree_flatten(self._own(**pytree.tree_unflatten(self._leaves, self._spec)))
        if odd := [one for one in out if not isinstance(one, torch.Tensor | None | bool | int | float | str)]:
            raise TypeError(f"the model returns {type(odd[0]).__name__} (set use_cache=False)")
        self._template = [_TENSOR if isinstance(one, torch.Tensor) else one for one in out]
        return tuple(one for one in out if isinstance(one, torch.Tensor))

    def replay_forward(self, key: bool, received: Tensors) -> Tensors:
        self._repeat(("forward", key))
        assert self._edge.made is not None
        return tuple(one.clone() for one in self._edge.made)

    def replay_backward(self, key: bool, gradients: Sequence[torch.Tensor | None]) -> Tensors:
        copy(self._edge.dmade, gradients)
        self._repeat(("backward", key))
        self._restart_arenas()
        self.waiting = False
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        return ()
