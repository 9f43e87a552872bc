# SPDX-License-Identifier: Apache-2.0
"""Which model file implements which architecture.

A row is data: the file is imported when the model is built, so reading a model's geometry needs no
torch. To add an architecture, write its config and model file and add its row here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from pelton.core.errors import CheckpointError
from pelton.core.geometry import ModelGeometry
from pelton.models.deepseek_v3_config import Config as DeepseekV3Config
from pelton.models.gpt_oss_config import Config as GptOssConfig
from pelton.models.llama_config import Config as LlamaConfig
from pelton.models.weight_table import Weight

if TYPE_CHECKING:
    from pelton.models.language_model import LanguageModel


class ArchitectureConfig(Protocol):
    """What every architecture's frozen `Config` offers besides its own sizes."""

    @property
    def dtype(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    def geometry(self, name: str = "") -> ModelGeometry: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    class_names: tuple[str, ...]
    """Values in `architectures` in config.json."""
    config_from_hf: Callable[[Mapping[str, Any]], ArchitectureConfig]
    module: str
    """Python module with the class `Model(config)` and the function `weights(config)`."""
    with_mtp: Callable[[Any], ArchitectureConfig] | None = None
    """Gives the config of the same model built with its MTP layer, whose geometry has that layer's
    KV too. Needed where a geometry has `num_mtp_layers`."""

    def build(self, config: ArchitectureConfig) -> "LanguageModel":
        """The model with its parameters unfilled, on torch's current default device and dtype."""
        model: LanguageModel = import_module(self.module).Model(config)
        return model

    def weights(self, config: ArchitectureConfig) -> Sequence[Weight]:
        """The weight table of a model of this config."""
        table: Sequence[Weight] = import_module(self.module).weights(config)
        return table


ARCHITECTURES = (
    Architecture(
        name="llama",
        model_types=("llama", "mistral", "qwen2"),
        class_names=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
        config_from_hf=LlamaConfig.from_hf,
        module="pelton.models.llama",
    ),
    Architecture(
        name="gpt_oss",
        model_types=("gpt_oss",),
        class_names=("GptOssForCausalLM",),
        config_from_hf=GptOssConfig.from_hf,
        module="pelton.models.gpt_oss",
    ),
    Architecture(
        name="deepseek_v3",
        model_types=("deepseek_v3",),
        class_names=("DeepseekV3ForCausalLM",),
        config_from_hf=DeepseekV3Config.from_hf,
        module="pelton.models.deepseek_v3",
        with_mtp=DeepseekV3Config.with_mtp,
    ),
)


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """The row for a config.json. Raises `CheckpointError` that lists what is supported."""
    class_names = config.get("architectures") or []
    model_type = config.get("model_type")
    for architecture in ARCHITECTURES:
        # A known model_type with an unknown class is another head (a classifier), not this model.
        if isinstance(class_names, list) and class_names:
            if any(name in architecture.class_names for name in class_names):
                return architecture
        elif model_type in architecture.model_types:
            return architecture
    found = ", ".join(map(str, class_names)) if isinstance(class_names, list) else ""
    supported = ", ".join(name for row in ARCHITECTURES for name in row.class_names)
    raise CheckpointError(
        f"The architecture {found or model_type or 'of this model (none named)'} is not "
        f"supported; supported are {supported}."
    )
