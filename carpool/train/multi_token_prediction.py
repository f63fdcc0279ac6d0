"""The section [mtp]: layers that predict further tokens are trained beside the model (`carpool.hf.multi_token`)."""

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
        Excludes("parallelism.tp_size", "layers that predict further tokens are not divided"),
        Excludes("parallelism.etp_size", "layers that predict further tokens are not read in slices"),
        Excludes("distillation.teacher or distillation.logits", "a teacher says nothing of further tokens"),
        Excludes("adapter.kind", "under an adapter they are left out", instead={"adapter.kind": None}),
        Excludes(
            "memory.experts!=device", "an evaluation passes their experts by", instead={"memory.experts": "device"}
        ),
        Excludes(
            "training.loss_chunk_size=0", "their logits are made in pieces", instead={"training.loss_chunk_size": None}
        ),
    ] = Field(default=0, ge=0)
    """Layers behind the last one, each of which predicts one token further ahead (DeepSeek-V3, GLM-4.5). Those that
    the checkpoint has are trained on, others begin at random. They are saved and exported under the names that
    Transformers and vLLM read, for drafts in speculative decoding. 0: there are none, and those of a checkpoint are
    left out."""
    loss_weight: Annotated[float, Needs("mtp.depth")] = Field(default=0.3, gt=0)
    """Weight of the mean of their losses beside the model's. DeepSeek-V3 takes 0.3, and 0.1 at the end."""


class MultiTokenPrediction(Extension):
    name, section, architecture, changes_checkpoints = "mtp", MultiTokenSection, ("depth",), True
    help = "Further layers predict further tokens (multi-token prediction). Off by default."

    def check_plan(self, plan: Plan) -> None:
        from carpool.hf.loss_head import why_whole

        if why := why_whole(plan.blueprint.model):
            raise ValueError(f"mtp.depth: {why}, so further layers have no loss by it: leave mtp.depth out")
        if (depth := self.settings.depth) > (most := plan.sequence_length - 2):
            raise ValueError(f"mtp.depth = {depth}, but data.sequence_length allows {most}: no token is so far ahead")

    def device_bytes(self, estimate: MemoryEstimate) -> int:
        # The forward that is measured does not call these layers. Each makes a gradient of the output layer's weight.
        depth, saves = self.settings.depth, estimate.config.memory.policies["layer_activations"] == "save"
        layer = estimate.kept.layers[-1 - depth] if saves else estimate.kept.layer_input
        states = 8 * estimate.tokens * estimate.hidden * estimate.computed
        return depth * (layer + states + 4 * estimate.words * estimate.hidden)

    def prepare_run(self, plan: Plan, built: Built) -> None:
        built.objective.predict_further(self.settings.loss_weight)
