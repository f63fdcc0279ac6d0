"""What a server makes of an adapter: which of its matrices it reads as they were trained, and a layout that it reads.

    peft writes         experts.base_layer.lora_A.weight (E * Q, in)    the gate and up matrices of all experts
                        experts.lora_A.weight                           the down matrices
    SGLang, and vLLM    experts.0.gate_proj.lora_A.weight (Q, in)       each matrix of an expert by itself, under names
                        experts.0.up_proj.lora_A.weight, ...            that depend on the family (`Family.served`)

Servers refuse what they do not know, or leave it out without a word, or read it as something else. `read_as` is their
rules, read in the sources of the versions below, so that no server is needed:

    vLLM 0.33.0      vllm/lora: lora_model.py, model_manager.py, lora_weights.py, peft_helper.py, utils.py
    SGLang 0.5.23    sglang/srt/lora: lora.py, lora_config.py, lora_manager.py, mem_pool.py, utils.py

What they would compute with is compared with what peft computes with, matrix by matrix, by value.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from carpool.families import ServedExperts, family_of
from carpool.hf.seam.find_modules import experts_modules
from carpool.train.blueprint import meta_model
from carpool.train.checkpoints.adapter_files import AdapterModules, Factors, factors
from carpool.train.checkpoints.checkpoint_files import CheckpointWriteError
from carpool.train.checkpoints.export import check_target

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
# The values of vLLM's --max-lora-rank, whose default is 16.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}
_ROUTERS = {"gate", "shared_expert_gate"}
_LINEAR = {
    "vllm": _ATTENTION | _FEED_FORWARD | _ROUTERS | {"out_proj"},
    "sglang": _ATTENTION | _FEED_FORWARD | {"kv_b_proj"},
}
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_EACH = re.compile(r"(.*layers\.\d+)\.(.*experts)\.(\d+)\.(\w+)")
_STACKS = re.compile(r"(.*layers\.\d+)\.(.*experts)(\.base_layer)?")

_LAYER = re.compile(r"(.*layers\.\d+)\.(.+)")

# A layer, the expert and which of its matrices; in the block of the experts, -1 and a name; or the name of a layer.
Place = tuple[str, int, str] | str
Pairs = dict[Place, tuple[torch.Tensor, torch.Tensor]]


class Server(NamedTuple):
    """A server beside one model.

    Attributes:
        name: "vllm" or "sglang".
        experts: where it looks for the adapters of experts; None: nobody knows.
        number: of experts in a layer.
        interleaved: gate and up are in turns in the model's weights."""

    name: str
    experts: ServedExperts | None
    number: int = 0
    interleaved: bool = False


class Report(NamedTuple):
    """How a server reads an adapter.

    Attributes:
        matrices: adapted ones.
        wrong: those that it does not read as trained, and why.
        rank: the largest.
        out: a folder that was written in its layout."""

    server: str
    matrices: int
    wrong: dict[str, str]
    rank: int
    out: Path | None = None

    def __str__(self) -> str:
        read = self.matrices - len(self.wrong)
        text = f"{self.server} {VERSIONS[self.server]} reads {read:,} of {self.matrices:,} adapted matrices as trained"
        if not self.wrong:
            rank = next(size for size in RANKS if size >= self.rank) if self.server == "vllm" else self.rank
            text += f"; start it with --max-lora-rank {rank}"
        reasons: dict[str, list[str]] = {}
        for name, why in self.wrong.items():
            reasons.setdefault(why, []).append(name)
        return text + "".join(
            f"\n  {names[0]}{f' and {len(names) - 1:,} others' if names[1:] else ''}: {why}"
            for why, names in reasons.items()
        )


