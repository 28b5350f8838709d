# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Values of turns and tokens: a critic on the resident base model, with separate LoRAs and value heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, cast

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from ..adapters.lora import load_adapter_weights
from ..adapters.policies import Policies
from ..agents import AgentSpec
from ..shared_prefix.forward import hidden_states
from .rows import Level


# No agent can have this name: it does not begin with a letter.
CRITIC_NAME = "_critic"
HEADS_NAME = "value_heads.safetensors"

# Hidden layers of the frozen critic, as in the original MARFT (`action_level_critic.py`).
_MLP_WIDTHS = (1024, 512)


class Critic:
    """
    Predicts the return that is still to come, before a turn (action level) or before each of its tokens (token level).
    This class is the critic `"shared"`: one LoRA, one value head, on each base of the team. Subclasses change the
    parts, the heads or the features. To add a critic, write a subclass and give it a name in `CRITICS`. `parts` are
    the names of the parts and of their adapters, `heads` the value head of each part. `peft_configs` are the configs
    of the LoRAs, by agent.
    """

    name = "shared"
    has_adapters = True
    # Features are last hidden states of the bare base, as of a reference's pass, and computed once
    reads_reference_pass = False
    settings: ClassVar[frozenset[str]] = frozenset()  # that have an effect with this critic alone

    def __init__(
        self,
        policies: Policies,
        level: Level,
        agents: Sequence[AgentSpec],
        peft_configs: Mapping[str, PeftConfig],
        autocast: Callable[[], AbstractContextManager],
    ):
        self._policies, self._autocast, self._level = policies, autocast, level
        self._agents = [agent.name for agent in agents]
        owners = {self.get_part(name): name for name in reversed(self._agents)}  # the first agent of each part
        self.parts = list(dict.fromkeys(self.get_part(name) for name in self._agents))
        self._models = {part: cast(PeftModel, policies.get_model(owners[part])) for part in self.parts}
        if self.has_adapters:
            for part, model in self._models.items():
                policies.add_critic(part, peft_configs[owners[part]], model)
        self.heads = nn.ModuleDict()
        for part, model in self._models.items():
            head = self.make_head(model.config.get_text_config().hidden_size)
            self.heads[part] = head.to(next(model.parameters()).device)

    def get_part(self, agent: str) -> str:
        """Name of the part, and of its adapter, that values the turns of an agent."""
        owner = self._policies.base_owners.get(agent)
        return CRITIC_NAME if owner is None else f"{CRITIC_NAME}-{owner}"

    def make_head(self, width: int) -> nn.Module:
        """A value head for hidden states of this width; it gives one value, or one for each agent."""
        return _linear(width, 1)

    def parameters(self, part: str) -> dict[str, nn.Parameter]:
        """Everything that is trained of a part: its adapter and its head."""
        heads = {f"{part}.{name}": parameter for name, parameter in self.heads[part].named_parameters()}
        return {**self._policies.parameters(part), **heads} if self.has_adapters else heads

    def zero_grad(self) -> None:
        self.heads.zero_grad(set_to_none=True)

    def num_values(self, num_tokens: int) -> int:
        return self._level.num_values(num_tokens)

    def features(
        self,
        part: str,
        prompts: Sequence[list[int]],
        completions: Sequence[list[int]],
        share: bool = True,
        images: Callable[[torch.Tensor, Sequence[int]], dict[str, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """
        Compute the hidden states `(B, V, H)` that the head of a part reads. `V` is 1 at action level; at token level,
        it is the length of the longest completion and at least 1. With gradient checkpointing, the adapter of the part
        has to stay active until backward has run. `images` is that of [`hidden_states`].
        """
        self._policies.activate_adapter(part)
        return self._states(part, prompts, completions, share, images)

    def values(self, part: str, features: torch.Tensor, agents: Sequence[str]) -> torch.Tensor:
        """Compute values `(B, V)` from [`~Critic.features`] `(B, V, H)`, for the agents of the `B` rows."""
        with torch.autocast(features.device.type, enabled=False):
            head = self.heads[part]
            # If the base is spread over devices, its last layer has another one
            device = next(head.parameters()).device
            return self.select_values(head(features.to(device).float()), agents)

    def select_values(self, outputs: torch.Tensor, agents: Sequence[str]) -> torch.Tensor:
        """Values `(B, V)` from the outputs `(B, V, O)` of a head."""
        return outputs.squeeze(-1)

    def save(self, folder: str | Path) -> None:
        """Save the value heads next to the critic's adapter. PEFT saves the adapters."""
        path = Path(folder) / CRITIC_NAME
        path.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.heads.state_dict().items()}, path / HEADS_NAME)

    def load(self, folder: str | Path) -> None:
        """Load adapters and value heads, in place. Raises `ValueError` if heads are missing or of another critic."""
        path = Path(folder) / CRITIC_NAME / HEADS_NAME
        if not path.is_file():
            raise ValueError(
                f"{folder} has no critic ({path.name} is missing), but the config has `critic={self.name!r}`. Resume "
                "with the settings of the checkpoint."
            )
        saved, present = load_file(path), self.heads.state_dict()
        if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in present.items()}:
            raise ValueError(
                f"The value heads of the critic in {folder} ({sorted(saved)[:3]}, ...) do not match those of "
                f"`critic={self.name!r}` ({sorted(present)[:3]}, ...). Resume with the settings of the checkpoint."
            )
        self.heads.load_state_dict(saved)
        if self.has_adapters:
            for part in self.parts:
                load_adapter_weights(self._models[part], part, Path(folder) / part)
        self._policies.restore_requires_grad()

    def _states(self, part, prompts, completions, share, images) -> torch.Tensor:
        completions = completions if self._level.reads_completions else [[] for _ in completions]
        with self._autocast():
            return hidden_states(self._models[part].get_base_model().base_model, prompts, completions, share, images)


