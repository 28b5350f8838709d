# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Values of turns and tokens: a critic on the resident base, with LoRAs of its own and heads beside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from ..agents import AgentSpec
from ..forward import hidden_states
from .adapters import Policies


# No agent can have this name: it does not begin with a letter.
CRITIC_NAME = "_critic"
HEADS_NAME = "value_heads.safetensors"

# Hidden layers of the frozen critic, as in the original MARFT (`action_level_critic.py`).
_MLP_WIDTHS = (1024, 512)


class Critic:
    """
    Predicts the return that is still to come, before a turn (`level="action"`) or before each of its tokens.

    Args:
        policies ([`Policies`]):
            The team's policies; they switch the adapters of the critic too.
        model ([`~peft.PeftModel`]):
            The base with its adapters.
        kind (`str`):
            `"shared"`: one LoRA, one head. `"per_agent"`: a LoRA and a head for each agent. `"multi_head"`: one LoRA,
            a head for each agent. `"frozen"`: an MLP on the last hidden state of the base, without an adapter.
        level (`str`):
            `"action"` or `"token"`.
        agents (`Sequence[AgentSpec]`):
            The team.
        peft_config ([`~peft.PeftConfig`]):
            Config of the critic's LoRAs.
        autocast (`Callable`):
            Context of mixed precision.
    """

    def __init__(
        self,
        policies: Policies,
        model: PeftModel,
        kind: str,
        level: str,
        agents: Sequence[AgentSpec],
        peft_config: PeftConfig,
        autocast: Callable[[], AbstractContextManager],
    ):
        self.kind, self.level = kind, level
        self._policies, self._model, self._autocast = policies, model, autocast
        self._agents = [agent.name for agent in agents]
        if kind == "per_agent":
            self.parts = [f"{CRITIC_NAME}-{name}" for name in self._agents]
        else:
            self.parts = [CRITIC_NAME]
        if kind != "frozen":
            for part in self.parts:
                policies.add_critic(part, peft_config)
        width = model.config.get_text_config().hidden_size
        outputs = len(agents) if kind == "multi_head" else 1
        device = next(model.parameters()).device
        self.heads = nn.ModuleDict({part: _head(kind, width, outputs) for part in self.parts}).to(device)

    def part_of(self, agent: str) -> str:
        """Name of the part, and of its adapter, that values the turns of an agent."""
        return f"{CRITIC_NAME}-{agent}" if self.kind == "per_agent" else CRITIC_NAME

    def parameters(self, part: str) -> dict[str, nn.Parameter]:
        """Everything that is trained of a part: its adapter and its head."""
        heads = {f"{part}.{name}": parameter for name, parameter in self.heads[part].named_parameters()}
        return heads if self.kind == "frozen" else {**self._policies.parameters(part), **heads}

    def features(
        self, part: str, prompts: Sequence[list[int]], completions: Sequence[list[int]], share: bool = True
    ) -> torch.Tensor:
        """
        What the head of a part sees.

        Args:
            part (`str`): whose adapter acts. With gradient checkpointing it has to stay active until backward has run.
            prompts, completions (`Sequence[list[int]]`): token ids of `B` rows.
            share (`bool`, *optional*, defaults to `True`): compute what prompts have in common once.

        Returns: hidden states `(B, V, H)`, `V` being 1 at action level; at token level that of the longest completion
        and at least 1.
        """
        if self.level == "action":
            completions = [[] for _ in prompts]
        if self.kind == "frozen":
            with torch.no_grad(), self._policies.base(), self._autocast():
                return hidden_states(self._backbone, prompts, completions, share)
        self._policies.activate_adapter(part)
        with self._autocast():
            return hidden_states(self._backbone, prompts, completions, share)

    def values(self, part: str, features: torch.Tensor, agents: Sequence[str]) -> torch.Tensor:
        """
        Args:
            part (`str`): which head.
            features (`torch.Tensor` of shape `(B, V, H)`): from [`~Critic.features`].
            agents (`Sequence[str]`): whose turns the `B` rows are.

        Returns: values `(B, V)`.
        """
        with torch.autocast(features.device.type, enabled=False):
            values = self.heads[part](features.float())
        if self.kind != "multi_head":
            return values.squeeze(-1)
        index = torch.tensor([self._agents.index(agent) for agent in agents], device=values.device)
        return values.gather(-1, index[:, None, None].expand(-1, values.size(1), 1)).squeeze(-1)

    def save(self, folder: str | Path) -> None:
        """Write the value heads beside the critic's adapter. PEFT writes the adapters."""
        path = Path(folder) / CRITIC_NAME
        path.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.heads.state_dict().items()}, path / HEADS_NAME)

    def load(self, folder: str | Path) -> None:
        """
        Load the value heads that [`~Critic.save`] wrote, in place.

        Raises:
            ValueError: there are none, or those of another critic.
        """
        path = Path(folder) / CRITIC_NAME / HEADS_NAME
        if not path.is_file():
            raise ValueError(
                f"{folder} has no critic ({path.name} is missing), but the config has `critic={self.kind!r}`. Resume "
                "with the settings that the checkpoint was written with."
            )
        saved, present = load_file(path), self.heads.state_dict()
        if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in present.items()}:
            raise ValueError(
                f"The critic in {folder} has other value heads ({sorted(saved)[:3]}, ...) than `critic={self.kind!r}` "
                f"of this team ({sorted(present)[:3]}, ...). Resume with the settings of the checkpoint."
            )
        self.heads.load_state_dict(saved)

    @property
    def _backbone(self) -> nn.Module:
        return self._model.get_base_model().base_model


def _head(kind: str, width: int, outputs: int) -> nn.Module:
    if kind != "frozen":
        head = nn.Linear(width, outputs)
        nn.init.normal_(head.weight, std=0.1 / width**0.5)  # hidden states are normalized: values start near 0
        nn.init.zeros_(head.bias)
        return head
    layers: list[nn.Module] = []
    for wide in _MLP_WIDTHS:
        layers += [nn.Linear(width, wide, bias=False), nn.ReLU()]
        width = wide
    return nn.Sequential(*layers, nn.Linear(width, 1, bias=False))