def check_served(
    adapter: Path, base: Path, server: str, written: Path | None = None, out: Path | None = None
) -> Report:
    """How a server reads an adapter as peft has written it.

    Args:
        adapter: its folder, which says what was trained.
        base: that of the model.
        written: the folder that the server gets; None: `adapter`.
        out: a new folder, written in the layout that the server reads, and then read as the server does.

    Raises:
        ValueError: it is no adapter of that model, or the server has no layout for it.
        CheckpointWriteError: the server does not read what was written as trained. The folder is not there then.
    """
    modules = AdapterModules(base, adapter)
    model = meta_model(base)
    known = family_of(model).served.get(server)
    layers = [_LAYER.fullmatch(name) for name in experts_modules(model)] if known is not None else []
    trained = dict(_trained(modules, {match[2].rpartition(".")[0] for match in layers if match is not None}))
    number = 1 + max((one.expert for one in trained.values() if one.expert is not None), default=-1)
    own = Server(server, known, number, any(one.rows.step == 2 for one in trained.values()))
    if out is not None:
        out = out.absolute()
        check_target(out, replace=False)
        try:
            _write(
                adapter,
                out,
                own,
                trained,
                max((float(module.scaling["default"]) for module, _ in modules.layers.values()), default=1.0),
            )
            report = _compare(trained, modules, out, own)
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
        if report.wrong:
            shutil.rmtree(out)
            raise CheckpointWriteError(f"{out} was not written: {report}")
        return report._replace(out=out)
    return _compare(trained, modules, written or adapter, own)


def _trained(modules: AdapterModules, blocks: Collection[str]) -> Iterator[tuple[Place, Factors]]:
    """What peft computes with, scaled. `blocks`: names, in layers of the model, of modules that hold experts."""
    for name, (module, own) in modules.layers.items():
        weight: Any = module.get_base_layer()._parameters[own]
        with modules.filled(name, nn.Parameter(weight, requires_grad=False)):
            for one in factors(name, module):
                match = _LAYER.fullmatch(plain := name.removesuffix(".weight"))
                block = next((block for block in blocks if match and match[2].startswith(f"{block}.")), None)
                if match is not None and one.expert is not None:
                    part = one.kind or ("down" if name.endswith("down_proj") else "up")
                    yield (match[1], one.expert, part), one
                elif match is not None and block is not None:
                    yield (match[1], -1, match[2].removeprefix(f"{block}.")), one
                else:
                    yield plain, one


def _name(place: Place) -> str:
    if isinstance(place, str):
        return place
    return f"{place[0]}: {place[2]}" if place[1] < 0 else f"{place[0]}, expert {place[1]}, {place[2]}"


def _parts(names: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(names, ("gate", "up", "down") if len(names) == 3 else ("up", "down"), strict=True))


def _compare(trained: Mapping[Place, Factors], modules: AdapterModules, folder: Path, server: Server) -> Report:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found, why = read_as(server, config, tensors)
    wrong = {name: why.get("", "left out without a word: modules_to_save are not read") for name in modules.replaced}
    for place, one in trained.items():
        name = _name(place)
        if why.get("") or place not in found:
            own = place if isinstance(place, str) or place[1] < 0 else place[0]
            wrong[name] = why.get("") or why.get(
                place, why.get(own, "left out without a word: it is under no name that the server looks for")
            )
            continue
        a_QI, b_OQ = found[place]
        if a_QI.shape[1:] != one.a_QI.shape[1:] or b_OQ.shape[:1] != one.b_OQ.shape[:1]:
            wrong[name] = "refused: it has another shape than the server's"
        elif not _same(a_QI, b_OQ, one):
            wrong[name] = "read as something else: other values than those that were trained"
    return Report(
        server.name, len(trained) + len(modules.replaced), wrong, max(len(one.a_QI) for one in trained.values())
    )


def _same(a_QI: torch.Tensor, b_OQ: torch.Tensor, one: Factors) -> bool:
    if torch.equal(a_QI, one.a_QI) and torch.equal(b_OQ, one.b_OQ):
        return True
    expected = one.b_OQ @ one.a_QI
    return bool((b_OQ @ a_QI - expected).abs().max() <= 1e-5 * expected.abs().max())


