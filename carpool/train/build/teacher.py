"""The model that a student learns from: it computes beside the student, or writes what it has to say into files.

Its experts are spread over all ranks, however the student's are, and every rank has its other parameters whole: so its
output layer can compute a piece of tokens at any time, without a gather. A model without experts is whole on each rank.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from carpool.hf import install, set_transport
from carpool.hf.build_model import build_model
from carpool.hf.context_parallel import ContextParallel
from carpool.hf.seam.find_modules import experts_modules
from carpool.hf.sharding import replicate_dense
from carpool.hf.weights.original_layout import check_loaded, check_weights
from carpool.kernels.cross_entropy import piece_size
from carpool.kernels.distillation import PIECE
from carpool.parallel.context import Cut, Group
from carpool.parallel.ranks import from_rank_0, gather, rank, world
from carpool.train.blueprint import meta_model
from carpool.train.build.run_data import read_corpora
from carpool.train.config.schema import Config
from carpool.train.config.schema_distillation import DistillationSection
from carpool.train.data.loader import Batch, make_batch
from carpool.train.data.mixture import train_sequences
from carpool.train.data.sequences import Sequences
from carpool.train.data.teacher_logits import Row, TeacherLogits, check_teacher, write_rows
from carpool.train.data.tokenizer import tokenizer_of
from carpool.train.launch.machine import rank_device
from carpool.train.plan.division import teacher_ep
from carpool.train.steps.diagnose import nonfinite_parameters
from carpool.train.steps.distilling_objective import Teacher
from carpool.train.steps.training_objective import Objective

# Words of each token that are written, if nobody says.
TOP_K = 64
_FILE_BYTES = 2**25
# The share of tokens after which another teacher has another likeliest word; rounding changes fewer.
_OTHER = 0.1


def open_teacher(
    folder: Path, bf16: bool, device: torch.device, cut: Cut | None = None, group: Group | None = None
) -> Teacher:
    """The model in that folder of Transformers. All ranks together.

    Args:
        bf16: computes in bfloat16, else in float32.
        cut, group: of ranks that share sequences.

    Raises:
        ValueError: no model that these ranks can have, or not all of it."""
    model = _spread(folder, torch.bfloat16 if bf16 else torch.float32, device).requires_grad_(False).eval()
    if wrong := nonfinite_parameters(model, gradients=False):
        raise ValueError(f"the teacher in {folder} has NaN or infinity in {wrong[0]}: copy or download it again")
    context = None if cut is None or group is None else ContextParallel(model, cut, group)
    return Teacher(Objective(model, top_k=1, aux_coef=0.0, dp_size=world(), autocast=None, context=context))


def _spread(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    blueprint, ranks = meta_model(folder), world()
    if not (counts := experts_modules(blueprint)):
        load = cast(Any, AutoModelForCausalLM).from_pretrained
        safe = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
        loaded, info = load(folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **safe)
        check_loaded(folder, blueprint, info)
        return loaded.to(device)  # type: ignore[no-any-return]
    check_weights(folder, blueprint)
    ep = teacher_ep(counts.values(), ranks)
    spread = DistributedConfig(fsdp_size=ranks, ep_size=ep, ep_implementation="carpool") if ranks > 1 else None
    dense = "zero1" if ranks > 1 else None
    model = build_model(folder, distributed_config=spread, dtype=dtype, seed=0, dense=dense, device=device)
    install(model)
    if ranks > 1:
        replicate_dense(model.requires_grad_(False), bfloat16=False)
    # Not told how many tokens there will be, it has no buffers that could be too small.
    set_transport(model, "auto")
    return model


def write_logits(config: Config, *, teacher: str) -> None:
    """`carpool teach` on a rank: writes the rows that `distillation.logits` lacks, of sequences of its own.

    Raises:
        ValueError: a teacher or data that cannot be used, or rows that are there and do not go on."""
    disable_progress_bar()
    settings, tokenizer, device = config.distillation, tokenizer_of(config), rank_device()
    folder, top_k = Path(str(settings.logits)), settings.top_k or TOP_K
    sequences = train_sequences(read_corpora(config, tokenizer), config.data)
    check_teacher(Path(teacher), tokenizer, sequences, None)
    folder.mkdir(parents=True, exist_ok=True)
    todo, written = from_rank_0(lambda: _written(settings, sequences))
    model = open_teacher(Path(teacher), config.training.computes_in_bf16(device.type == "cuda"), device)
    if top_k > (words := len(model.head.weight)):
        raise ValueError(f"distillation.top_k = {top_k}, but the teacher in {teacher} has {words} words")
    kept, own, began = list[Row](), config.training.eval_batch_size, time.monotonic()

    def likeliest(together: list[int]) -> list[Row]:
        """This rank's rows of these sequences. All ranks call it together."""
        numbers = together[rank() :: world()]
        rows = [sequences[number] for number in numbers]
        batch = make_batch(sequences, rows, own, tokenizer.eos_id, sequences.batch_length(np.array(together)))
        found = _likeliest(model, {name: one.to(device) for name, one in batch.items()}, top_k, settings.temperature)
        made = zip(numbers, rows, *(one.cpu().numpy() for one in found), strict=False)
        return [(n, row.ids.astype(np.int32), ids[: len(row.ids)], log[: len(row.ids)]) for n, row, ids, log in made]

    for number, words_L in written.items():
        differing = [float((row[2][:-1, 0] != words_L).mean()) for row in likeliest([number])]  # on rank 0
        if gather(differing)[0][0] > _OTHER:
            raise ValueError(
                f"rows in {folder} are of another teacher than {teacher}, or not of its probabilities: sequence "
                f"{number} has other words; name the teacher that wrote them, or an empty folder"
            )
    for start in range(0, len(todo), own * world()):
        together = todo[start : start + own * world()]
        kept += likeliest(together)
        if kept and (together[-1] == todo[-1] or sum(row[2].nbytes for row in kept) > _FILE_BYTES):
            write_rows(folder, kept, settings.temperature)
            kept = []
    gather(None)
    if rank() == 0:
        took = time.monotonic() - began
        print(f"{folder}: {len(todo):,} of {len(sequences):,} sequences written in {took:.0f} s, {top_k} words a token")


def _written(settings: DistillationSection, sequences: Sequences) -> tuple[list[int], dict[int, NDArray[np.int32]]]:
    """The sequences without a row; and of the first that has one, the likeliest words after its tokens."""
    files = TeacherLogits(settings.model_copy(update={"top_k": settings.top_k or TOP_K}))
    missing = set(todo := files.check(sequences))
    first = [number for number in range(len(sequences)) if number not in missing][:1]
    rows = ((number, *files[number]) for number in first)
    return todo, {number: np.take_along_axis(ids, log.argmax(1)[:, None], 1)[:, 0] for number, ids, log in rows}


def _likeliest(model: Teacher, batch: Batch, top_k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L, K) of a batch: the likeliest words of each position, int32, and their log-probabilities, float32."""
    states_TH, shape = model.states(batch), (*batch["input_ids"].shape, top_k)
    size = piece_size(len(states_TH), len(model.head.weight), PIECE)
    of_piece = model.words(states_TH, top_k, temperature)
    pieces = [of_piece(slice(start, start + size)) for start in range(0, len(states_TH), size)]
    ids_TK = torch.cat([one.ids_CK for one in pieces if one.ids_CK is not None])
    return ids_TK.to(torch.int32).view(shape), torch.cat([one.log_p_CK for one in pieces]).float().view(shape)
