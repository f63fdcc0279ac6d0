"""Parity tests of any expert-parallel implementation in Transformers' registry, on CPU ranks.

    python -m carpool.conformance --implementation all_to_all

A tiny Mixtral in float32 computes each case twice: in one process with the whole batch and Transformers' eager experts,
and on two or four gloo ranks, each with its shard of the batch. Every rank compares its loss, its logits, every whole
gradient and the norm. The table shows the largest errors of all ranks.

Errors are relative, in the maximum norm: max |actual - expected| / max |expected|. A gradient that is mathematically
zero consists of rounding, whose ratio means nothing. So the denominator of a gradient's error is at least 1/1000 of the
model's largest gradient. A gradient that only one of the two has is an infinite error.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM, Trainer
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from carpool.hf import CarpoolEP, balance_loss
from carpool.optim.clip import clip_grad_norm
from carpool.train.config import load_config
from carpool.train.launch.failure import RankFailure
from carpool.train.launch.start import run

BOUND = 1e-5
SEQUENCES, LENGTH, VOCABULARY, EXPERTS, TOP_K = 8, 12, 96, 8, 2
COEF = 0.05
# fsdp_size, tp_size and ep_size.
MESHES = {
    "fsdp2 ep2": (2, 1, 2),
    "tp2 ep2": (1, 2, 2),
    "fsdp4 ep2": (4, 1, 2),
    "fsdp4 ep4": (4, 1, 4),
    "fsdp2 tp2 ep2": (2, 2, 2),
    "fsdp2 tp2 ep4": (2, 2, 4),
}
HELP = """
NAME is one of DistributedConfig.ep_implementation (all_to_all, all_reduce, auto, carpool, carpool-dedup, ...) or of
experts_implementation (batched_mm, grouped_mm, ...), which then computes under all_to_all. all_reduce+eager is both.

MODULE is a Python module or file that registers an implementation on import. Every rank imports it:

    class MyEP(transformers.distributed.expert_parallel.EPImplementation): ...
    EPImplementationInterface.register("mine", MyEP)      # or ALL_EXPERTS_FUNCTIONS.register("mine", function)

MODULE:NAME selects one of several. An EPImplementation may have two static methods: clip_grad_norm(model, max_norm)
clips in place and returns the norm (otherwise Transformers' Trainer does), and balance_loss(router_logits, top_k)
returns the balance loss over the tokens of all ranks (otherwise that case does not count)."""


@dataclass(frozen=True)
class Case:
    """A training step, and how it differs from a plain one.

    Args:
        shift: the mean increase of the router's scores of the first two experts, which are on the first rank.
        balance: the balance loss of each "rank", as Transformers' models compute it, or of the whole "batch".
        resumes: compare the weights after a second step, in a new model, instead of gradients.
    """

    about: str
    shift: float = 0.0
    uneven: bool = False
    micro_batches: int = 1
    balance: str = ""
    clips: bool = False
    recomputes: bool = False
    resumes: bool = False
    trains: bool = True


CASES: dict[str, Case] = {
    "gradients": Case("one step: loss, logits and every gradient"),
    "norm and clipping": Case("the norm of the gradient, and gradients clipped to half of it", clips=True),
    "accumulation": Case("two micro-batches against the whole batch", micro_batches=2),
    "balance of ranks": Case("the model's balance loss of each rank's tokens, averaged over ranks", balance="rank"),
    "balance of batch": Case("the balance loss of the tokens of all ranks", balance="batch"),
    "uneven ranks": Case("all sequences on the first rank, but one for each other", uneven=True),
    "skew": Case("two experts of the first rank get most tokens", shift=0.5),
    "empty ranks": Case("two experts of the first rank get all tokens, and other ranks none", shift=3.0),
    "recomputation": Case("gradient checkpointing", recomputes=True),
    "resume": Case("SGD with momentum, a checkpoint, and a second step: every weight", resumes=True),
    "inference": Case("logits without gradients", trains=False),
}


@dataclass(frozen=True)
class Implementation:
    """Names in Transformers' registries, and functions for clipping and the balance loss."""

    dispatch: str
    experts: str = ""
    clip: Callable[[nn.Module, float], torch.Tensor] | None = None
    balance: Callable[..., torch.Tensor] | None = None


def find_implementation(text: str) -> Implementation:
    """Imports and returns what `--implementation` names. ValueError: there is none, or the module registers several."""
    dispatches = EPImplementationInterface()
    text, _, experts = text.partition("+")
    if text not in dispatches and text not in ALL_EXPERTS_FUNCTIONS:
        text = _import(*text.partition(":")[::2])
    if text not in dispatches:
        text, experts = "all_to_all", text
    if experts not in ("", "eager", *ALL_EXPERTS_FUNCTIONS):
        raise ValueError(f"{experts} is not one of eager, {', '.join(sorted(ALL_EXPERTS_FUNCTIONS))}")
    dispatch: Any = dispatches[text]
    clip, balance = getattr(dispatch, "clip_grad_norm", None), getattr(dispatch, "balance_loss", None)
    if issubclass(dispatch, CarpoolEP):
        clip, balance = lambda model, max_norm: clip_grad_norm(model.parameters(), max_norm), balance_loss
    return Implementation(text, experts, clip, balance)


def _import(where: str, name: str) -> str:
    """Imports a module or file, and returns the name of the implementation that it registers."""
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).parent.resolve()))
        where = Path(where).stem
    try:
        module = importlib.import_module(where)
    except Exception as error:  # the module's own code runs
        raise ValueError(f"{where} is neither an implementation in Transformers nor a module: {error}") from error
    registered = [*EPImplementationInterface().items(), *ALL_EXPERTS_FUNCTIONS.items()]
    names = [key for key, entry in registered if f"{entry.__module__}.".startswith(f"{module.__name__}.")]
    if name not in names and (name or len(names) != 1):
        raise ValueError(f"{where} registers {', '.join(names) or 'nothing'}: choose one as {where}:NAME")
    return name or names[0]


