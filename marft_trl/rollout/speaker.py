# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A model that speaks: what a base model needs to take the turns of agents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import is_conversational
from trl.data_utils import prepare_multimodal_messages

from ..agents import AgentSpec
from ..config.team_setup import Sampling
from ..prompts.builder import PromptBuilder, is_plain, is_single_agent, make_window, warn_of_unprotected
from ..prompts.chat_template import ChatTemplate
from ..prompts.tool_calls import prepare_tools
from ..prompts.views import View, team_view
from ..seams.vision import ImageProcessor
from ..workflows import Workflow
from .generator import Generator
from .turn_reader import TurnReader


@dataclass(frozen=True, eq=False)
class Speaker:
    """A base model with what it needs to take turns. Its adapters belong to agents."""

    prompts: PromptBuilder
    generator: Generator
    reader: TurnReader
    vocabulary: int  # number of tokens that the model has


@dataclass(frozen=True)
class PromptSettings:
    """How agents are shown messages."""

    tokenize: Callable[..., list[list[int]]] | None = None  # TRL's, instead of that of [`make_tokenize`]
    chat_template: str | None = None  # instead of the tokenizer's
    images: ImageProcessor | None = None  # of a vision-language model
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    view: View = team_view  # of agents without their own
    aliases: Mapping[str, str] = field(default_factory=dict)  # names under which agents see each other
    context_overflow: str = "raise"
    show_reasoning: bool = False


def find_template(
    agents: Sequence[AgentSpec], workflow: Workflow, tokenizer: PreTrainedTokenizerBase
) -> tuple[bool, str | None]:
    """Whether the team uses tools, and the template that is prepared for them, if it is not the tokenizer's."""
    uses_tools = workflow.uses_tools or any(agent.tools for agent in agents)
    return uses_tools, prepare_tools(tokenizer, agents, workflow) if uses_tools else None


def make_tokenize(template: ChatTemplate) -> Callable[..., list[list[int]]]:
    """Tokenization of prompts like `GRPOTrainer._tokenize_prompts` (TRL 1.16), without a trainer."""
    tokenizer = template.tokenizer if template.images is None else template.images.processor

    def tokenize(prompts: list, functions: Sequence[Callable] = ()) -> list[list[int]]:
        if not is_conversational({"prompt": prompts[0]}):
            return tokenizer(text=prompts)["input_ids"]
        return tokenizer.apply_chat_template(
            conversation=prompts if template.images is None else list(map(prepare_multimodal_messages, prompts)),
            tools=list(functions) or None,
            chat_template=template.source,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **template.options,
        )["input_ids"]

    return tokenize


def find_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a turn, as `GRPOTrainer` (TRL 1.16) finds them: of the tokenizer and the generation config."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return [*dict.fromkeys([tokenizer.eos_token_id, *ends])]


def make_speaker(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generator: Generator,
    agents: Sequence[AgentSpec],
    workflow: Workflow,
    samplings: Mapping[str, Sampling],
    settings: PromptSettings,
    end_token_ids: Sequence[int],
    without_model: Collection[str] = (),
    max_model_len: int | None = None,
    own: Collection[str] = (),
) -> Speaker:
    """
    Make a speaker. Observations of agents `without_model` have no limit, and servers accept `max_model_len` tokens.
    `own` are the agents that act with this model.
    """
    uses_tools = workflow.uses_tools or any(agent.tools for agent in agents if agent.name in own)
    template = ChatTemplate(tokenizer, settings.chat_template, settings.chat_template_kwargs, settings.images)
    prompts = PromptBuilder(
        template,
        tokenize=settings.tokenize or make_tokenize(template),
        agents=agents,
        view=settings.view,
        keeps_text_prompts=is_plain(agents, uses_tools),
        window=make_window(model, samplings, settings.context_overflow, without_model, max_model_len),
        end_token_ids=end_token_ids,
        aliases=settings.aliases,
        is_single_agent=is_single_agent(agents, workflow),
        show_reasoning=settings.show_reasoning,
    )
    warn_of_unprotected(prompts, uses_tools)
    reader = TurnReader(tokenizer, end_token_ids, template, uses_tools, is_lone=len(agents) == 1)
    return Speaker(prompts, generator, reader, model.get_input_embeddings().weight.size(0))
