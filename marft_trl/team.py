# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Inference with a trained team. Prompts, tokenization, stop texts and sampling are those of training."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import is_conversational

from .agents import AgentSpec
from .config.dataset_checks import check_prompts
from .config.evaluation import check_sampling
from .config.sampling import decoding
from .episodes.records import Episode, Messages
from .rollout.as_dataset import to_dataset
from .rollout.runner import EpisodeRunner
from .rollout.saved_team import (
    load_base,
    load_tokenizer,
    make_runner,
    views_of,
    warn_of_another_base,
    with_functions,
    with_replies,
    without_inference,
)
from .rollout.views import View, team_view
from .shared_prefix.forward import why_not
from .system.randomness import UserRandomness
from .weights.adapter_files import put_on, team_folder
from .weights.manifest import TeamManifest
from .workflows import Workflow, rebuild
from .workflows.anonymity import alias_names


class Team:
    """
    A team of agents for inference. [`Team.from_pretrained`] loads a saved team; `trainer.team` is the trained team.

    ```python
    team = Team.from_pretrained("me/my-team")
    print(team("How many apples are left?"))
    ```

    Args:
        agents (`Sequence[AgentSpec]`): the agents.
        workflow ([`Workflow`]): decides who acts next and what each sees.
        runner ([`EpisodeRunner`]): runs episodes.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the base with the agents' adapters.
        seeds (`random.Random`, *optional*): source of the seed of `run` if none is passed. It keeps the global random
            states, which a trainer uses, unchanged.
        finish (`Callable[[], None]`, *optional*): called at the end of a run. Other processes may not be done yet.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        runner: EpisodeRunner,
        model: PreTrainedModel,
        seeds: random.Random | None = None,
        finish: Callable[[], None] = lambda: None,
    ):
        self.agents, self.workflow, self.model = list(agents), workflow, model
        self._runner, self._seeds, self._finish = runner, seeds, finish

    def __repr__(self) -> str:
        names = ", ".join(agent.name for agent in self.agents)
        return f"Team({names}; {type(self.workflow).__name__})"

    @classmethod
    def from_pretrained(
        cls,
        team: str | os.PathLike,
        model: str | PreTrainedModel | None = None,
        quantization_config: Any = None,
        revision: str | None = None,
        *,
        workflow: Workflow | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        tools: Sequence[Callable] = (),
        view: View | Mapping[str, View] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        token: str | bool | None = None,
        replies: Mapping[str, Callable] | None = None,
    ) -> Team:
        """
        Load a team that `MARFTTrainer` saved or pushed.

        Args:
            team (`str` or `os.PathLike`):
                Folder of the team, or its Hub id.
            model (`str` or [`~transformers.PreTrainedModel`], *optional*):
                Base model: a Hub id, a folder, or a loaded model without adapters. Defaults to the Hub model that the
                team was trained on. Required if the team was trained on a local base. It is loaded onto one device;
                pass a base that needs several as a loaded model, such as one with `device_map="auto"`.
            quantization_config (*optional*):
                Quantization config used to load the base. Defaults to the config of training. `False` disables
                quantization.
            revision (`str`, *optional*):
                Branch, tag or commit of the team on the Hub.
            workflow ([`Workflow`], *optional*):
                Workflow of the team. Ready-made workflows are rebuilt from the manifest by default. Required if the
                workflow is your own class.
            environment_factory (`Callable`, *optional*):
                Function that creates an environment, if the workflow of the team is `EnvironmentLoop`, or a dictionary
                of several.
            tools (`Sequence[Callable]`, *optional*):
                Functions that agents may call. Each agent gets the functions that it had in training, matched by name.
            view (`Callable` or `dict[str, Callable]`, *optional*):
                View that the team was trained with, if it was not the default: a function, or a dictionary that maps
                agent names to functions if agents have their own views.
            processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
                Tokenizer to use instead of the one saved with the team.
            token (`str` or `bool`, *optional*):
                Hub token.
            replies (`dict[str, Callable]`, *optional*):
                Functions `reply(messages)` by agent name, of agents whose turns a function wrote in training, and of
                others that a function is to take the place of.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: An object that the team needs was not passed, or an adapter does not fit the base.
        """
        if workflow is not None and not isinstance(workflow, Workflow):
            raise TypeError(f"`workflow` must be a `Workflow` object, got {workflow!r}.")
        folder = team_folder(team, revision, token)
        manifest = TeamManifest.load(folder)
        inference = manifest.inference or without_inference(folder)
        if workflow is None:
            workflow = rebuild(manifest.workflow, environment_factory)
        elif environment_factory is not None:
            raise ValueError("`workflow` and `environment_factory` were both passed. Pass the workflow alone.")
        views = views_of(inference, view)
        agents = with_replies(with_functions(manifest.agents, inference, tools, views), inference, replies or {})
        workflow.check([agent.name for agent in agents])
        tokenizer = processing_class or load_tokenizer(folder)
        if tokenizer.pad_token is None:  # as in training
            tokenizer.pad_token = tokenizer.eos_token
        base = load_base(manifest, folder, model, quantization_config)
        warn_of_another_base(manifest, base, tokenizer)
        loaded = put_on(base, folder) if manifest.adapters else base
        loaded.requires_grad_(False)
        aliases = alias_names(agents) if manifest.anonymous else {}
        share = inference.share_prefixes and why_not(base) is None
        runner = make_runner(
            agents, workflow, inference, loaded, tokenizer, views.get(None, team_view), aliases, share
        )
        return cls(agents, workflow, runner, loaded)

    def __call__(
        self,
        question: str | Messages | Mapping[str, Any],
        greedy: bool = False,
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> str:
        """
        The team's answer to one question, sampled as in training. [`Team.run`] takes several, and returns whole
        episodes.

        Args:
            question (`str`, `list[dict]` or `dict`):
                A text, a list of messages, or a dataset row with a `prompt`.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to use greedy decoding instead of sampling.
            seed (`int`, *optional*):
                Seed of sampling, as in [`Team.run`].
            sampling (`dict`, *optional*):
                Sampling settings, as in [`Team.run`].

        Raises:
            TypeError: `question` is neither a text nor messages nor a row; several questions are for [`Team.run`].
            ValueError: it is empty.
        """
        if not isinstance(question, (str, Mapping)) and not (question and is_conversational({"prompt": question})):
            raise TypeError(
                f"`team(question)` answers one question, a text or a list of messages, got {str(question)[:80]}. For "
                "several, use `team.run(questions)`: it returns an episode for each, with its answer in "
                "`episode.answer.text`."
            )
        (episode,) = self.run([question], greedy=greedy, seed=seed, sampling=sampling)
        return episode.answer.text if episode.answer is not None else ""

    def run(
        self,
        prompts: Sequence[str | Messages | Mapping[str, Any]],
        num_samples: int = 1,
        greedy: bool = False,
        seed: int | None = None,
        batch_size: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> list[Episode]:
        """
        Run the workflow on prompts.

        Args:
            prompts (`Sequence`):
                Texts, lists of messages, or dataset rows with a `prompt`. The workflow and the environment can read
                the other columns of a row.
            num_samples (`int`, *optional*, defaults to `1`):
                Number of episodes per prompt.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to use greedy decoding instead of sampling.
            seed (`int`, *optional*):
                Seed of sampling and of random draws in your own code (workflow, environment, tools and views). The
                random states are restored afterwards. If `None`, a loaded team uses torch's current random state, and
                `trainer.team` draws a seed from its own generator.
            batch_size (`int`, *optional*):
                Number of episodes that run at once. If `None`, all episodes run at once.
            sampling (`dict`, *optional*):
                Sampling settings of all agents in place of those of training: `temperature`, `top_p`, `top_k`,
                `min_p`.

        Returns: the finished episodes, grouped by prompt; `episode.answer.text` is the team's answer.

        Raises:
            ValueError: `prompts` is empty, a prompt is not valid, or `num_samples` or `batch_size` is below 1.
        """
        for name, number in (("num_samples", num_samples), ("batch_size", batch_size or 1)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {number!r}.")
        if greedy and sampling:
            raise ValueError("`greedy=True` and `sampling` were both passed. Leave one of them out.")
        if seed is None and self._seeds is not None:
            seed = self._seeds.getrandbits(31)
        rows = [_as_row(prompt) for prompt in _as_list(prompts) for _ in range(num_samples)]
        empty = [index for index, row in enumerate(rows) if _is_blank(row.get("prompt", "?"))]
        if empty:
            raise ValueError(
                f"Prompt {empty[0] // num_samples} of {len(rows) // num_samples} is empty, so there is nothing to "
                "answer. Pass a text or a list of messages."
            )
        check_prompts(rows, "prompts")
        size, episodes = batch_size or max(len(rows), 1), []
        check_sampling(sampling, "sampling")
        with self._running({"greedy": True} if greedy else decoding(sampling), seed):
            for start in range(0, len(rows), size):
                done = self._runner.run(rows[start : start + size])
                episodes += [dataclasses.replace(episode, index=start + episode.index) for episode in done]
        return episodes

    def to_dataset(
        self,
        episodes: Sequence[Episode],
        kind: str = "prompt-completion",
        agent: str | None = None,
        *,
        rewards: Sequence[float] | None = None,
        best: int | None = None,
        threshold: float | None = None,
    ) -> Dataset:
        """
        Turns of episodes as a dataset of TRL's other trainers, each with what its agent was shown: to warm an agent up
        on its own best turns (rejection sampling), or to train it offline.

        ```python
        episodes = team.run(rows, num_samples=8)
        rewards = [score(episode) for episode in episodes]
        dataset = team.to_dataset(episodes, agent="solver", rewards=rewards, best=1, threshold=1.0)
        ```

        Args:
            episodes (`Sequence[Episode]`):
                What [`Team.run`] returns. Episodes of the same row are compared with one another.
            kind (`str`, *optional*, defaults to `"prompt-completion"`):
                `"prompt-completion"` (for `SFTTrainer`, with a loss on what the agent said), `"sft"` (whole
                conversations, for `SFTTrainer`), `"dpo"` (of each prompt the turns of the best and of the worst
                episode, where the agent was shown the same), or `"kto"` (turns with a `label`: whether their episode
                earned at least `threshold`, or more than the mean of its prompt).
            agent (`str`, *optional*):
                Whose turns. Defaults to those of all agents; the column `agent` has their names.
            rewards (`Sequence[float]`, *optional*):
                Reward of each episode. Defaults to what it earned in the workflow.
            best (`int`, *optional*):
                Number of episodes of each prompt that are kept. Defaults to all.
            threshold (`float`, *optional*):
                Smallest reward of an episode that is kept.

        Returns: a `datasets.Dataset`. Turns that were cut at their length limit are left out where they would be
        learnt.

        Raises:
            ValueError: an argument cannot be, or nothing is left; the message says what to change.
        """
        names = [one.name for one in self.agents if one.has_policy]
        template = self._runner.prompts.template.options
        return to_dataset(episodes, kind, names, agent, rewards, best, threshold, template)

    @contextlib.contextmanager
    def _running(self, options: dict[str, Any], seed: int | None) -> Iterator[None]:
        runner, model, was_training = self._runner, self.model, self.model.training
        before, randomness, dropped = runner.options, runner.randomness, runner.dropped_turns
        runner.options = options
        devices = [] if model.device.type == "cpu" else [model.device]
        model.eval()
        try:
            with torch.random.fork_rng(devices, enabled=seed is not None, device_type=model.device.type):
                if seed is not None:
                    torch.manual_seed(seed)
                    runner.randomness = UserRandomness(seed, model.device)
                runner.generator.publish(alone=True)
                with runner.seeded(seed or 0):
                    yield
                self._finish()
        finally:
            runner.options, runner.randomness, runner.dropped_turns = before, randomness, dropped
            model.train(was_training)


# ---- Questions ----


def _as_list(prompts: Any) -> list:
    if (
        prompts is None
        or isinstance(prompts, (str, Mapping))
        or (len(prompts) and is_conversational({"prompt": prompts}))
    ):
        raise TypeError(
            "`prompts` must be a list of prompts; for a single one pass `[prompt]`, or call `team(prompt)`."
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("`prompts` is empty: pass at least one.")
    return prompts


def _is_blank(prompt: Any) -> bool:
    return prompt is None or (isinstance(prompt, str) and not prompt.strip())


def _as_row(prompt: Any) -> dict[str, Any]:
    return dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
