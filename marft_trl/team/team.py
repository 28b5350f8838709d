# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Inference with a trained team. Prompts, tokenization, stop strings and sampling are those of training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import random
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import CommitInfo, HfApi
from peft import PeftConfig, PeftModel
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..adapters.files import (
    add_adapter,
    alone,
    drop_adapters,
    has_own_adapter,
    merged,
    put_on,
    renaming,
    replaced,
    team_folder,
)
from ..adapters.manifest import TeamManifest
from ..agents import AgentSpec, check_team
from ..episodes.records import Episode, Messages, unknown_agent
from ..prompts.views import View, team_view
from ..rollout.runner import EpisodeRunner, RunMode, SeedKeys
from ..system.hints import checked_names
from ..system.randomness import UserRandomness
from ..workflows import Workflow, rebuild
from .as_dataset import to_dataset
from .events import SET_ELSEWHERE, Event, check_count, check_one, questions
from .live import DeviceThread, LiveTeam, Question, from_thread
from .saved_team import (
    SavedTeam,
    load_base,
    load_tokenizer,
    turns_that_fit,
    views_of,
    warn_of_another_base,
    with_functions,
    with_replies,
)


if TYPE_CHECKING:
    from ..extras.engines.team_servers import Servers


# Number of episodes above which a bar shows how many are done
_WITH_BAR = 20


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
        saved ([`SavedTeam`], *optional*): what a loaded team consists of besides. Without it, nobody joins or leaves.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        runner: EpisodeRunner,
        model: PreTrainedModel,
        seeds: random.Random | None = None,
        finish: Callable[[], None] = lambda: None,
        saved: SavedTeam | None = None,
    ):
        self.agents, self.workflow, self.model = list(agents), workflow, model
        self._runner, self._seeds, self._finish = runner, seeds, finish
        self._live: LiveTeam | None = None
        self._saved = saved

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
        engine: str | Sequence[str] | Servers | None = None,
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
            engine (`str`, `Sequence[str]` or [`Servers`], *optional*):
                Address of a vLLM server, or of several, that sample the turns. They need the base, the flags that
                [`vllm_command`] gives, and a folder in common with this process. Each adapter is loaded under a name
                of its own, and compared with the one here, whose base is loaded onto the CPU for this. `close()`, or
                the end of the process, takes the adapters from the servers.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: An object that the team needs was not passed, or an adapter does not fit the base.
        """
        if workflow is not None and not isinstance(workflow, Workflow):
            raise TypeError(f"`workflow` must be a `Workflow` object, got {workflow!r}.")
        folder = team_folder(team, revision, token)
        manifest = TeamManifest.load(folder)
        inference = manifest.inference
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
        servers = _servers_of(engine)
        device = torch.device("cpu") if servers is not None else PartialState().device
        base = load_base(manifest, folder, model, quantization_config, device)
        warn_of_another_base(manifest, base, tokenizer)
        loaded = put_on(base, folder) if manifest.adapters else base
        loaded.requires_grad_(False)
        saved = SavedTeam(manifest, tokenizer, views.get(None, team_view), servers)
        runner = saved.runner(agents, workflow, loaded)
        made = cls(agents, workflow, runner, loaded, saved=saved)
        if servers is not None:
            weakref.finalize(made, _close, runner)
        return made

    def close(self) -> None:
        """Take the adapters from the servers. A team without servers has nothing to close."""
        self._runner.generator.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @checked_names("team(question)", elsewhere=SET_ELSEWHERE)
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
        check_one(question, "team(question)")
        (episode,) = self.run([question], greedy=greedy, seed=seed, sampling=sampling)
        return episode.answer.text if episode.answer is not None else ""

    @checked_names("team.run", elsewhere=SET_ELSEWHERE)
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
                Number of episodes that run at once. If `None`, as many as there is memory for. What is sampled with a
                seed depends on it.
            sampling (`dict`, *optional*):
                Sampling settings of all agents in place of those of training: `temperature`, `top_p`, `top_k`,
                `min_p`.

        Returns: the finished episodes, grouped by prompt; `episode.answer.text` is the team's answer.

        Raises:
            ValueError: `prompts` is empty, a prompt is not valid, or `num_samples` or `batch_size` is below 1.
        """
        check_count("batch_size", batch_size or 1)
        rows, options = questions(prompts, num_samples, greedy, sampling)
        if seed is None and self._seeds is not None:
            seed = self._seeds.getrandbits(31)
        size, episodes = batch_size or self._episodes_that_fit(rows), []
        with (
            tqdm(total=len(rows), desc="episodes", disable=True if len(rows) <= _WITH_BAR else None) as bar,
            self._running(options, seed) as runner,
        ):
            for start in range(0, len(rows), size):
                done = runner.run(rows[start : start + size])
                episodes += [dataclasses.replace(episode, index=start + episode.index) for episode in done]
                bar.update(len(done))
        return episodes

    @checked_names("team.arun", elsewhere=SET_ELSEWHERE)
    async def arun(
        self,
        prompts: Sequence[str | Messages | Mapping[str, Any]],
        num_samples: int = 1,
        greedy: bool = False,
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> list[Episode]:
        """
        Like [`Team.run`], awaited. Several may run at the same time, e.g. in handlers of a web service: their turns
        are sampled together. With a seed, an answer does not depend on what else runs, but it is another one than that
        of [`Team.run`]; greedy answers are the same.

        Args:
            prompts, num_samples, greedy, seed, sampling: as in [`Team.run`].

        Returns: the finished episodes, grouped by prompt.
        """
        return await self.live.run(self._ask(prompts, num_samples, greedy, seed, sampling))

    @checked_names("team.stream", elsewhere=SET_ELSEWHERE)
    def stream(
        self,
        question: str | Messages | Mapping[str, Any],
        greedy: bool = False,
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> Iterator[Event]:
        """
        What happens while the team answers, as it happens.

        ```python
        for event in team.stream("How many apples are left?"):
            match event:
                case TurnStarted(agent=agent):
                    print(f"\\n{agent}: ", end="")
                case TextDelta(text=text):
                    print(text, end="", flush=True)
        ```

        Args:
            question (`str`, `list[dict]` or `dict`): a text, a list of messages, or a dataset row with a `prompt`.
            greedy, seed, sampling: as in [`Team.arun`].

        Yields: [`TurnStarted`], [`TextDelta`] and [`TurnEnded`] of each turn, and an [`Answer`] at the end. To stop
        listening ends the episode.
        """
        check_one(question, "team.stream(question)")
        ask = self._ask([question], 1, greedy, seed, sampling)
        return from_thread(lambda: self.live.stream(ask))

    @checked_names("team.astream", elsewhere=SET_ELSEWHERE)
    def astream(
        self,
        question: str | Messages | Mapping[str, Any],
        greedy: bool = False,
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> AsyncIterator[Event]:
        """Like [`Team.stream`], for `async for`. Several may run at the same time."""
        check_one(question, "team.astream(question)")
        return self.live.stream(self._ask([question], 1, greedy, seed, sampling))

    @property
    def live(self) -> LiveTeam:
        """Runs episodes in event loops."""
        if self._live is None:
            generator, most = self._runner.generator, functools.partial(turns_that_fit, self.model)
            generator = DeviceThread(generator, self._acting, most) if generator.batches else generator
            self._live = LiveTeam(self._runner, generator)
        return self._live

    def _ask(self, prompts, num_samples, greedy, seed, sampling) -> Question:
        rows, options = questions(prompts, num_samples, greedy, sampling)
        if seed is None:
            seed = secrets.randbits(62) if self._seeds is None else self._seeds.getrandbits(62)
        return Question(rows, seed, options)

    def _episodes_that_fit(self, rows: Sequence[Mapping[str, Any]]) -> int:
        if not self._runner.generator.batches:
            return len(rows)
        lengths = [self._runner.generator.settings(agent.name)["max_new_tokens"] for agent in self.agents]
        longest = max(len(str(row.get("prompt", ""))) for row in rows)  # a token has a character at least
        return turns_that_fit(self.model, longest + sum(lengths))

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
        names = [item.name for item in self.agents if item.has_policy]
        template = self._runner.prompts.template.options
        return to_dataset(episodes, kind, names, agent, rewards, best, threshold, template)

    # ---- Who is in it ----

    def __getitem__(self, agent: str) -> PreTrainedModel:
        """
        An agent as a plain model of PEFT, with its adapter alone: `team["solver"].generate(...)`. The adapter is a
        copy; the base takes no further memory. Of a team without adapters it is the one policy of all agents.
        """
        adapter = self._agent(agent).adapter
        with self._acting():
            return alone(self.model, adapter) if isinstance(self.model, PeftModel) else self.model

    def merge(self, agent: str) -> PreTrainedModel:
        """
        A copy of the base with the adapter of an agent added to its weights, to be used without PEFT. Its prompts are
        not in it: they stand in `team.agents`.
        """
        adapter = self._agent(agent).adapter
        with self._acting():
            return merged(self.model, adapter) if isinstance(self.model, PeftModel) else copy.deepcopy(self.model)

    def add_agent(
        self,
        agent: AgentSpec,
        weights: str | os.PathLike | None = None,
        peft_config: PeftConfig | None = None,
        before: str | None = None,
        workflow: Workflow | None = None,
    ) -> None:
        """
        Add an agent to a loaded team.

        Args:
            agent ([`AgentSpec`]):
                The agent. With `adapter=` it acts with an adapter that the team has.
            weights (`str` or `os.PathLike`, *optional*):
                Folder or Hub id of its adapter, such as what `SFTTrainer` has saved.
            peft_config ([`~peft.PeftConfig`], *optional*):
                Config of a fresh adapter, with which it acts as the base does until it is trained.
            before (`str`, *optional*):
                Agent that it is put before. Defaults to the end of the team.
            workflow ([`Workflow`], *optional*):
                Workflow of the new team. Required if the present one names its agents and the new one is to act.

        Raises:
            ValueError: the name is taken, or its weights do not fit the base.
        """
        saved = self._loaded("add_agent")
        place = len(self.agents) if before is None else self.agents.index(self._agent(before))
        agents = check_team([*self.agents[:place], agent, *self.agents[place:]])
        workflow = workflow or self.workflow
        workflow.check([item.name for item in agents])
        with self._acting():
            known = set(self.model.peft_config) if isinstance(self.model, PeftModel) else set()
            if known and agent.has_policy:
                add_adapter(self.model, agent, weights, peft_config)
            try:
                self._become(agents, workflow, saved.of(agents, workflow, {}))
            except Exception:  # such as a tool that cannot be shown
                for name in set(getattr(self.model, "peft_config", ())) - known:
                    self.model.delete_adapter(name)
                raise

    def rename_agent(self, agent: str, name: str, workflow: Workflow | None = None) -> None:
        """
        Give an agent another name. Its adapter is renamed with it, unless others share it.

        Args:
            agent (`str`): its present name.
            name (`str`): its new name.
            workflow ([`Workflow`], *optional*): workflow of the new team, if the present one names the agent.
        """
        saved, old = self._loaded("rename_agent"), self._agent(agent)
        has_its_own = isinstance(self.model, PeftModel) and has_own_adapter(old, self.agents)
        new = dataclasses.replace(old, name=name, adapter=name if has_its_own else old.adapter)
        agents = check_team(replaced(self.agents, old, new))
        workflow = workflow or self.workflow
        workflow.check([item.name for item in agents])
        with self._acting(), renaming(self.model, str(old.adapter), name if has_its_own else str(old.adapter)):
            self._become(agents, workflow, saved.of(agents, workflow, {name: agent}))

    def drop_agent(self, agent: str, workflow: Workflow | None = None) -> None:
        """
        Take an agent out. Its adapter goes with it, unless others share it.

        Args:
            agent (`str`): its name.
            workflow ([`Workflow`], *optional*): workflow of the new team, if the present one names the agent.
        """
        saved, old = self._loaded("drop_agent"), self._agent(agent)
        agents = [item for item in self.agents if item is not old]
        if not any(entry.has_policy for entry in agents):
            raise ValueError(f"{agent!r} is the last agent that a model speaks for; a team needs one.")
        agents, workflow = check_team(agents), workflow or self.workflow
        workflow.check([value.name for value in agents])
        with self._acting():
            self._become(agents, workflow, saved.of(agents, workflow, {}))
            if isinstance(self.model, PeftModel):
                drop_adapters(self.model, agents)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """
        Save a loaded team as [`MARFTTrainer`] saves it: one PEFT folder per adapter, tokenizer, manifest, model card.
        `trainer.save_model()` saves a team in training.

        Args:
            folder (`str` or `os.PathLike`): where to. It is created if need be.
        """
        with self._acting():
            self._loaded("save_pretrained").save(Path(folder), self.model)

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload team",
    ) -> CommitInfo:
        """
        Push a loaded team to the Hub. Adapters of agents that the team there had, and this one has not, are removed.

        Args:
            repo_id (`str`): Hub id, such as `"me/my-team"`. The repository is created if need be.
            private (`bool`, *optional*): whether a new repository is private. Defaults to the owner's setting.
            token (`str` or `bool`, *optional*): Hub token.
            revision (`str`, *optional*): branch.
            commit_message (`str`, *optional*, defaults to `"Upload team"`): message of the commit.
        """
        saved = self._loaded("push_to_hub")
        with self._acting():
            return saved.push(self.model, HfApi(token=token), repo_id, private, revision, commit_message)

    def _agent(self, name: str) -> AgentSpec:
        found = next((agent for agent in self.agents if agent.name == name), None)
        if found is None:
            raise KeyError(unknown_agent(name, [item.name for item in self.agents], "the team"))
        return found

    def _loaded(self, method: str) -> SavedTeam:
        if self._saved is None:
            how = "Save it with `trainer.save_model()`, and load it with `Team.from_pretrained`."
            raise RuntimeError(f"`{method}` is for a loaded team, and this one is in training. {how}")
        if method.endswith("_agent") and self._live is not None and self._live.running:
            raise RuntimeError(f"`{method}` would change a team that is answering. Wait until it has answered.")
        return self._saved

    def _become(self, agents: list[AgentSpec], workflow: Workflow, saved: SavedTeam) -> None:
        before, self._runner = self._runner, saved.runner(agents, workflow, self.model)
        before.generator.close()
        self._runner.device_lock = before.device_lock  # this thread has acquired it
        self.agents, self.workflow, self._saved, self._live = agents, workflow, saved, None

    @contextlib.contextmanager
    def _running(self, options: dict[str, Any], seed: int | None) -> Iterator[EpisodeRunner]:
        model = self.model
        devices = [] if model.device.type == "cpu" else [model.device]
        with self._acting():
            randomness = UserRandomness(seed, model.device) if seed is not None else None
            # That of the team as it is now: another thread may have changed it
            runner = self._runner.changed(RunMode(options), randomness=randomness, keys=SeedKeys("seeded", seed or 0))
            with torch.random.fork_rng(devices, enabled=seed is not None, device_type=model.device.type):
                if seed is not None:
                    torch.manual_seed(seed)
                runner.generator.publish(alone=True)
                yield runner
                self._finish()

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        """Context manager: the model acts for nobody else, and without dropout."""
        with self._runner.device_lock:
            was_training = self.model.training
            self.model.eval()
            try:
                yield
            finally:
                self.model.train(was_training)


def _servers_of(engine: str | Sequence[str] | Servers | None) -> Servers | None:
    if engine is None:
        return None
    from ..extras.engines.team_servers import Servers

    return engine if isinstance(engine, Servers) else Servers(engine)


def _close(runner: EpisodeRunner) -> None:
    with contextlib.suppress(Exception):  # the servers may be gone
        runner.generator.close()