def read_as(
    server: Server, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[Pairs, dict[Place, str]]:
    """What a server would compute with, scaled; and why not with what: a layer's name means its experts, "" everything.
    `config`: adapter_config.json. `tensors`: of the file, by name."""
    vllm, experts = server.name == "vllm", server.experts
    why: dict[Place, str] = {}
    rank, patterns = int(config["r"]), bool(config.get("rank_pattern") or config.get("alpha_pattern"))
    scaling = config["lora_alpha"] / (math.sqrt(rank) if vllm and config.get("use_rslora") else rank)
    targets = config.get("target_modules")
    if config.get("use_dora"):
        why[""] = "refused: it has no DoRA"
    elif vllm and (config.get("modules_to_save") or not all(_KEY.fullmatch(name) for name in tensors)):
        why[""] = "refused: modules_to_save are for classification alone"
    elif vllm and rank > RANKS[-1]:
        why[""] = f"refused: ranks above {RANKS[-1]}"
    elif patterns:
        how = "matched by other names" if vllm else "not read"
        why[""] = f"read as something else: rank_pattern and alpha_pattern are {how}"
    elif not vllm and not isinstance(targets, list):
        why[""] = "refused: target_modules must be a list"
    factors_of: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _KEY.fullmatch(name)) is not None:
            factors_of.setdefault(match[1], {})[match[2]] = tensor.float()
    known = {one.rpartition(".")[2] for one in targets or ()}
    found: Pairs = {}
    block = "" if experts is None else experts.block.rpartition(".")[0]
    for name, pair in factors_of.items():
        each, stacks, leaf = _EACH.fullmatch(name), _STACKS.fullmatch(name), name.rpartition(".")[2]
        match = _LAYER.fullmatch(name)
        place: Place = name
        if each and experts is not None and each[4] in (parts := _parts_of(server)):
            place = each[1], int(each[3]), parts[each[4]]
        elif block and match and match[2].startswith(f"{block}."):
            place = match[1], -1, match[2].removeprefix(f"{block}.")
        if pair.keys() != {"A", "B"}:
            why[place] = "refused: one of its two matrices is not in the file"
            continue
        a, b = pair["A"], pair["B"] * scaling
        if each:
            why |= _refused_each(server, each, known)
            found[place] = a, b
        elif stacks:
            why |= _place_of_stacks(server, stacks, found, a, b)
        elif leaf not in _LINEAR[server.name]:
            why[place] = (
                "left out in decode steps: they read the weights past the adapter"
                if leaf == "kv_b_proj"
                else "refused: it has no adapters of this layer, or nobody has looked"
            )
        elif not vllm and leaf not in known:
            why[place] = "refused: it is not in target_modules"
        elif not vllm and (other := _missing_sibling(name, leaf, factors_of)):
            why[place] = f"refused: it fuses this with {other}, which has no adapter"
        else:
            found[place] = a, b
    found = {
        place: pair for place, pair in found.items() if isinstance(place, str) or place[1] < 0 or place[0] not in why
    }
    if vllm and experts is not None:
        why |= _incomplete(experts, found, server.number)
    return found, why


def _parts_of(server: Server) -> dict[str, str]:
    """Which of an expert's matrices a name means."""
    parts = _parts(server.experts.names) if server.experts and server.experts.names else {}
    other = _parts(("gate_proj", "up_proj", "down_proj")) | _parts(("w1", "w3", "w2"))
    return parts if server.name == "vllm" else parts | other


def _refused_each(server: Server, each: re.Match[str], known: Collection[str]) -> dict[Place, str]:
    """Why a server does not read an expert's matrix, by layers."""
    (layer, block, _, leaf), experts, vllm = each.groups(), server.experts, server.name == "vllm"
    if experts is None or (vllm and not experts.names):
        return {layer: "refused: it does not read experts one by one for this family, or nobody has looked"}
    if not vllm and (missing := _FEED_FORWARD.difference(known)):
        return {layer: f"refused: target_modules lacks {min(missing)}"}
    if vllm and block != experts.block:
        return {layer: f"left out without a word: experts are looked for in {experts.block}, not in {block}"}
    if leaf not in _parts_of(server):
        return {layer: f"refused: an expert has {', '.join(experts.names)}, and no {leaf}"}
    return {}


