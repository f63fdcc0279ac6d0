"""The section [distillation]: learning from what a larger model thinks of the data."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from carpool.train.config.declarations import Excludes, Needs
from carpool.train.config.schema_base import Section

_USED = Needs("distillation.teacher or distillation.logits")
_NEITHER = (
    Excludes("parallelism.pp_size", "the loss of a pipeline's last stage has no teacher"),
    Excludes("parallelism.tp_size", "tensor-parallel ranks divide the output layer, whose pieces need whole rows"),
    Excludes("training.loss_chunk_size=0", "the loss of a teacher is computed in pieces, without whole logits"),
)


class DistillationSection(Section):
    """Learning from a teacher's probabilities. Off by default."""

    needs: ClassVar = _USED

    teacher: Annotated[
        str | None,
        _USED,
        *_NEITHER,
        Excludes("distillation.logits", "there is one teacher, which computes or has written files"),
        Excludes("moe.schedule=two-batch", "its forward would run between two halves", own="distillation.teacher"),
        Excludes("parallelism.plan or memory.plan", "a plan does not predict the teacher's time"),
    ] = None
    """Folder of a checkpoint of transformers with the vocabulary of the model: it computes each batch before the model
    does, on the same ranks, over which its experts are spread; its other parameters are whole on each. All of its
    words count, unless top_k says fewer."""
    logits: Annotated[
        str | None,
        _USED,
        *_NEITHER,
        Excludes("data.streaming", "logits are of numbered sequences, and a stream's have no numbers"),
    ] = None
    """Folder of Parquet files with a teacher's likeliest words of each token of the same data, as
    `carpool teach` or any script writes them."""
    top_k: int | None = Field(default=None, gt=0)
    """The likeliest words of each token that the teacher speaks of; the others are together one further word. none: all
    of a teacher, and as many as files have; 64 when `carpool teach` writes them."""
    temperature: float = Field(default=1.0, gt=0)
    """Logits of both are divided by it. Files are of one temperature, which they name."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """The loss is (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || model)."""

    @property
    def is_used(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None or self.logits is not None
