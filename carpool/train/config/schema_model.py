"""The section [model]: which transformers MoE model, and the demo's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from carpool.train.config.published import check_checkpoint, is_configuration_alone, read_keys
from carpool.train.config.schema_base import Section

DEMO_MODEL: dict[str, Any] = {
    "model_type": "olmoe",
    "config": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        # So narrow a model starts from larger weights than transformers' 0.02.
        "initializer_range": 0.06,
        "router_aux_loss_coef": 0.1,
        # One table for both ends: with few steps, each byte is learned from twice as much.
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    },
}


class ModelSection(Section):
    """Which model: `path`, or `config` as published, or `architecture` / `model_type` with keys in `config`.

    Once read, `config` holds all keys, and `model_type` is set: a run's settings need no other file.
    """

    path: str | None = Field(default=None, min_length=1)
    """Folder of a checkpoint in transformers' format, which from_pretrained loads. A folder with a config.json and
    no weights, or none: a model from scratch."""
    architecture: str | None = None
    """For a model from scratch: the class of transformers, such as OlmoeForCausalLM."""
    model_type: str | None = None
    """Instead of architecture: transformers' model_type, such as olmoe."""
    config: dict[str, Any] = Field(default_factory=dict)
    """For a model from scratch: a published config.json (its path, or a short name such as qwen3-30b-a3b), or keys
    of one as a table, which names what it changes under "from". vocab_size is the tokenizer's unless given."""
    num_experts_per_tok: int | None = Field(default=None, gt=0)
    """For a model from scratch: experts that each token visits (top-k). none: as the configuration says."""
    attn_implementation: str | None = None
    """Attention of transformers: sdpa, eager, flash_attention_2 and others. none: transformers chooses, but
    flex_attention on GPUs for models that cannot take sdpa, such as gpt-oss, and for packed examples attention that
    takes the ends of documents in place of a mask (carpool_documents)."""
    experts_implementation: str | None = None
    """Experts of transformers: eager, batched_mm, grouped_mm. none: transformers chooses."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype in which parameters are stored and updated; training.bf16 says in which they compute. none: float32."""

    @model_validator(mode="before")
    @classmethod
    def _read_config(cls, data: Any) -> Any:
        config = data.get("config") if isinstance(data, dict) else None
        if not isinstance(config, (str, dict)):
            return data
        keys = read_keys(config)
        model_type = keys.pop("model_type", None)
        if model_type is None:
            return {**data, "config": keys}
        if (data.get("model_type") or model_type) != model_type:
            raise ValueError(
                f"model.model_type = {data['model_type']!r} contradicts model.config, whose model_type is "
                f"{model_type!r}: leave model.model_type out"
            )
        return {**data, "config": keys, "model_type": model_type}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("path", "architecture", "model_type") if getattr(self, name) is not None]
        if not given:
            raise ValueError(
                "model needs a path (a checkpoint's folder), a published configuration (model.config = "
                '"qwen3-30b-a3b", or a config.json that says its model_type), or an architecture or model_type'
            )
        if len(given) > 1:
            raise ValueError(f"model.{' and model.'.join(given)} contradict each other: give only one of them")
        return self

    @property
    def weights(self) -> Path | None:
        """The checkpoint that the model starts from; None: random weights."""
        return None if self.path is None or is_configuration_alone(Path(self.path)) else Path(self.path)

    @property
    def bare_folder(self) -> str | None:
        """A folder with a configuration and without weights, if that is named."""
        return self.path if self.from_scratch else None

    @property
    def from_scratch(self) -> bool:
        """Whether the model starts from random weights."""
        return self.weights is None

    @property
    def keys(self) -> dict[str, Any]:
        """Of its configuration: those of the folder, or of `config`."""
        return self.config if self.path is None else read_keys(self.path)

    @property
    def stored_dtype(self) -> str:
        """In which parameters are stored."""
        return self.dtype or "float32"

    def check_path(self) -> None:
        """Raise ValueError if there is no model in the folder that is named."""
        if self.path is None:
            return
        check_checkpoint("model.path", self.path)
        read_keys(self.path)  # is it whole?
