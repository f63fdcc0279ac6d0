"""What is asked: a checkpoint folder of Transformers, or the folder of a run; and its model on this rank.

    a checkpoint      config.json, safetensors, a tokenizer             as it is
    a run             config.toml, checkpoints/step-00000100/, ...      its best checkpoint, if it keeps that, or
                                                                        its newest; without one, model/, which it
                                                                        exported; the adapter that it trained,
                                                                        beside the model that was adapted
    an adapter        adapter_config.json, as peft writes it            beside the model that was adapted

Further adapters of the same model may stand beside it, of which one at a time counts (`use_adapter`).

Over several ranks each keeps the non-expert parameters whole, for prompts of its own, and E / W of the experts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from carpool.hf import install, rides, set_transport
from carpool.hf.adapters import is_added, share_adapters
from carpool.hf.architecture_changes import row_size
from carpool.hf.build_model import build_model
from carpool.hf.held_experts import keep_experts_in_host_memory
from carpool.hf.sharding import replicate_dense
from carpool.hf.weights.model_config import read_config
from carpool.hf.weights.original_layout import check_weights
from carpool.hf.weights.stored_experts import StoredExperts
from carpool.memory.next_experts import PREDICTORS
from carpool.optim.update import local
from carpool.parallel.ranks import rank, together, world
from carpool.parallel.replicated import sharded_parameters
from carpool.serve import check_folder
from carpool.serve.prompts import Text
from carpool.serve.serve_memory import ON_DEVICE, ExpertTier, check_room
from carpool.train.blueprint import checkpoint_changes, meta_model, model_source, top_k_of
from carpool.train.checkpoints.adapter_files import base_folder
from carpool.train.checkpoints.export import best_checkpoint
from carpool.train.checkpoints.manager import CheckpointManager
from carpool.train.checkpoints.reading import load
from carpool.train.checkpoints.run_source import SOURCE
from carpool.train.checkpoints.trained_base import kept_in, recorded_base
from carpool.train.config import load_config
from carpool.train.config.fine_tuning import adapter_folder, base_of_run, other_base
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import tokenizer_of
from carpool.train.lora import attach_adapter
from carpool.train.records.run_folder import ADAPTER
from carpool.transport import HierarchicalOptions


@dataclass(frozen=True)
class Source:
    """What a path names.

    Attributes:
        path: as it was given.
        build: what the model is built from: a checkpoint folder, or a configuration.
        checkpoint: of a run, whose weights are then read; None: those in `build`.
        run: the configuration of a run; None: a checkpoint.
        text: its tokenizer.
        adapters: folders of adapters beside the model in `build`, by name. The first counts.
    """

    path: Path
    build: Path | PreTrainedConfig
    checkpoint: Path | None
    run: Config | None
    text: Text
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """Of the language model."""
        config = read_config(self.build) if isinstance(self.build, Path) else self.build
        return config.get_text_config(decoder=True)

    @property
    def warnings(self) -> list[str]:
        """Of adapters that were trained beside another model, or the same in another storage."""
        base = self.run.adapter.base_dtype if self.run is not None else None
        model = str(self.build) if isinstance(self.build, Path) else None
        found = (other_base(str(folder), model, base) for folder in self.adapters.values())
        return [one for one in found if one is not None]

    @property
    def dtype(self) -> torch.dtype:
        """In which the weights are stored."""
        if self.run is not None:
            return getattr(torch, self.run.model.stored_dtype)  # type: ignore[no-any-return]
        return self.config.dtype or torch.float32

    def number_of(self, adapter: str) -> int:
        """Of the adapter with that name. ValueError: there is none."""
        if adapter not in self.adapters:
            raise ValueError(f"there is no adapter {adapter}; there are {', '.join(self.adapters) or 'none'}")
        return list(self.adapters).index(adapter)


def find_source(path: Path, adapters: Sequence[str] = ()) -> Source:
    """What `path` names.

    Args:
        adapters: further ones beside it, folders as peft writes them or runs that have trained one: NAME=FOLDER, or
            FOLDER, whose last part is the name. The first of them counts then.

    Raises:
        ValueError: neither a checkpoint nor a run, a run without weights, no tokenizer, or an adapter that is none or
            whose model is gone."""
    source, more = _find(path), dict[str, Path]()
    base = source.run.adapter.base_dtype if source.run is not None else None
    for one in adapters:
        name, _, folder = ("", "", one) if Path(one).is_dir() else one.rpartition("=")
        found, name = adapter_folder(folder), name or Path(folder).resolve().name
        if not (found / "adapter_config.json").is_file():
            raise ValueError(f"--adapter {one}: {folder} is neither an adapter as peft writes it nor a run with one")
        if source.checkpoint is not None:
            raise ValueError(f"--adapter {one}: {path} has trained the model itself; name what `carpool export` writes")
        if (kind := base_of_run(Path(folder)).get("base_dtype")) not in (None, base):
            raise ValueError(f"--adapter {one} was trained beside a base in {kind}: name that run in place of {path}")
        if name in more or name in source.adapters:
            raise ValueError(f"--adapter: two are called {name}; give others names: --adapter NAME={folder}")
        more[name] = found
    return replace(source, adapters={**more, **source.adapters})


def _find(path: Path) -> Source:
    check_folder(path)
    if not (path / "config.toml").is_file() and not (path / "config.json").is_file():
        source = _find(base_folder(path, None))
        return replace(source, adapters={path.resolve().name: path})
    if not (path / "config.toml").is_file():
        check_weights(path, meta_model(path))
        return Source(path, path, None, None, Text(path))
    config = load_config(path / "config.toml")
    text = Text(path / SOURCE, config.data)
    if config.adapter.is_used:
        adapter = path / ADAPTER
        if not (adapter / "adapter_config.json").is_file():
            raise ValueError(f"{path} has no adapter yet: let it train on, or lower training.save_steps")
        # Where it was then, from wherever this is run; or else where the run has moved with it.
        recorded = recorded_base(adapter)
        base = next((one for one in (recorded, Path(str(config.model.weights))) if one.is_dir()), recorded)
        if not (base / "config.json").is_file():
            raise ValueError(
                f"{path} has trained an adapter of the model in {base}, which is not there any more: put it back, or "
                f"ask what `carpool merge {path} --base DIR --out DIR` writes"
            )
        return Source(path, base, None, config, text, {path.resolve().name: adapter})
    # Not training.output_dir: the run may have been moved since.
    if (latest := CheckpointManager(path).latest()) is not None:
        tokenizer = tokenizer_of(config)
        return Source(path, model_source(config, tokenizer), best_checkpoint(path) or latest, config, text)
    if (path / "model" / "config.json").is_file():
        return Source(path, path / "model", None, config, text)
    raise ValueError(f"{path} has no checkpoint yet: let it train on, or lower training.save_steps")


def open_model(
    source: Source,
    *,
    dtype: str | None = None,
    max_tokens: int,
    cached_tokens: int = 0,
    experts: ExpertTier = ON_DEVICE,
) -> PreTrainedModel:
    """The model on this rank, in evaluation mode. All ranks together.

    Args:
        dtype: of the weights; None: as they are stored.
        max_tokens: the most tokens that a rank has in a forward.
        cached_tokens: the most whose keys and values a rank keeps.
        experts: where they are; of one rank, they may come when they are chosen.

    Raises:
        ValueError: weights that hold NaN or do not fit the configuration, ranks that do not divide the experts, or too
            little memory, which is told before anything is read.
    """
    kind = source.dtype if dtype is None else getattr(torch, dtype)
    for text in source.warnings if rank() == 0 else ():
        print(f"warning: {text}", file=sys.stderr, flush=True)
    if experts.away and world() > 1:
        raise ValueError(
            f"--experts {experts.where}: experts come when they are chosen on one rank alone; use --ranks 1"
        )
    if experts.where == "disk" and (source.checkpoint is not None or not isinstance(source.build, Path)):
        raise ValueError(
            f"--experts disk reads the files of a model, and {source.path} is a run, whose checkpoints have others: "
            f"name what `carpool export {source.path} --out DIR` writes"
        )
    if experts.away and source.adapters:
        raise ValueError(
            f"--experts {experts.where}: {source.path} has an adapter, whose experts stay on the device; leave it out, "
            f"or ask what `carpool merge {source.path} --out DIR` writes"
        )
    check_room(source.build, kind, world(), max_tokens, cached_tokens, experts)
    kwargs: dict[str, Any] = {}
    if source.run is not None:
        kwargs["attn_implementation"] = source.run.model.attn_implementation
        kwargs["experts_implementation"] = source.run.model.experts_implementation
        kwargs |= {**source.run.adapter.base, "changes": checkpoint_changes(source.run)}
        if (base := kwargs["base_dtype"]) is not None:
            kwargs["base_keep"] = keep = kept_in(source.path)
            if world() > 1 and keep is not None:
                raise ValueError(
                    f"{source.path} was trained on one rank, beside layers in {base} whose weights several ranks would "
                    "have as they are in the files: use --ranks 1"
                )
    model = spread_model(source.build, kind, max_tokens, experts, list(source.adapters.values()), **kwargs)
    if source.checkpoint is not None:
        load(source.checkpoint, model, restore_rng=False, averaged=True)
    _refuse_nan(model, source.path)
    return model


def _refuse_nan(model: PreTrainedModel, path: Path) -> None:
    """ValueError, on all ranks alike: a tensor holds NaN, so that the model would answer nonsense. Experts in files are
    not read for it."""
    with sharded_parameters(model), together(ValueError, ""):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            values = local(tensor)
            there = 0 < values.nbytes <= values.untyped_storage().nbytes()  # no stand-in of what is elsewhere
            # Of one byte are codes of quantised weights. aminmax takes one pass and no memory.
            if there and values.is_floating_point() and values.itemsize > 1 and values.aminmax().min.isnan():
                raise ValueError(
                    f"{path}: {name} holds NaN: copy or download the weights again, or name an earlier checkpoint"
                )


def spread_model(
    build: Path | PreTrainedConfig,
    dtype: torch.dtype,
    max_tokens: int,
    experts: ExpertTier = ON_DEVICE,
    adapters: Sequence[Path] = (),
    **implementations: Any,
) -> PreTrainedModel:
    """A model for inference: non-expert parameters whole on each rank, experts spread over all. All ranks together.

    Args:
        build: as `carpool.hf.build_model.build_model`; a configuration gets random weights.
        max_tokens: the most tokens that a rank has in a forward.
        experts: as `open_model`. If they are in host memory, the model is read into it, and all but the experts moves
            from there. If they are on disk, `build` is a folder.
        adapters: folders of those beside the model; the first counts.
        implementations: as `build_model`."""
    ranks = world()
    spread = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="carpool") if ranks > 1 else None
    dense = "zero1" if ranks > 1 else "fsdp"
    on_disk, device = experts.where == "disk", torch.device("cpu") if experts.where == "host" else None
    model = build_model(
        build,
        distributed_config=spread,
        dtype=dtype,
        seed=0,
        dense=dense,
        device=device,
        read_experts=not on_disk,
        **implementations,
    )
    install(model)
    model.requires_grad_(False)
    for number, adapter in enumerate(adapters):
        attach_adapter(model, adapter, name=_internal(number))
    if adapters:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_added(name))
        model.set_adapter(_internal(0))
        for module in model.modules():
            if any(one is not None and one.requires_grad for one in module._parameters.values()):
                module.to(dtype)  # as it computed when it was trained
        if ranks > 1:
            share_adapters(model)
        model.requires_grad_(False)
    if experts.away:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        files = StoredExperts(build, model, list(rides(model))) if on_disk and isinstance(build, Path) else None
        predictor = PREDICTORS[experts.predictor]
        keep_experts_in_host_memory(
            model, device, predictor, cache_bytes=experts.memory, files=files, host_bytes=experts.host_memory
        )
        model.to(device)  # type: ignore[arg-type]
    if ranks > 1:
        replicate_dense(model, bfloat16=False)
    # Of a prompt's tokens a step of decoding has few: rows of a fixed size would be empty.
    set_transport(model, "auto", max_tokens=max_tokens, options=HierarchicalOptions(first_hop="counted"))
    top_k, hidden = top_k_of(model), row_size(model.config)
    for own in rides(model).values():
        # Now, and not in the first forward: whether decode steps can be graphs depends on what it becomes.
        own.prepare(top_k, hidden)
    return model.eval()


def use_adapter(model: Any, source: Source, name: str | None) -> None:
    """From now on this adapter counts; None: none does. On all ranks."""
    if name is None:
        model.disable_adapters()
        return
    model.enable_adapters()
    model.set_adapter(_internal(source.number_of(name)))
    model.requires_grad_(False)


def _internal(number: int) -> str:
    # As no part of a parameter's name is called.
    return f"adapter-{number}"
