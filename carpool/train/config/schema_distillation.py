"""The section [distillation]: a model learns from the probabilities of a larger one."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from carpool.train.config.declarations import Excludes, Needs
from carpool.train.config.schema_base import Section

_USED = Needs("distillation.teacher or distillation.logits")
_NOT_WITH = (
    Excludes("parallelism.pp_size", "a pipeline's last stage computes the loss without a teacher"),
    Excludes("parallelism.tp_size", "tensor-parallel ranks shard the output layer, and a chunk needs whole logits"),
    Excludes("training.loss_chunk_size=0", "the loss is computed in chunks of tokens, never from whole logits"),
)


class DistillationSection(Section):
    """Learning from a teacher's probabilities. Off by default."""

    needs: ClassVar = _USED

    teacher: Annotated[
        str | None,
        _USED,
        *_NOT_WITH,
        Excludes("distillation.logits", "a run has one teacher, either online or from files"),
        Excludes("moe.schedule=two-batch", "the teacher computes between its halves", own="distillation.teacher"),
        Excludes("parallelism.plan or memory.plan", "a plan does not predict the teacher's time"),
    ] = None
    """Checkpoint folder of Transformers with the model's vocabulary. The teacher computes each batch before the model
    does, on the same ranks. Its experts are sharded over these ranks, and its other parameters are replicated. The loss
    covers the teacher's whole vocabulary unless top_k is set."""
    logits: Annotated[
        str | None,
        _USED,
        *_NOT_WITH,
        Excludes("data.streaming", "rows of logits name sequences by number, and streamed sequences have none"),
    ] = None
    """Folder of Parquet files with a teacher's top-k log-probabilities for each token of the same data. `carpool teach`
    or any script writes them."""
    top_k: int | None = Field(default=None, gt=0)
    """How many of the most likely next tokens the loss takes from the teacher. It merges all other tokens into one.
    none: the whole vocabulary of a teacher, or as many as files have; `carpool teach` then writes 64."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of both models. Files record the temperature of their probabilities, and it must be equal."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """The loss is (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || model)."""

    @property
    def is_used(self) -> bool:
        """Whether a teacher is configured."""
        return self.teacher is not None or self.logits is not None