def batch(number: int) -> torch.Tensor:
    """Tokens of a step, the same on all ranks."""
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(number))


def tiny_model(case: Case) -> MixtralForCausalLM:
    """A Mixtral whose weights vary so widely that rounding changes no routing. With a `shift`, all embeddings have a
    common component, which increases the scores of the first experts for all tokens of the first step."""
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, initializer_range=0.2,
        max_position_embeddings=64, experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    model = MixtralForCausalLM(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        if case.shift:
            model.model.embed_tokens.weight.add_(0.5)
            for layer in model.model.layers:
                inputs: list[torch.Tensor] = []
                hook = layer.mlp.gate.register_forward_pre_hook(lambda _, args, to=inputs: to.append(args[0]))
                model(input_ids=batch(0))
                hook.remove()
                mean_H, weight_EH = inputs[0].flatten(0, -2).mean(0), layer.mlp.gate.weight
                weight_EH -= torch.outer(weight_EH @ mean_H, mean_H) / mean_H.square().sum()
                weight_EH[:TOP_K] += case.shift * mean_H / mean_H.square().sum()
    return model


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def step(
    model: Any, case: Case, batches: list[torch.Tensor], using: Implementation, ranks: int = 1, number: int = 0
) -> dict[str, torch.Tensor]:
    """Run forward and backward of micro-batches, given as indices of sequences. Returns their share of the loss, and
    their logits. The caller averages gradients over `ranks`."""
    ids, losses, logits = batch(number), [], []
    for indices in batches:
        with torch.set_grad_enabled(case.trains):
            out = model(input_ids=ids[indices], output_router_logits=bool(case.balance), use_cache=False)
            predicted, labels = out.logits[:, :-1].flatten(0, 1), ids[indices, 1:].flatten()
            loss = nn.functional.cross_entropy(predicted, labels, reduction="sum") / ids[:, 1:].numel()
            if case.balance:
                of_batch = using.balance if case.balance == "batch" else None
                aux = out.aux_loss if of_batch is None else of_batch(out.router_logits, TOP_K)
                loss = loss + COEF * aux / max(ranks, len(batches))
        if case.trains:
            (loss * ranks).backward()
        losses.append(loss.detach())
        logits.append(out.logits.detach())
    return {"loss": torch.stack(losses).sum(), "logits": torch.cat(logits)}


def reference(case: Case, shards: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Computes the whole batch in one process. Returns (loss, logits and norm; gradients or resumed weights)."""
    model, using = tiny_model(case), Implementation("one process")
    batches, optimizer = shards if case.balance == "rank" else [torch.arange(SEQUENCES)], new_optimizer(model)
    numbers = step(model, case, batches, using)
    if case.clips:
        numbers["norm"] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
    if not case.resumes:
        return numbers, full_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    numbers = step(model, case, batches, using, number=1)
    optimizer.step()
    return numbers, {name: parameter.detach() for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Each parameter's whole gradient, on every rank. Collective."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}


def gradient_errors(expected: Mapping[str, Any], gradients: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Returns (the error of each gradient that both have; the names of gradients that only one has)."""
    both = {name: grad for name, grad in expected.items() if grad is not None and gradients.get(name) is not None}
    floor = max(float(grad.abs().max()) for grad in both.values()) / 1000
    missing = [name for name in expected if (expected[name] is None) != (gradients.get(name) is None)]
    return {name: relative_error(gradients[name], grad, floor) for name, grad in both.items()}, missing


def relative_error(actual: Any, expected: Any, floor: float = 1e-30) -> float:
    """max |actual - expected| / max(max |expected|, floor). Infinite if it is NaN."""
    error = float((actual - expected).detach().abs().max()) / max(float(expected.detach().abs().max()), floor)
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class Result:
    """The result of a case on a mesh: the error of each compared tensor, or the reason why there are none.

    verdict: "pass", "FAIL", "refused" (every rank raises ValueError while it loads the model), or "not counted".
    """

    case: str
    mesh: str
    verdict: str
    errors: dict[str, float]
    why: str = ""


class Refusal(Exception):
    """An implementation cannot be built on a mesh."""


def measure(text: str, name: str, mesh: str, folder: str) -> Result:
    """Run a case on a mesh. Collective. `folder` belongs to this case, and all ranks share it."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    using, errors, why, refused = find_implementation(text), dict[str, float](), "", False
    try:
        errors = _errors(using, CASES[name], *MESHES[mesh], folder)
    except Exception as error:  # the table shows it
        where, refused = traceback.extract_tb(error.__traceback__)[-1], isinstance(error, Refusal)
        why = str(error) if refused else f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        # The other ranks may wait for this one elsewhere and never gather its error. The first error is the cause.
        with suppress(FileExistsError), Path(f"{folder}.cause").open("x") as file:
            file.write(f"rank {dist.get_rank()}: {why}")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (errors, why, refused))
    errors = {key: max(e.get(key, math.inf) for e, *_ in gathered) for of_rank, *_ in gathered for key in of_rank}
    why = next((f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(gathered) if why), "")
    if all(refused for *_, refused in gathered):
        return Result(name, mesh, "refused", {}, why)
    passes = not why and max(errors.values()) <= BOUND
    if not passes and not why and CASES[name].balance == "batch" and using.balance is None:
        return Result(name, mesh, "not counted", errors, "each rank balances its own tokens")
    return Result(name, mesh, "pass" if passes else "FAIL", errors, why)


def _errors(using: Implementation, case: Case, fsdp: int, tp: int, ep: int, folder: str) -> dict[str, float]:
    """Returns the errors of this rank."""
    sizes = [SEQUENCES - fsdp + 1] + [1] * (fsdp - 1) if case.uneven else [SEQUENCES // fsdp] * fsdp
    shards = list(torch.arange(SEQUENCES).split(sizes))
    expected, gradients = reference(case, shards)
    shard = shards[dist.get_rank() // tp]
    batches = list(shard.chunk(case.micro_batches))
    if dist.get_rank() == 0:
        tiny_model(case).save_pretrained(folder)
    dist.barrier()

    def load(path: str) -> tuple[Any, torch.optim.Optimizer]:
        config = DistributedConfig(fsdp_size=fsdp, tp_size=tp, ep_size=ep, ep_implementation=using.dispatch)
        experts = {"experts_implementation": using.experts} if using.experts else {}
        model = MixtralForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=config, **experts)
        model.train()
        if case.recomputes:
            model.activation_checkpointing_enable()
        return model, new_optimizer(model)

    try:
        model, optimizer = load(folder)
    except ValueError as error:
        raise Refusal(str(error)) from error
    numbers = step(model, case, batches, using, fsdp)
    if case.clips:
        clip: Any = using.clip or partial(Trainer._mixed_mesh_grad_norm, None)
        norm = clip(model, float(expected["norm"]) / 2)
        numbers["norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if case.resumes:
        optimizer.step()
        model.save_pretrained(f"{folder}/resumed")
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/state")
        model, optimizer = load(f"{folder}/resumed")
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/state")
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        numbers = step(model, case, batches, using, fsdp, number=1)
        optimizer.step()
    # Tensor-parallel ranks compute the loss of the same tokens.
    dist.all_reduce(numbers["loss"])
    numbers["loss"] /= tp
    expected["logits"] = expected["logits"][shard]
    errors = {key: relative_error(numbers[key], value) for key, value in expected.items()}
    if not case.trains:
        return errors
    if case.resumes:
        for parameter in model.parameters():
            parameter.grad = parameter.detach()
    of_gradients, missing = gradient_errors(gradients, full_gradients(model))
    return errors | of_gradients | dict.fromkeys(missing, math.inf)


def run_rank(_: Any, implementation: str, todo: list[list[str]], folder: str) -> None:
    """Run all cases of a launch on this rank. Rank 0 writes a line for each case."""
    for number, (case, mesh) in enumerate(todo):
        result = measure(implementation, case, mesh, str(Path(folder, str(number))))
        if dist.get_rank() == 0:
            with Path(folder, "results").open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")


def launch(implementation: str, todo: list[tuple[str, str]], timeout: int) -> list[Result]:
    """Run cases on meshes of equally many ranks. After a rank has failed, new ranks run the remaining cases."""
    fsdp, tp, _ = MESHES[todo[0][1]]
    settings = [f"parallelism.num_ranks={fsdp * tp}", "parallelism.device=cpu"]
    config = load_config(None, [*settings, f"parallelism.timeout_seconds={timeout}"])
    results: list[Result] = []
    while left := todo[len(results) :]:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            failure, done = "", Path(folder, "results")
            done.touch()
            try:
                run(config, "carpool.conformance:run_rank", implementation=implementation, todo=left, folder=folder)
            except RankFailure as error:
                failure = str(error).strip().splitlines()[0]
            results += [Result(**json.loads(line)) for line in done.read_text().splitlines()]
            cause = Path(folder, f"{len(done.read_text().splitlines())}.cause")
            if failure and len(results) < len(todo):
                failure = cause.read_text() if cause.exists() else failure
                results.append(Result(*todo[len(results)], "FAIL", {}, failure))
    return results


def table(results: list[Result]) -> str:
    """Returns a Markdown table of the largest errors of loss and logits, of gradients, and of the norm."""
    columns = {"output": ("loss", "logits"), "experts": (".experts.",), "router": (".gate.",), "norm": ("norm",)}
    lines = ["| case | ranks | output | experts | router | others | norm | | what differs |", "|---" * 9 + "|"]
    for (mesh, why), group in itertools.groupby(results, lambda one: (one.mesh, one.verdict == "refused" and one.why)):
        ranks, together = f"{MESHES[mesh][0] * MESHES[mesh][1]}: {mesh}", list(group)
        if why:
            lines.append(f"| {len(together)} cases | {ranks} | | | | | | refused | {why} |")
            continue
        for one in together:
            largest: dict[str, float] = {}
            for name, error in one.errors.items():
                column = next((c for c, keys in columns.items() if name in keys or keys[0] in name), "others")
                largest[column] = max(error, largest.get(column, 0.0))
            shown = (
                f"{largest[c]:.1e}" if c in largest else "" for c in ("output", "experts", "router", "others", "norm")
            )
            lines.append(f"| {one.case} | {ranks} | {' | '.join(shown)} | {one.verdict} | {differs(one)} |")
    return "\n".join(lines)


def differs(one: Result) -> str:
    """Describes why a case does not pass."""
    wrong = sorted((name for name, error in one.errors.items() if error > BOUND), key=one.errors.__getitem__)[::-1]
    text = ", ".join(f"{name} {one.errors[name]:.1e}" for name in wrong[:3])
    return "; ".join(filter(None, (one.why, text + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))))


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a case fails or none passes."""
    cases = "\n".join(f"  {name:18}{case.about}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m carpool.conformance", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Parity tests of an expert-parallel implementation in Transformers' registry, on CPU ranks.",
        epilog=f"cases:\n{cases}\n\nmeshes: {', '.join(MESHES)}\n{HELP}",
    )  # fmt: skip
    parser.add_argument("--implementation", required=True, metavar="NAME|MODULE|MODULE:NAME")
    parser.add_argument("--case", action="append", choices=CASES, metavar="CASE", help="run only this one; repeatable")
    parser.add_argument("--mesh", action="append", choices=MESHES, metavar="MESH", help="run only this one; repeatable")
    parser.add_argument("--timeout", type=int, default=60, help="seconds that a rank waits for the others (60)")
    parser.add_argument("--json", type=Path, help="file for all errors")
    given = parser.parse_args(arguments)
    if not 1 <= given.timeout <= 86_400:
        parser.error(f"--timeout {given.timeout}: give 1 to 86,400 seconds")
    try:
        find_implementation(given.implementation)
        if given.json is not None:
            given.json.touch()  # an error now, and not after all cases
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--json {given.json} cannot be written ({error.strerror}); name another file")
    results: list[Result] = []
    for ranks in (2, 4):
        meshes = [name for name in given.mesh or MESHES if MESHES[name][0] * MESHES[name][1] == ranks]
        if todo := [(case, mesh) for mesh in meshes for case in given.case or CASES]:
            results += launch(given.implementation, todo, given.timeout)
    print(f"{given.implementation}: transformers {transformers.__version__}, torch {torch.__version__}, bound {BOUND}")
    print(table(results))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    count = Counter(one.verdict for one in results)
    print(", ".join(f"{count[verdict]} {verdict}" for verdict in ("pass", "FAIL", "refused", "not counted")))
    return int(count["FAIL"] > 0 or count["pass"] == 0)


if __name__ == "__main__":
    sys.exit(main())
