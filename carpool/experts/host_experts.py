"""Offloaded experts: their parameters are in host memory, and on the device only while their layer computes.

Most parameters of a model are experts (Qwen3-30B-A3B: 29 of 30.5 billion), and one layer computes at a time. So the
device needs memory for the experts of two layers: the current one, and the next one, which is prefetched. (In a
backward there is a third, which is copied out.)

    forward     computes     layer 0 | layer 1 | layer 2 | layer 3
                in           1       | 2       | 3       |
    backward    computes     layer 3 | layer 2 | layer 1 | layer 0
                in           2       | 1       | 0       |
                out                  | 3       | 2       | 1, 0      updated parameters

Copies run on streams of their own. Each parameter is updated while it is on the device, as soon as its gradient is
complete (`carpool.optim.in_backward`), with optimizer state that may be offloaded in the same way. So gradients never
leave the device, and a step copies each parameter in twice and out once. ZeRO-Infinity (arXiv 2104.07857) and ES-MoE
(ICML 2024) copy gradients out and update on the CPU.

The device memory of a parameter is freed and reallocated under the same tensor, as in FSDP2. So references to the
parameter, and saved tensors of a backward, are valid while the layer computes. The last layer of a forward stays for
its backward, and the first layer of a backward for the next forward.

Experts without tokens need not be copied. In generation a token chooses 8 of 128 experts, for example. With a predictor
(`carpool.memory.next_experts`) a layer loads the experts that its router has chosen, and prefetches the experts that
the next layer is likely to choose. A wrong prediction only costs time. If tokens choose most of a layer's experts, as
in a prompt, the whole layer is loaded. In training the backward loads the experts of the forward; of trained experts it
loads the whole layer, because an update changes experts without tokens, too. A cache on the device (`expert_cache`)
holds frozen experts by priority. They are copied from there to their layer's memory in a hundredth of the time from the
host. Chosen experts may stay in host memory, and be computed there (`HostExperts.stays`).

On disk, frozen experts stay in the files of their checkpoint, and are read individually (`read_experts`). Trained
experts are in files of this process, layer by layer, and are written back after their update
(`carpool.memory.Staging`). Threads read ahead of the copies to the device.

On a CPU the same code copies synchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from carpool.activations.host_memory import event_now, host_zeros, on_stream, wait_for
from carpool.experts.host_layers import HostLayer, HostWeight, layers_on_disk, storage_key
from carpool.memory import TIERS
from carpool.memory.expert_cache import ExpertCache
from carpool.memory.next_experts import Counts, Predictor
from carpool.memory.read_experts import ExpertFiles, ExpertReader
from carpool.metrics.counters import in_recompute

_ATTRIBUTE = "_carpool_host_experts"


@dataclass
class Hits:
    """Statistics of generation: experts chosen by single tokens; how many of them were on the device for earlier
    tokens, and how many because of a prediction."""

    chosen: int = 0
    kept: int = 0
    foretold: int = 0


class HostExperts:
    """Moves the experts of a model between host memory and the device. Constructed once the optimizer has them.

    Args:
        model: `host_experts(model)` returns this object.
        modules: the experts modules, in the order of the forward.
        shards: the DTensors of sharded parameters, by `storage_key`.
        device: for the computation; None: that of the parameters.
        predictor: constructs a predictor of the next layer's experts from the numbers of layers and experts. `choose`
            must then be called in each forward, before the experts compute. None: whole layers are loaded.
        cache_bytes: size of the cache of frozen experts on the device.
        files: the files of frozen experts, by the names of their modules.
        folder: for files of trained experts. With neither, experts are in host memory.
        host_bytes: host memory: with `files`, for a cache of at least two layers; with `folder`, for layers that are
            not on disk.

    Attributes:
        bytes_in, bytes_out: copied so far between host memory and the device.
        predictor: of the next layer's experts; None: whole layers are loaded.
        stays: returns which of a layer's chosen experts are not loaded, because something else computes them, from
            the layer's number and the numbers of tokens; None: all are loaded.
        hits: statistics, with a predictor.
        consuming: whether gradients are used for updates in the backward, so that parameters stay until `updated`.

    Raises:
        ValueError: parameters share memory with others, or the disk is full.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        shards: dict[int, nn.Parameter] | None = None,
        device: torch.device | None = None,
        predictor: Callable[[int, int], Predictor] | None = None,
        cache_bytes: int = 0,
        files: ExpertFiles | None = None,
        host_bytes: int = 0,
        folder: Path | None = None,
    ) -> None:
        # Batches of all kinds of tokens follow each other, and layers come in turn.
        self._learns = any(parameter.requires_grad for parameter in model.parameters())
        self.bytes_in = self.bytes_out = 0
        self.hits = Hits()
        self.consuming = False
        shards = shards or {}
        self._device = device = device or next(modules[0].parameters()).device
        streams: list[Any] = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self._into, self._out = streams
        of_layers = [list(module.parameters()) for module in modules]
        experts = max(parameters[0].shape[0] for parameters in of_layers)
        self.predictor = None if predictor is None else predictor(len(modules), experts)
        self.stays: Callable[[int, Counts], Collection[int]] | None = None
        self._cache = ExpertCache(of_layers, cache_bytes, device)
        self._reader = None
        if files is not None:
            self._reader = ExpertReader(files, of_layers, host_bytes, device, self._into)
        self._staging = None if folder is None else TIERS["disk"].staging(device)
        on_disk = set() if folder is None else layers_on_disk(of_layers, host_bytes)
        self._layers: list[HostLayer] = []
        self._of: dict[int, int] = {}
        parameters = [p for layer in of_layers for p in layer if not p.is_meta]
        if len({p.data_ptr() for p in parameters if p.numel()}) < len([p for p in parameters if p.numel()]):
            raise ValueError(
                "experts of two layers share memory, so they cannot come from host memory layer by layer "
                "(memory.experts)"
            )
        for number, module in enumerate(modules):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:  # not read from its file yet
                    values = torch.empty_like(parameter, device=device)
                    module._parameters[name] = nn.Parameter(values, parameter.requires_grad)
            memory: Callable[[torch.Size, torch.dtype], torch.Tensor] | None = None
            if number in on_disk:
                assert folder is not None
                memory = partial(TIERS["disk"].zeros, folder)
            elif files is None:
                memory = partial(host_zeros, device=device)
            weights = [HostWeight(p, shards.get(storage_key(p)), device, memory) for p in module.parameters()]
            layer = HostLayer(weights)
            layer.staging = self._staging if number in on_disk else None
            self._layers.append(layer)
            self._of |= {weight.key: number for weight in layer.weights}
            self._leave(number)
            module.register_forward_pre_hook(partial(self._before_forward, number))
            module.register_forward_hook(partial(self._after_forward, number))
        object.__setattr__(model, _ATTRIBUTE, self)

    # -- hooks of layers -------------------------------------------------------------------------------------------

    def _before_forward(self, number: int, _module: nn.Module, _args: Any) -> None:
        if self.predictor is None:
            # Recomputation by activation checkpointing.
            self._enter(number, -1 if in_recompute() else 1)

    def _after_forward(self, number: int, _module: nn.Module, _args: Any, y_TH: torch.Tensor) -> None:
        if y_TH.requires_grad:
            y_TH.register_hook(partial(self._before_backward, number, self._layers[number].wanted))
        if not in_recompute() and not (y_TH.requires_grad and number + 1 == len(self._layers)):
            self._leave(number)

    def _before_backward(self, number: int, wanted: list[int] | None, _: torch.Tensor) -> None:
        self._enter(number, -1, wanted)

    @torch.no_grad()
    def _enter(self, number: int, direction: int, wanted: list[int] | None = None) -> None:
        """Called before a layer computes: load it, prefetch the next one, and free the others.

        Args:
            wanted: numbers of its experts with tokens; None: all."""
        following = number + direction
        self._leave_others(number, following)
        self._fetch(number, None if self._layers[number].trained else wanted, keep=True)
        self._wait_for(number)
        if 0 <= following < len(self._layers):
            # In a pipeline this may be another micro-batch, with other experts: they are loaded in its turn.
            layer = self._layers[following]
            self._fetch(following, None if layer.trained else layer.wanted, keep=True)

    def choose(self, number: int, counts: Counts, single: bool) -> None:
        """With a predictor: load the experts that the router of a layer has chosen, with their numbers of tokens, and
        prefetch those that the next layer is likely to choose.

        Args:
            single: whether this is the choice of one token."""
        assert self.predictor is not None
        layer, trains = self._layers[number], torch.is_grad_enabled()
        stay = () if self.stays is None else self.stays(number, counts)
        wanted = [expert for expert in counts if expert not in stay]
        with torch.no_grad():
            if in_recompute():  # activation checkpointing
                self._enter(number, -1, wanted)
                return
            self.predictor.saw(number, counts)
            if single:
                kept, foretold = self._cache.held(number), layer.foretold if layer.here else set()
                self.hits.chosen += len(counts)
                self.hits.foretold += len(foretold.intersection(counts))
                self.hits.kept += len((kept - foretold).intersection(counts))
            self._leave_others(number, number + 1)
            most = not trains and 2 * len(counts) > layer.experts
            whole = len(wanted) == layer.experts or (most and self._reader is None and not self._cache.held(number))
            layer.wanted = None if whole else wanted
            self._fetch(number, layer.wanted, keep=not most)
            self._wait_for(number)
            if number + 1 < len(self._layers) and (likely := self.predictor.likely(number, counts)):
                following = self._layers[number + 1]
                following.foretold = set(likely) - self._cache.held(number + 1)
                self._fetch(number + 1, likely, keep=True)

    def host_values(self, number: int, expert: int) -> list[torch.Tensor]:
        """An expert's parameters in host memory."""
        layer = self._layers[number]
        if layer.gone is not None:
            layer.gone.synchronize()  # the last update
        return [value[expert] for value in layer.values]

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Bytes read from files so far, and bytes written."""
        if self._staging is not None:
            return self._staging.bytes_read, self._staging.bytes_written
        return 0 if self._reader is None else self._reader.bytes_read, 0

    def what_moved(self) -> str:
        """A sentence about the copies so far."""
        text = f"{self.bytes_in / 1e9:.3f} GB came to the device"
        if self.bytes_out:
            text += f", and {self.bytes_out / 1e9:.3f} GB went back"
        read, written = self.disk_bytes
        if read:
            text += f", {read / 1e9:.3f} GB were read from disk"
        return text + (f", and {written / 1e9:.3f} GB written" if written else "")

    def begin(self) -> None:
        """Called when new sequences begin."""
        if self.predictor is not None:
            self.predictor.begin()

    def _leave_others(self, number: int, following: int) -> None:
        for other, layer in enumerate(self._layers):
            if layer.here and other not in (number, following) and not self._waits(layer):
                self._leave(other)

    def _wait_for(self, number: int) -> None:
        layer = self._layers[number]
        self._finish_reads(layer)
        wait_for(layer.ready)
        layer.ready = None

    def _finish_reads(self, layer: HostLayer) -> None:
        """Wait until threads have queued all copies."""
        if layer.reads:
            for read in layer.reads:
                read.result()
            layer.reads.clear()
            layer.ready = None if self._into is None else self._into.record_event()

    def _waits(self, layer: HostLayer) -> bool:
        """Whether a gradient has come that is still to be used."""
        return self.consuming and any(
            p.grad is not None for weight in layer.weights for p in (weight.whole, weight.shard) if p is not None
        )

    def _fetch(self, number: int, rows: Iterable[int] | None = None, keep: bool = False) -> None:
        """Begin to bring in of a layer what is not here.

        Args:
            rows: these experts; None: all.
            keep: they may stay in the cache on the device."""
        layer = self._layers[number]
        if not layer.here:
            layer.here, layer.rows = True, set()
            for weight in layer.weights:
                weight.device.untyped_storage().resize_(weight.size)
        if layer.rows is None:
            return
        whole = rows is None and not layer.rows and self._reader is None and not self._cache.held(number)
        missing = sorted((set(range(layer.experts)) if rows is None else set(rows)) - layer.rows)
        layer.rows = None if rows is None else layer.rows.union(missing)
        if not missing:
            return
        # The memory was somebody's until what has been asked for so far is done.
        with on_stream(self._into, event_now(self._device), layer.gone):
            if layer.staging is not None or whole:
                self._fetch_whole(number)
            else:
                self._fetch_rows(number, missing, keep)
            layer.ready = event_now(self._device)

    def _fetch_whole(self, number: int) -> None:
        layer = self._layers[number]
        layer.rows = None
        values = layer.values
        if layer.staging is not None:
            values = layer.staging.take(number, values)
        for value, weight in zip(values, layer.weights, strict=True):
            weight.here.copy_(value, non_blocking=True)
            self.bytes_in += weight.size
        if layer.staging is not None:
            layer.staging.release(number, event_now(self._device))

    def _fetch_rows(self, number: int, rows: Sequence[int], keep: bool) -> None:
        layer = self._layers[number]
        # What threads are at work for.
        stay = [other for other, one in enumerate(self._layers) if one.reads or other == number]
        held = self._cache.held(number)
        # First those that are in the cache: others may get their places.
        for row in held.intersection(rows):
            self._copy(self._cache.find(number, row), layer, row)
        priority = None if self.predictor is None else self.predictor.priority()
        for row in [row for row in rows if row not in held]:
            cached = None
            if keep and self._cache.slots:
                cached = self._cache.put(number, row, priority, stay, only_lower=self._learns)
            if self._reader is None:
                self._bring(layer, row, cached, [value[row] for value in layer.values])
            else:
                bring = partial(self._bring, layer, row, cached)
                if (read := self._reader.bring(number, row, bring, priority, stay)) is not None:
                    layer.reads.append(read)
            self.bytes_in += sum(weight.size // layer.experts for weight in layer.weights)

    def _bring(
        self, layer: HostLayer, row: int, cached: Sequence[torch.Tensor] | None, values: Sequence[torch.Tensor]
    ) -> None:
        """An expert from host memory into its layer's memory, and into a place in the cache."""
        self._copy(values, layer, row)
        for place, weight in zip(cached or (), layer.weights, strict=False):
            place.copy_(weight.here[row], non_blocking=True)

    @staticmethod
    def _copy(values: Sequence[torch.Tensor] | None, layer: HostLayer, row: int) -> None:
        assert values is not None
        for value, weight in zip(values, layer.weights, strict=True):
            weight.here[row].copy_(value, non_blocking=True)

    def _leave(self, number: int) -> None:
        """Free a layer's memory on the device."""
        layer = self._layers[number]
        self._finish_reads(layer)
        wait_for(layer.ready)
        for weight in layer.weights:
            if self._out is not None:
                # The memory must not be reused before the copy to the host.
                weight.device.record_stream(self._out)
            weight.device.untyped_storage().resize_(0)
        layer.here, layer.ready = False, None
        layer.foretold = set()

    @torch.no_grad()
    def updated(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called after parameters were updated on the device: copy the offloaded ones to the host."""
        for parameter in parameters:
            number = self._of.get(storage_key(parameter))
            if number is None:
                continue
            layer = self._layers[number]
            assert layer.here
            weight = next(one for one in layer.weights if one.key == storage_key(parameter))
            self.bytes_out += weight.size
            assert weight.host is not None
            name, values = (number, layer.weights.index(weight)), [weight.host]
            if layer.staging is not None:
                values = layer.staging.put(name, values)
            with on_stream(self._out, event_now(self._device)):
                values[0].copy_(weight.device, non_blocking=True)
                layer.gone = event_now(self._device)
            if layer.staging is not None:
                layer.staging.give(name, layer.gone)

    # -- values for checkpoints ------------------------------------------------------------------------------------

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which parameters refer to their values in host memory, which may be changed. Layers must not
        compute inside. Parameters in files have no values."""
        if self._out is not None:
            torch.cuda.synchronize()
        if self._staging is not None:
            self._staging.flush()
        weights = [weight for layer in self._layers for weight in layer.weights if weight.whole.numel()]
        if self._reader is not None or (weights and weights[0].shown):  # inside of another
            yield
            return
        for number, layer in enumerate(self._layers):
            if layer.here:
                self._leave(number)
        self._point(weights, host=True)
        try:
            yield
        finally:
            self._point(weights, host=False)

    @staticmethod
    def _point(weights: Sequence[HostWeight], host: bool) -> None:
        for weight in weights:
            values = weight.host if host else weight.device
            assert values is not None
            weight.whole.data = values
            if isinstance(weight.shard, DTensor):
                weight.shard._local_tensor = values


def host_experts(model: nn.Module) -> HostExperts | None:
    """The `HostExperts` of a model, or None."""
    found: HostExperts | None = getattr(model, _ATTRIBUTE, None)
    return found
