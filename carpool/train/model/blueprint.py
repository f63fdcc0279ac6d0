"""A model before it is built: its shapes and names, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from carpool.hf.building.narrow import row_size
from carpool.train.config.schema import Config
from carpool.train.data.tokenizer import Tokenizer
from carpool.train.model.flops import ModelSize, model_size
from carpool.train.model.source import expert_counts, meta_model, model_source, top_k_of


@dataclass(frozen=True)
class Blueprint:
    """The model of a run without values.

    Attributes:
        source: what is built: a checkpoint folder, or a configuration for a model from scratch.
        model: on the meta device.
        expert_counts: E of each experts module, by name.
        top_k: K.
        size: its parameters.
    """

    source: PreTrainedConfig | Path
    model: PreTrainedModel
    expert_counts: dict[str, int]
    top_k: int
    size: ModelSize

    @classmethod
    def of(cls, source: PreTrainedConfig | Path) -> Blueprint:
        """Raises ValueError for a model without experts, or one whose configuration does not go together."""
        model = meta_model(source)
        counts, top_k = expert_counts(model), top_k_of(model)
        return cls(source, model, counts, top_k, model_size(model, counts, top_k))

    @classmethod
    def of_config(cls, config: Config, tokenizer: Tokenizer) -> Blueprint:
        """Raises ValueError as `model_source` and `of`."""
        return cls.of(model_source(config, tokenizer))

    @property
    def architecture(self) -> str:
        """The class of Transformers, as it is called before FSDP renames it."""
        return type(self.model).__name__

    def balance_loss(self, weight: float | None) -> tuple[float, str]:
        """The weight of the balance loss, and what says so. A checkpoint is fine-tuned as Transformers' Trainer and TRL
        do: without such a loss, unless its configuration has `output_router_logits`. A model from scratch needs one.

        Args:
            weight: `moe.router_aux_loss_coef`; None: nothing was said."""
        if weight is not None:
            return weight, "moe.router_aux_loss_coef"
        config = self.model.config
        own = getattr(config, "router_aux_loss_coef", None) or 0.0
        if own and isinstance(self.source, Path) and not getattr(config, "output_router_logits", False):
            return 0.0, "the checkpoint's output_router_logits is false; moe.router_aux_loss_coef sets a weight"
        return own, "the model's own router_aux_loss_coef" if own else "the model's configuration has no weight for one"

    def describe_balance_loss(self, weight: float | None) -> str:
        weight, why = self.balance_loss(weight)
        return f"balance loss: {f'weight {weight:g}' if weight else 'none'} ({why})"

    @property
    def row_size(self) -> int:
        """Elements of a row that travels."""
        return row_size(self.model.config)

    def why_long(self, tokens: int) -> str | None:
        """What is odd about sequences of so many tokens, in words; None: nothing. Longer ones than a model was made for
        may be meant, and compute."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(most, int) or not 0 < most < tokens:
            return None
        return (
            f"sequences of {tokens:,} tokens (data.sequence_length) are longer than the {most:,} that the model is "
            "made for (its max_position_embeddings)"
        )

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)