def _place_of_stacks(
    server: Server, stacks: re.Match[str], found: Pairs, a: torch.Tensor, b: torch.Tensor
) -> dict[Place, str]:
    """Puts what stacks of all experts hold into `found`, or says why the server does not read them."""
    (layer, block, is_up), experts, number = stacks.groups(), server.experts, server.number
    if experts is None or experts.names:
        return {layer: "refused: it reads no stacks of all experts, as peft writes them; write its layout by --out"}
    if block != experts.block:
        return {layer: f"left out without a word: experts are looked for in {experts.block}, not in {block}"}
    if not number or len(a) % number or b.shape[1] != len(a):
        return {layer: f"refused: stacks of {tuple(a.shape)} are none of {number} experts"}
    a_EQI, b_EOQ = a.unflatten(0, (number, -1)), b.unflatten(1, (-1, number)).permute(2, 0, 1)
    half = b_EOQ.shape[1] // 2
    kinds = {"gate": slice(half), "up": slice(half, None)} if is_up else {"down": slice(None)}
    if is_up and server.interleaved:
        kinds = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    for expert, (a_QI, b_OQ) in enumerate(zip(a_EQI, b_EOQ, strict=True)):
        found |= {(layer, expert, kind): (a_QI, b_OQ[rows]) for kind, rows in kinds.items()}
    return {}


def _missing_sibling(name: str, leaf: str, there: Mapping[str, Any]) -> str | None:
    needs = {"q_proj": ("v_proj",), "k_proj": ("q_proj",), "v_proj": ("q_proj",), "kv_a_proj_with_mqa": ("q_a_proj",)}
    return next((one for one in needs.get(leaf, ()) if f"{name.removesuffix(leaf)}{one}" not in there), None)


def _incomplete(experts: ServedExperts, found: Pairs, number: int) -> dict[Place, str]:
    """vLLM packs all experts of a layer, and fails where one has no adapter."""
    parts = ("gate", "up", "down") if len(experts.names) != 2 else ("up", "down")
    wrong: dict[Place, str] = {}
    for layer in {place[0] for place in found if not isinstance(place, str) and place[1] >= 0}:
        missing = [(e, part) for e in range(number) for part in parts if (layer, e, part) not in found]
        if missing:
            wrong[layer] = f"refused: it packs all experts of a layer, and expert {missing[0][0]} lacks {missing[0][1]}"
            for e, part in [(e, part) for e in range(number) for part in parts]:
                found.pop((layer, e, part), None)
    return wrong


def _write(adapter: Path, out: Path, server: Server, trained: Mapping[Place, Factors], scaling: float) -> None:
    """An adapter in the layout of a server; what peft scales otherwise is scaled in the file."""
    experts = server.experts
    adapts_experts = any(one.expert is not None for one in trained.values())
    if experts is None and adapts_experts:
        raise ValueError(
            f"{server.name} {VERSIONS[server.name]}: no layout is known for the adapters of this model's experts"
        )
    out.mkdir(parents=True, exist_ok=True)
    if experts is not None and not experts.names:  # as peft writes it
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(adapter / name, out / name)
        return
    rank = max(len(one.a_QI) for one in trained.values())
    tensors, leaves = {}, set()
    for place, one in trained.items():
        if isinstance(place, str):
            name = place
        elif place[1] < 0:
            assert experts is not None
            name = f"{place[0]}.{experts.block.rpartition('.')[0]}.{place[2]}"
        else:
            assert experts is not None
            names = {part: leaf for leaf, part in _parts(experts.names).items()}
            name = f"{place[0]}.{experts.block}.{place[1]}.{names[place[2]]}"
        leaves.add(name.rpartition(".")[2])
        more = rank - len(one.a_QI)
        tensors[f"base_model.model.{name}.lora_A.weight"] = nn.functional.pad(one.a_QI, (0, 0, 0, more)).contiguous()
        b_OQ = nn.functional.pad(one.b_OQ / scaling, (0, more)).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b_OQ
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    config |= {"r": rank, "lora_alpha": scaling * rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    targets = sorted(leaves | (_FEED_FORWARD if adapts_experts else set()))
    config |= {"target_modules": targets, "target_parameters": None}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
