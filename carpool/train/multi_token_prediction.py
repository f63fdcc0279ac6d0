"""The section [mtp]: multi-token prediction layers are trained together with the model (`carpool.hf.multi_token`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from carpool.train.config.declarations import Excludes, Needs
from carpool.train.config.schema_base import Section
from carpool.train.extensions import Extension

if TYPE_CHECKING:
    from carpool.train.build.assemble import Built
    from carpool.train.plan.estimate import MemoryEstimate
    from carpool.train.plan.resolve import Plan


class MultiTokenSection(Section):
    """Multi-token prediction."""

    depth: Annotated[
        int,
        Excludes("parallelism.tp_size", "tensor parallelism does not shard multi-token prediction layers"),
        Excludes("parallelism.etp_size", "multi-token prediction layers are not read in slices"),
        Excludes("distillation.teacher or distillation.logits", "a teacher gives no probabilities for MTP layers"),
        Excludes("adapter.kind", "an adapter leaves MTP layers out", instead={"adapter.kind": None}),
        Excludes("memory.experts!=device", "an evaluation skips their experts", instead={"memory.experts": "device"}),
        Excludes("training.loss_chunk_size=0", "MTP losses need chunks", instead={"training.loss_chunk_size": None}),
    ] = Field(default=0, ge=0)
    """Number of multi-token prediction (MTP) layers after the last layer; layer k predicts the token k + 1 positions
    ahead (DeepSeek-V3, GLM-4.5). Layers of the checkpoint are trained further, and missing ones are initialised at
    random. They are saved and exported under the names that Transformers and vLLM read, for drafts in speculative
    decoding. 0: the model has none, and those of a checkpoint are left out."""
    loss_weight: Annotated[float, Needs("mtp.depth")] = Field(default=0.3, gt=0)
    """Weight of the mean loss of the MTP layers. DeepSeek-V3 uses 0.3, and 0.1 at the end of its training."""


class MultiTokenPrediction(Extension):
    name, section, architecture, changes_checkpoints = "mtp", MultiTokenSection, ("depth",), True
    help = "Additional layers predict tokens further ahead (multi-token prediction, MTP). Off by default."

    def check_plan(self, plan: Plan) -> None:
        from carpool.hf.loss_head import why_whole

        if why := why_whole(plan.blueprint.model):
            raise ValueError(f"mtp.depth: {why}, so MTP layers cannot use it for their loss: leave mtp.depth out")
        if (depth := self.settings.depth) > (most := plan.sequence_length - 2):
            raise ValueError(f"mtp.depth = {depth}, but data.sequence_length allows {most} at most")

    def device_bytes(self, estimate: MemoryEstimate) -> int:
        # The measured forward does not call MTP layers. Each computes a gradient of the output layer's weight.
        depth, saves = self.settings.depth, estimate.config.memory.policies["layer_activations"] == "save"
        layer = estimate.kept.layers[-1 - depth] if saves else estimate.kept.layer_input
        states = 8 * estimate.tokens * estimate.hidden * estimate.computed
        return depth * (layer + states + 4 * estimate.vocabulary * estimate.hidden)

    def prepare_run(self, plan: Plan, built: Built) -> None:
        built.objective.train_mtp(self.settings.loss_weight)
