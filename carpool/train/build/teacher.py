"""The teacher of a distillation run: it computes beside the student, or writes its log-probabilities into files.

Its experts are sharded over all ranks, independently of the student's, and its other parameters are replicated. So its
output layer computes a chunk of tokens at any time, without an all-gather. A model without experts is replicated.
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
from carpool.kernels.cross_entropy import chunk_size
from carpool.kernels.distillation import CHUNK_LOGITS
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

# The default of `distillation.top_k` when files are written.
TOP_K = 64
_FILE_BYTES = 2**25
# Files are another teacher's if the top-1 id differs at more than this share of positions. Rounding changes fewer.
_MAX_TOP_1_MISMATCH = 0.1


def open_teacher(
    folder: Path, bf16: bool, device: torch.device, cut: Cut | None = None, group: Group | None = None
) -> Teacher:
    """Load the teacher from a checkpoint folder of Transformers. Collective.

    Args:
        bf16: compute in bfloat16, otherwise in float32.
        cut, group: the context-parallel division of sequences, and its ranks.

    Raises:
        ValueError: these ranks cannot shard the model, or weights are missing or not finite."""
    model = _load_sharded(folder, torch.bfloat16 if bf16 else torch.float32, device).requires_grad_(False).eval()
    if wrong := nonfinite_parameters(model, gradients=False):
        raise ValueError(f"the teacher in {folder} has NaN or infinity in {wrong[0]}: copy or download it again")
    context = None if cut is None or group is None else ContextParallel(model, cut, group)
    return Teacher(Objective(model, top_k=1, aux_coef=0.0, dp_size=world(), autocast=None, context=context))


def _load_sharded(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    blueprint, ranks = meta_model(folder), world()
    if not (expert_counts := experts_modules(blueprint)):
        load = cast(Any, AutoModelForCausalLM).from_pretrained
        local = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
        loaded, info = load(folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **local)
        check_loaded(folder, blueprint, info)
        return loaded.to(device)  # type: ignore[no-any-return]
    check_weights(folder, blueprint)
    ep = teacher_ep(expert_counts.values(), ranks)
    distributed = DistributedConfig(fsdp_size=ranks, ep_size=ep, ep_implementation="carpool") if ranks > 1 else None
    dense = "zero1" if ranks > 1 else None
    model = build_model(folder, distributed_config=distributed, dtype=dtype, seed=0, dense=dense, device=device)
    install(model)
    if ranks > 1:
        replicate_dense(model.requires_grad_(False), bfloat16=False)
    # Without a number of tokens it allocates no buffers that could be too small.
    set_transport(model, "auto")
    return model


def write_logits(config: Config, *, teacher: str) -> None:
    """Run `carpool teach` on a rank: write its share of the rows that `distillation.logits` lacks.

    Raises:
        ValueError: the teacher or the data cannot be used, or existing rows are of other data or another teacher."""
    disable_progress_bar()
    settings, tokenizer, device = config.distillation, tokenizer_of(config), rank_device()
    folder, top_k = Path(str(settings.logits)), settings.top_k or TOP_K
    sequences = train_sequences(read_corpora(config, tokenizer), config.data)
    check_teacher(Path(teacher), tokenizer, sequences, None)
    folder.mkdir(parents=True, exist_ok=True)
    missing, top_1_ids = from_rank_0(lambda: _progress(settings, sequences))
    model = open_teacher(Path(teacher), config.training.computes_in_bf16(device.type == "cuda"), device)
    if top_k > (vocab_size := len(model.head.weight)):
        raise ValueError(f"distillation.top_k = {top_k}, but the vocabulary of {teacher} has {vocab_size} tokens")
    unwritten, batch_size, began = list[Row](), config.training.eval_batch_size, time.monotonic()

    def compute_rows(batch_numbers: list[int]) -> list[Row]:
        """Returns this rank's rows of these sequences. Collective."""
        numbers = batch_numbers[rank() :: world()]
        rows = [sequences[number] for number in numbers]
        length = sequences.batch_length(np.array(batch_numbers))
        on_host = make_batch(sequences, rows, batch_size, tokenizer.eos_id, length)
        batch = {name: tensor.to(device) for name, tensor in on_host.items()}
        ids_BLK, log_p_BLK = (x.cpu().numpy() for x in _top_k_log_probs(model, batch, top_k, settings.temperature))
        results = zip(numbers, rows, ids_BLK, log_p_BLK, strict=False)
        return [(n, row.ids.astype(np.int32), ids[: len(row.ids)], log[: len(row.ids)]) for n, row, ids, log in results]

    for number, top_1_L in top_1_ids.items():
        mismatch = [float((row[2][:-1, 0] != top_1_L).mean()) for row in compute_rows([number])]  # on rank 0
        if gather(mismatch)[0][0] > _MAX_TOP_1_MISMATCH:
            raise ValueError(
                f"another teacher than {teacher} wrote the rows in {folder}, or they are no probabilities of a model: "
                f"in sequence {number} other tokens are likeliest; name the teacher that wrote them, or an empty folder"
            )
    for start in range(0, len(missing), batch_size * world()):
        batch_numbers = missing[start : start + batch_size * world()]
        unwritten += compute_rows(batch_numbers)
        if unwritten and (batch_numbers[-1] == missing[-1] or sum(row[2].nbytes for row in unwritten) > _FILE_BYTES):
            write_rows(folder, unwritten, settings.temperature)
            unwritten = []
    gather(None)
    if rank() == 0:
        seconds, count = time.monotonic() - began, f"{len(missing):,} of {len(sequences):,}"
        print(f"{folder}: wrote {count} sequences in {seconds:.0f} s, with {top_k} log-probabilities per token")


def _progress(settings: DistillationSection, sequences: Sequences) -> tuple[list[int], dict[int, NDArray[np.int32]]]:
    """Returns the sequences without a row, and the top-1 ids (L - 1,) of the first sequence that has a row."""
    files = TeacherLogits(settings.model_copy(update={"top_k": settings.top_k or TOP_K}))
    without_row = set(missing := files.check(sequences))
    first = [number for number in range(len(sequences)) if number not in without_row][:1]
    rows = ((number, *files[number]) for number in first)
    return missing, {number: np.take_along_axis(ids, log.argmax(1)[:, None], 1)[:, 0] for number, ids, log in rows}


def _top_k_log_probs(model: Teacher, batch: Batch, top_k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids of the K most likely next tokens, int32, and their log-probabilities, float32, each (B, L, K)."""
    hidden_TH, shape = model.hidden_states(batch), (*batch["input_ids"].shape, top_k)
    size = chunk_size(len(hidden_TH), len(model.head.weight), CHUNK_LOGITS)
    log_probs_of = model.log_probs(hidden_TH, top_k, temperature)
    chunks = [log_probs_of(slice(start, start + size)) for start in range(0, len(hidden_TH), size)]
    ids_TK = torch.cat([chunk.ids_CK for chunk in chunks if chunk.ids_CK is not None])
    return ids_TK.to(torch.int32).view(shape), torch.cat([chunk.log_p_CK for chunk in chunks]).float().view(shape)
