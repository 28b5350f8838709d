# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""What is found out about a team, its model and its tokenizer before their prompts are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..agents import AgentSpec
from ..config.team_setup import Sampling
from ..episodes.records import TOOL
from ..episodes.tools import tool_name
from ..seams.libraries import get_logger
from ..workflows import Sequential, Workflow
from .builder import PromptBuilder, Window
from .tool_calls import check_functions, prepare_template


logger = get_logger(__name__)


def prepare_tools(tokenizer: PreTrainedTokenizerBase, agents: Sequence[AgentSpec], workflow: Workflow) -> str | None:
    """
    Prepare the tokenizer for the tools of the team.

    Returns: chat template to use instead of the tokenizer's, or `None` if the tokenizer's can be trained with.

    Raises:
        ValueError: no schema can be made of a tool, an agent has the name that tool results are shown under, or
            the chat template does not support tools.
    """
    check_functions(workflow.functions, f"the workflow `{type(workflow).__name__}`")
    workflow_names = {tool_name(function) for function in workflow.functions}
    for agent in agents:
        check_functions(agent.functions, f"agent {agent.name!r}")
        twice = sorted(workflow_names & {tool_name(function) for function in agent.functions})
        if twice:
            raise ValueError(
                f"Agent {agent.name!r} and the workflow `{type(workflow).__name__}` both have a tool named "
                f"{twice[0]!r}, so only one of the two could be called. Rename one of them."
            )
        if agent.name == TOOL:
            raise ValueError(f"An agent cannot be named {TOOL!r}, since tool results are shown under this name.")
    owner = next((f"Agent {agent.name!r}" for agent in agents if agent.tools), "The workflow")
    return prepare_template(tokenizer, owner)


def is_single_agent(agents: Sequence[AgentSpec], workflow: Workflow) -> bool:
    """`True` for a single agent that is shown the prompt, its own turns and the results of its calls, as in TRL."""
    return len(agents) == 1 and type(workflow) is Sequential


def warn_of_unprotected(prompts: PromptBuilder, uses_tools: bool) -> None:
    """Warn if text from an agent can look like a message from another speaker."""
    reason = prompts.find_protection_gap(uses_tools)
    if prompts.lacks_chat_template:
        logger.warning(
            "The tokenizer has no chat template, so the model is probably a base model, which has not learned to "
            "follow system prompts or to end its turns. Use the instruction-tuned model of the family (`-Instruct`, "
            "`-it`, `-Chat`), or set `processing_class.chat_template` to the template that the model was tuned with."
        )
    if reason is not None:
        logger.warning(
            f"An agent can write text that its teammates may mistake for a message from another speaker, because "
            f"{reason}. This cannot be prevented for this tokenizer. The text still contains no control tokens."
        )


def make_window(
    model: PreTrainedModel | PeftModel,
    samplings: Mapping[str, Sampling],
    overflow: str,
    without_model: Collection[str],
    max_model_len: int | None = None,
) -> Window:
    """
    The context window of a model. It has no limit if the config of the model states none.

    Args:
        samplings: how many tokens each agent may generate.
        overflow: `context_overflow` of the training arguments.
        without_model: agents whose observations no model reads.
        max_model_len: limit of the servers that generate.
    """
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    size = min((limit for limit in (own, max_model_len) if limit is not None), default=None)
    reserved = {name: sampling.max_completion_length for name, sampling in samplings.items()}
    return Window(size, reserved, overflow, frozenset(without_model))
