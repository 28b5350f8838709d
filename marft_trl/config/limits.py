# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments about limits of episodes, tools and users' code, and about failures."""

from __future__ import annotations

from dataclasses import dataclass

from .options import ABOVE_0, SHARE, documented, option


@documented
@dataclass
class LimitSettings:
    """
    Limits of episodes, tools and users' code, and what happens where something fails.

    Args:
        context_overflow (`str`, *optional*, defaults to `"raise"`):
            Behaviour if an observation plus the agent's `max_completion_length` is longer than the model's window.
            `"raise"`: an error is raised. `"drop_oldest_turn"`: the oldest turns are left out (counted in
            `context/dropped_turns`), and an error is raised only if the prompt alone does not fit. `"end_episode"`:
            the episode ends with the turns it has (counted in `context/ended_episodes`).
        show_reasoning (`bool`, *optional*, defaults to `False`):
            Whether earlier turns, an agent's own and those of teammates, are shown with their reasoning where the chat
            template of the model cuts it off earlier messages (Qwen3, DeepSeek-R1, GPT-OSS).
        max_tool_calls (`int`, *optional*, defaults to `16`):
            Maximum number of tool calls before an agent's final turn. The first call beyond it gets an error message;
            further calls are ignored. If `max_tool_calling_iterations` is set, it also limits how often the agent
            continues after tool results.
        tool_timeout (`float`, *optional*, defaults to `30.0`):
            Maximum time in seconds of one tool call. After it, the agent gets an error message as the result.
        workflow_timeout (`float`, *optional*, defaults to `600.0`):
            Maximum time in seconds that a workflow may wait for something that is neither a turn nor a tool, such as
            an environment. Training then stops with an error. As long as functions called by other episodes keep
            returning, a workflow may queue to call its own; this wait is limited to `workflow_timeout` times the
            number of episodes. `None` disables the limit. With several processes, set it below `ddp_timeout`, the time
            after which the other processes fail.
        reward_timeout (`float`, *optional*, defaults to `900.0`):
            Maximum time in seconds of one call of a reward function. After it, the function has failed, see
            `on_episode_error`. `None` disables the limit. With several processes, it must be below `ddp_timeout`.
        on_episode_error (`str`, *optional*, defaults to `"raise"`):
            What happens if a reward function, a workflow or an environment fails. `"raise"`: the last complete step is
            saved, and training ends with the error. `"skip"`: the episode is left out, or the completion remains
            unscored; both are counted (`episodes/skipped`, `rewards/<name>/skipped`). `"retry"`: it is tried again
            twice, and training ends if it fails again. Errors of tools are results that the
            agent is told, and never end a run.
        max_skipped_share (`float`, *optional*, defaults to `0.5`):
            Largest share of the episodes of a generation batch that may be skipped. Above it, training ends.
        max_episode_turns (`int`, *optional*, defaults to `1000`):
            Largest number of turns of an episode. A workflow that asks for more has failed, see `on_episode_error`.
            `None` disables the limit.
        max_unscored_batches (`int`, *optional*, defaults to `None`):
            Number of consecutive generation batches without a single reward after which training stops with an error.
            A batch has no reward if every reward function returned `None` for all of its episodes. If `None`, training
            continues, with TRL's warning.
    """

    context_overflow: str = option("raise", choices=("raise", "drop_oldest_turn", "end_episode"))
    show_reasoning: bool = option(False)
    max_tool_calls: int = option(16, ABOVE_0, integer=True)
    tool_timeout: float = option(30.0, ABOVE_0)
    workflow_timeout: float | None = option(600.0, ABOVE_0, none="no limit")
    reward_timeout: float | None = option(900.0, ABOVE_0, none="no limit")
    on_episode_error: str = option("raise", choices=("raise", "skip", "retry"))
    max_skipped_share: float = option(0.5, SHARE)
    max_episode_turns: int | None = option(1000, ABOVE_0, integer=True, none="no limit")
    max_unscored_batches: int | None = option(None, ABOVE_0, integer=True, none="no limit")
