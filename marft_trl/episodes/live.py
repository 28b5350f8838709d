# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The episode that is running, as a workflow holds it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ..system.hints import NearNames, checked_names
from .records import Feedback, Horizon, Messages, RequestedTurn, Seen, Turn
from .state import EpisodeState


# Attributes of the state that workflows read, and may set
_SHARED = ("row", "index", "prompt", "agents", "aliases", "turns", "feedback", "history", "environment")

# Settings of turns that agents have
_OF_AGENTS = {
    name: f"Set it on the agent: `AgentSpec(name, {name}=...)`."
    for name in ("temperature", "top_p", "top_k", "min_p", "max_completion_length", "stop", "system_prompt")
} | dict.fromkeys(("max_tokens", "max_new_tokens"), "Set `AgentSpec(name, max_completion_length=...)`.")


class LiveEpisode(NearNames):
    """
    One run of the workflow on one prompt, as the workflow sees it.

    Args:
        state ([`EpisodeState`]):
            What the engine knows of it, and makes the record of.

    Attributes:
        row (`dict`): the dataset row, with a `prompt`.
        index (`int`): position of the episode in its batch.
        prompt (`str` or `list[dict]`): the `prompt` of the row.
        agents (`tuple[str, ...]`): names of the agents of the team, in order.
        aliases (`Mapping[str, str]`): names under which agents know one another, where they are not their own.
        turns (`list[Turn]`): turns so far.
        feedback (`list[Feedback]`): texts of environments and tools so far.
        history (`list[Turn | Feedback]`): turns and feedback together, in the order in which they came.
        environment (`Any`): the environment that it is played in, which reward functions get. Set by the workflow.
    """

    state: EpisodeState
    row: dict[str, Any]
    index: int
    prompt: str | Messages
    agents: tuple[str, ...]
    aliases: Mapping[str, str]
    turns: list[Turn]
    feedback: list[Feedback]
    history: list[Seen]
    environment: Any

    def __init__(self, state: EpisodeState):
        vars(self).update({"state": state, **{name: getattr(state, name) for name in _SHARED}})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SHARED:
            setattr(self.state, name, value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        # asyncio writes out what its tasks return, and every turn names all that it was shown
        return f"LiveEpisode(index={self.index}, prompt={str(self.prompt)[:40]!r}, turns={len(self.turns)})"

    @checked_names("episode.turn", elsewhere=_OF_AGENTS)
    def turn(
        self,
        agent: str,
        sees: Sequence[Seen] | None = None,
        tools: Sequence[Callable] | None = None,
        rounds: int | None = None,
    ) -> Coroutine[Any, Any, Turn]:
        """
        Request a turn from an agent and wait for it. If the turn calls tools, the agent generates another turn with
        the results, until a turn calls none. The final turn is returned. By default, the turns with tool calls are
        shown only to their own agent; pass them in `sees` to show them to others.

        Args:
            sees (`Sequence[Turn]`, *optional*): earlier turns and feedback of this episode to show to the agent, in
                this order. Defaults to all turns and feedback so far.
            tools (`Sequence[Callable]`, *optional*): methods of an environment that the agent may call, in addition to
                the tools of its spec. Later turns depend on a turn that called one of them.
            rounds (`int`, *optional*): maximum number of times that the agent continues after tool results. The limits
                of the episode apply as well.

        Raises:
            ValueError: The agent is not in the team, or an item of `sees` belongs to another episode.
            RuntimeError: The episode has `max_episode_turns` turns already.
        """
        return self.state.request(agent, self.state.take_turn(agent, sees, tools, rounds))

    def turn_on(
        self, agent: str, requested_turn: RequestedTurn, sees: Sequence[Seen] | None = None
    ) -> Coroutine[Any, Any, Turn]:
        """
        Request a turn from an agent on messages that are not made by its view, and wait for it. Calls of tools in it
        are for the caller to answer, with the results in the messages of a further request.

        Args:
            requested_turn ([`RequestedTurn`]): the messages, and how the agent is asked.
            sees (`Sequence[Turn]`, *optional*): earlier turns that the messages depend on. Defaults to all turns and
                feedback so far.

        Raises:
            ValueError: The agent is not in the team or has tools of its own, or an item of `sees` belongs to another
                episode.
            RuntimeError: The episode has `max_episode_turns` turns already.
            EndOfEpisode: The messages cannot be shown to the agent. The episode goes on if this is caught.
        """
        return self.state.request(agent, self.state.take_requested(agent, requested_turn, sees))

    def call(self, function: Callable, *arguments: Any, **named: Any) -> Coroutine[Any, Any, Any]:
        """
        Call a function of your own. A synchronous function runs in a thread that all episodes share, one call at a
        time, while other episodes continue. Branches of this episode that call functions at the same time continue
        together, so that results do not depend on how long the functions take.

        Returns: the function's result, awaited if the function is asynchronous.
        """
        return self.state.expect(self.state.call(function, *arguments, **named))

    def observe(
        self,
        text: str | list[dict[str, Any]] | Mapping[str, Any] | None,
        after: Sequence[Turn] = (),
        reward: float | Mapping[str, float] = 0.0,
        source: str = "environment",
        images: Sequence[Any] = (),
    ) -> Feedback | None:
        """
        Record that turns were passed to an environment (or a tool), and record its feedback. Later turns depend on
        these turns, and see the feedback by default.

        Args:
            text (`str` or `Mapping[str, str]`, *optional*):
                Text of the feedback, or for agents by name a text that only they see. `None` or empty: no feedback.
            after (`Sequence[Turn]`, *optional*):
                Turns that were passed to the environment.
            reward (`float` or `Mapping[str, float]`, *optional*, defaults to `0.0`):
                Reward for these turns, as in [`~LiveEpisode.earn`]. It is assigned to the last of them.
            source (`str`, *optional*, defaults to `"environment"`):
                Name of the source that agents are shown.
            images (`Sequence[PIL.Image.Image]`, *optional*):
                Images of the feedback, for agents that see images. `text` may also be a list of parts, as in TRL.

        Returns: the [`Feedback`], which can be passed in `sees`; `None` if there is nothing for all agents.

        Raises:
            ValueError: A turn belongs to another episode, `reward` is not finite or has no turn in `after`, or an
                agent is not in the team.
        """
        self.state.check_own(after, "observe", Turn)
        if reward and not after:
            raise ValueError(f"`episode.observe` got the reward {reward!r} but no turn that earned it. Set `after=`.")
        if after:
            self.earn(after[-1], reward)
        self.state.fed += [turn.index for turn in after]
        if isinstance(text, Mapping):
            for agent, value in text.items():
                self.state.check_agent(agent, "observe")
                self.state.say(value, source, agent, images)
            return None
        return self.state.say(text, source, images=images)

    def earn(self, turn: Turn, reward: float | Mapping[str, float]) -> None:
        """
        Add a reward after a turn, in addition to the rewards that reward functions give to the episode.

        Args:
            turn (`Turn`):
                The turn after which the reward is received.
            reward (`float` or `Mapping[str, float]`):
                A number is the team's, and added to what this turn earned. In a mapping by agent name, each number is
                the agent's own (`MARFTConfig.returns`), whether or not it acted.

        Raises:
            TypeError: The reward is not a number.
            ValueError: The reward is not finite, the turn belongs to another episode, or an agent is not in the team.
        """
        self.state.check_own([turn], "earn", Turn)
        if not isinstance(reward, Mapping):
            self.state.earned[turn.index] += _number(turn, reward)  # type: ignore[assignment]  # a Counter of floats
            return
        for agent, item in reward.items():
            self.state.check_agent(agent, "earn")
            value = _number(turn, item)
            self.state.earned[turn.index] += value  # type: ignore[assignment]
            self.state.own.setdefault(agent, Counter())[turn.index] += value  # type: ignore[assignment]

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter. The metric `workflow/<name>` is its mean over episodes."""
        self.state.count(name, by)

    def cut(
        self,
        agent: str,
        sees: Sequence[Seen] | Mapping[str, Sequence[Seen] | None] | None = None,
        tools: Sequence[Callable] | Mapping[str, Sequence[Callable]] | None = None,
    ) -> None:
        """
        Mark the episode as truncated by a horizon before the task was finished. The critic then adds its value of the
        next observation of `agent` to the return (bootstrapping); where every agent has its own return, its value of
        what that agent would see. Without a critic this call has no effect.

        Args:
            agent (`str`):
                Name of the agent that would have acted next.
            sees (`Sequence[Turn]` or `Mapping[str, Sequence[Turn]]`, *optional*):
                Turns and feedback that the agent would have been shown, or that agents would have been by name.
                Defaults to all turns and feedback so far.
            tools (`Sequence[Callable]` or `Mapping[str, Sequence[Callable]]`, *optional*):
                Methods of an environment that the agents could have called, or that agents could have by name.
        """
        seen = sees if isinstance(sees, Mapping) else {agent: sees}
        self.state.horizons = tuple(
            Horizon(
                name,
                tuple(self.state.seen_by(name, seen.get(name), "cut")),
                (
                    *self.state.tools.get(name, ()),
                    *((tools.get(name, ()) if isinstance(tools, Mapping) else tools) or ()),
                ),
            )
            for name in dict.fromkeys([agent, *(turn.agent for turn in self.turns)])
        )

    @property
    def answer(self) -> Turn | None:
        """The turn that is the team's answer: the turn set by the workflow, or else the last turn."""
        return self.state.answer

    @answer.setter
    def answer(self, turn: Turn) -> None:
        if not isinstance(turn, Turn):
            raise TypeError(
                f"`episode.answer` must be a turn returned by `episode.turn`, got a {type(turn).__name__}. Agents "
                "learn from the tokens of turns, so text from the workflow cannot be the answer."
            )
        self.state.check_own([turn], "answer", Turn)
        self.state.chosen_answer = turn


def _number(turn: Turn, reward: Any) -> float:
    if isinstance(reward, (str, bytes)):
        raise TypeError(f"The reward for the turn of {turn.agent!r} must be a number, got {reward!r}.")
    try:
        value = float(reward)
    except OverflowError:  # an integer above all floats
        value = math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"The reward for the turn of {turn.agent!r} must be a number, got {reward!r}.") from error
    if not math.isfinite(value):
        raise ValueError(f"The reward for the turn of {turn.agent!r} must be finite, got {reward!r}.")
    return value