class PerAgentCritic(Critic):
    """A LoRA and a value head for each agent."""

    name = "per_agent"

    def get_part(self, agent: str) -> str:
        return f"{CRITIC_NAME}-{agent}"


class MultiHeadCritic(Critic):
    """One LoRA, and a value head for each agent."""

    name = "multi_head"

    def make_head(self, width: int) -> nn.Module:
        return _linear(width, len(self._agents))

    def select_values(self, outputs: torch.Tensor, agents: Sequence[str]) -> torch.Tensor:
        index = torch.tensor([self._agents.index(agent) for agent in agents], device=outputs.device)
        return outputs.gather(-1, index[:, None, None].expand(-1, outputs.size(1), 1)).squeeze(-1)


class FrozenCritic(Critic):
    """An MLP on the last hidden state of the base, without an adapter, as in the original MARFT."""

    name = "frozen"
    has_adapters = False
    reads_reference_pass = True

    def make_head(self, width: int) -> nn.Module:
        layers: list[nn.Module] = []
        for wide in _MLP_WIDTHS:
            layers += [nn.Linear(width, wide, bias=False), nn.ReLU()]
            width = wide
        return nn.Sequential(*layers, nn.Linear(width, 1, bias=False))

    def features(self, part, prompts, completions, share=True, images=None):
        with torch.no_grad(), self._policies.base(self._models[part]):
            return self._states(part, prompts, completions, share, images)


def _linear(width: int, outputs: int) -> nn.Linear:
    head = nn.Linear(width, outputs)
    nn.init.normal_(head.weight, std=0.1 / width**0.5)  # hidden states are normalized: values start near 0
    nn.init.zeros_(head.bias)
    return head


CRITICS: dict[str, type[Critic]] = {
    kind.name: kind for kind in (Critic, PerAgentCritic, MultiHeadCritic, FrozenCritic)
}
