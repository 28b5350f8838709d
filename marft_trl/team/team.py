# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Inference with a trained team. Prompts, tokenization, stop strings and sampling match training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random
import secrets
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from huggingface_hub import CommitInfo, HfApi
from peft import PeftModel
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..adapters import files
from ..adapters.manifest import TeamManifest
from ..agents import AgentSpec
from ..episodes.records import Episode, Messages
from ..prompts.views import View, team_view
from ..rollout.runner import EpisodeRunner, RunMode, SeedKeys
from ..shared_prefix.forward import in_mode
from ..system.hints import NearNames, checked_names, did_you_mean
from ..system.randomness import UserRandomness
from ..workflows import Workflow
from ..workflows.base import rebuild
from . import saved_team
from .as_dataset import to_dataset
from .events import SET_ELSEWHERE, Event, check_count, questions, single_question
from .live import DeviceThread, LiveTeam, Question, from_thread
from .saved_team import SavedTeam


if TYPE_CHECKING:
    from ..extras.engines.setup import Servers


# Options that the base is loaded with, which is loaded onto one device
_OF_THE_BASE = dict.fromkeys(
    ("device", "device_map", "dtype", "torch_dtype", "attn_implementation"),
    "Load the base with it, and pass it: `model=AutoModelForCausalLM.from_pretrained(...)`.",
)
_PROGRESS_BAR_ABOVE = 20  # number of episodes above which a progress bar is shown


class Team(NearNames):
    """
    A team of agents for inference. [`Team.from_pretrained`] loads a saved team; `trainer.team` is the trained team.

    ```python
    team = Team.from_pretrained("me/my-team")
    print(team("How many apples are left?"))
    ```

    Args:
        agents (`Sequence[AgentSpec]`): the agents.
        workflow ([`Workflow`]): decides which agent acts next and what each agent sees.
        runner ([`EpisodeRunner`]): runs episodes.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): the base with the agents' adapters.
        seeds (`random.Random`, *optional*): source of seeds for `run`. The global random states stay unchanged.
        finish (`Callable[[], None]`, *optional*): called at the end of a run, which other processes may reach later.
        saved ([`SavedTeam`], *optional*): further parts of a loaded team. Without them, it cannot be saved.
        further (`dict`, *optional*): models of the agents that do not act with `model`.
    """

    also_called = dict.fromkeys(("to", "cuda"), "Team.from_pretrained(..., device=...)")

    def __init__(
        self,
        agents: Sequence[AgentSpec],
        workflow: Workflow,
        runner: EpisodeRunner,
        model: PreTrainedModel,
        seeds: random.Random | None = None,
        finish: Callable[[], None] = lambda: None,
        saved: SavedTeam | None = None,
        further: Mapping[str, PreTrainedModel] | None = None,
    ):
        self._further = further or {}
        self.agents, self.workflow, self.model = list(agents), workflow, model
        self._runner, self._seeds, self._finish = runner, seeds, finish
        self._live: LiveTeam | None = None
        self._saved = saved

    def __repr__(self) -> str:
        names = ", ".join(agent.name for agent in self.agents)
        return f"Team({names}; {type(self.workflow).__name__})"

    @classmethod
    @checked_names("Team.from_pretrained", elsewhere=_OF_THE_BASE)
    def from_pretrained(
        cls,
        team: str | os.PathLike,
        model: str | PreTrainedModel | Mapping[str, str | PreTrainedModel] | None = None,
        quantization_config: Any = None,
        revision: str | None = None,
        *,
        workflow: Workflow | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        tools: Sequence[Callable] = (),
        view: View | Mapping[str, View] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        token: str | bool | None = None,
        replies: Mapping[str, Callable] | None = None,
        engine: str | Sequence[str] | Servers | Mapping[str, Any] | None = None,
    ) -> Team:
        """
        Load a team that `MARFTTrainer` saved or pushed.

        Args:
            team (`str` or `os.PathLike`):
                Folder of the team, or its Hub id.
            model (`str` or [`~transformers.PreTrainedModel`], *optional*):
                Base model: a Hub id, a folder, or a loaded model without adapters. Defaults to the Hub model that the
                team was trained on. Required if the team was trained on a local base. The base is loaded onto one
                device. If it needs several devices, pass a loaded model, for example with `device_map="auto"`. For a
                team with several bases, a dictionary by the names of the bases.
            quantization_config (*optional*):
                Quantization config used to load each base. Defaults to the config of training. `False` disables
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
                Tokenizer or processor of the first base to use instead of the one saved with the team.
            token (`str` or `bool`, *optional*):
                Hub token.
            replies (`dict[str, Callable]`, *optional*):
                Functions `reply(messages)` by agent name, for agents whose turns a function wrote in training, and for
                other agents that a function replaces.
            engine (`str`, `Sequence[str]` or [`Servers`], *optional*):
                Address of a vLLM server, or a list of addresses. The servers sample the turns. They need the base, the
                flags from [`vllm_command`], and a folder shared with this process. Each adapter is loaded under a
                unique name and compared with the local adapter, for which the base is loaded onto the CPU. `close()`,
                or the end of the process, removes the adapters from the servers. For a team with several bases, a
                dictionary by the names of the bases.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: An object that the team needs was not passed, or an adapter does not fit the base.
        """
        if workflow is not None and not isinstance(workflow, Workflow):
            raise TypeError(f"`workflow` must be a `Workflow` object, got {workflow!r}.")
        folder = files.team_folder(team, revision, token)
        manifest = TeamManifest.load(folder)
        inference = manifest.inference
        if workflow is None:
            from ..extras.apps import external_app  # noqa: F401 - `rebuild` finds the classes that are imported

            workflow = rebuild(manifest.workflow, environment_factory)
        elif environment_factory is not None:
            raise ValueError("`workflow` and `environment_factory` were both passed. Pass only `workflow`.")
        views = saved_team.resolve_views(inference, view)
        agents = saved_team.attach_functions(manifest.agents, inference, tools, views)
        agents = saved_team.attach_replies(agents, inference, replies or {})
        workflow.check([agent.name for agent in agents])
        bases = saved_team.load_bases(
            manifest, folder, agents, workflow, model, quantization_config, processing_class, engine
        )
        saved = SavedTeam(manifest, bases, views.get(None, team_view))
        runner = saved.make_runner(agents, workflow)
        further = {name: base.model for base in bases[1:] for name in base.agents}
        loaded_team = cls(agents, workflow, runner, bases[0].model, saved=saved, further=further)
        if engine is not None:
            weakref.finalize(loaded_team, _close, runner)
        return loaded_team

    def close(self) -> None:
        """Remove the adapters from the servers. Without servers, nothing happens."""
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
        images: Sequence[Any] = (),
    ) -> str:
        """
        Return the team's answer to a question, sampled as in training. [`Team.run`] takes several questions and
        returns whole episodes.

        Args:
            question (`str`, `list[dict]` or `dict`):
                A text, a list of messages, or a dataset row with a `prompt`.
            greedy (`bool`, *optional*, defaults to `False`):
                Whether to use greedy decoding instead of sampling.
            seed (`int`, *optional*):
                Seed of sampling, as in [`Team.run`].
            sampling (`dict`, *optional*):
                Sampling settings, as in [`Team.run`].
            images (`Sequence[PIL.Image.Image]`, *optional*):
                Images of the question, which are shown before it, or paths of local files.

        Raises:
            TypeError: `question` is not a text, a list of messages or a dataset row. For several questions, use
                [`Team.run`].
            ValueError: `question` is empty.
        """
        question = self._single(question, images, "team(question)")
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
                Number of episodes that run at once. If `None`, as many as fit into memory. The samples of a seed
                depend on it.
            sampling (`dict`, *optional*):
                Sampling settings of all agents that override those of training: `temperature`, `top_p`, `top_k`,
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
            tqdm(total=len(rows), desc="episodes", disable=True if len(rows) <= _PROGRESS_BAR_ABOVE else None) as bar,
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
        Asynchronous version of [`Team.run`]. Several calls may run at the same time, for example in the handlers of a
        web service. Their turns share batches. With a seed, an answer does not depend on other calls, but it differs
        from the answer of [`Team.run`]. Greedy answers are the same.

        Args:
            prompts, num_samples, greedy, seed, sampling: as in [`Team.run`].

        Returns: the finished episodes, grouped by prompt.
        """
        return await self.live.run(self._make_question(prompts, num_samples, greedy, seed, sampling))

    @checked_names("team.stream", elsewhere=SET_ELSEWHERE)
    def stream(
        self,
        question: str | Messages | Mapping[str, Any],
        greedy: bool = False,
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
        images: Sequence[Any] = (),
    ) -> Iterator[Event]:
        """
        Stream the events of an episode while the team answers.

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
            images (`Sequence[PIL.Image.Image]`, *optional*): images of the question, or paths of local files.

        Yields: [`TurnStarted`], [`TextDelta`] and [`TurnEnded`] of each turn, and an [`Answer`] at the end. Closing
        the iterator ends the episode.
        """
        question = self._single(question, images, "team.stream(question)")
        streamed = self._make_question([question], 1, greedy, seed, sampling)
        return from_thread(lambda: self.live.stream(streamed))

    @checked_names("team.astream", elsewhere=SET_ELSEWHERE)
    def astream(
        self,
        question: str | Messages | Mapping[str, Any],
        greedy: bool = False,
        seed: int | None = None,
        sampling: Mapping[str, float] | None = None,
        images: Sequence[Any] = (),
    ) -> AsyncIterator[Event]:
        """Asynchronous version of [`Team.stream`]. Several streams may run at the same time."""
        question = self._single(question, images, "team.astream(question)")
        return self.live.stream(self._make_question([question], 1, greedy, seed, sampling))

    @property
    def live(self) -> LiveTeam:
        """The [`LiveTeam`] that runs episodes in event loops."""
        if self._live is None:
            generator, most = self._runner.generator, self._max_concurrent_turns
            generator = DeviceThread(generator, self._reserve_model, most) if generator.batches else generator
            self._live = LiveTeam(self._runner, generator)
        return self._live

    @property
    def sees_images(self) -> bool:
        """`True` if any agent sees images."""
        return self._runner.sees_images

    def _single(self, question: Any, images: Sequence[Any], where: str) -> Any:
        if images and not self.sees_images:
            raise ValueError(
                f"`{where}` got images, but no agent of the team sees images: their models take text alone, or they "
                "have `sees_images=False`. Leave `images` out."
            )
        return single_question(question, images, where)

    def _make_question(self, prompts, num_samples, greedy, seed, sampling) -> Question:
        rows, options = questions(prompts, num_samples, greedy, sampling)
        if seed is None:
            seed = secrets.randbits(62) if self._seeds is None else self._seeds.getrandbits(62)
        return Question(rows, seed, options)

    @property
    def _models(self) -> list[PreTrainedModel]:
        return list(dict.fromkeys([self.model, *self._further.values()]))

    def _max_concurrent_turns(self, tokens: int) -> int:
        return min(saved_team.max_concurrent_turns(model, tokens) for model in self._models)

    def _episodes_that_fit(self, rows: Sequence[Mapping[str, Any]]) -> int:
        if not self._runner.generator.batches:
            return len(rows)
        lengths = [self._runner.generator.settings(agent.name)["max_new_tokens"] for agent in self.agents]
        longest = max(len(str(row.get("prompt", ""))) for row in rows)  # a token has at least one character
        return self._max_concurrent_turns(longest + sum(lengths))

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
        Convert turns of episodes to a dataset for TRL's other trainers, each turn with the observation of its agent.
        Use it to warm an agent up on its best turns (rejection sampling), or to train it offline.

        ```python
        episodes = team.run(rows, num_samples=8)
        rewards = [score(episode) for episode in episodes]
        dataset = team.to_dataset(episodes, agent="solver", rewards=rewards, best=1, threshold=1.0)
        ```

        Args:
            episodes (`Sequence[Episode]`):
                Episodes from [`Team.run`]. Episodes of the same row are compared with each other.
            kind (`str`, *optional*, defaults to `"prompt-completion"`):
                `"prompt-completion"` (for `SFTTrainer`, with a loss on the turn), `"sft"` (whole conversations, for
                `SFTTrainer`), `"dpo"` (for each prompt, the turns of the best and the worst episode that have the same
                observation), or `"kto"` (turns with a `label`: whether the reward of their episode is at least
                `threshold`, or above the mean of its prompt).
            agent (`str`, *optional*):
                Agent whose turns to convert. Defaults to all agents; the column `agent` has their names.
            rewards (`Sequence[float]`, *optional*):
                Reward of each episode. Defaults to the reward from the workflow.
            best (`int`, *optional*):
                Number of best episodes to keep per prompt. Defaults to all.
            threshold (`float`, *optional*):
                Minimum reward of the episodes to keep.

        Returns: a `datasets.Dataset`. Turns truncated at the length limit are left out where a trainer would learn
        them.

        Raises:
            ValueError: an argument is not valid, or no turn is left. The message says what to change.
        """
        names = [spec.name for spec in self.agents if spec.has_policy]
        template = self._runner.prompts.template.options
        return to_dataset(episodes, kind, names, agent, rewards, best, threshold, template)

    def __getitem__(self, agent: str) -> PreTrainedModel:
        """
        Return an agent as a PEFT model with only its adapter: `team["solver"].generate(...)`. The adapter is a copy,
        and the base is shared, so it takes no further memory. For a team without adapters, return the shared model.
        """
        adapter, model = self._find_agent(agent).adapter, self._further.get(agent, self.model)
        with self._reserve_model():
            return files.alone(model, adapter) if isinstance(model, PeftModel) else model

    def merge(self, agent: str) -> PreTrainedModel:
        """
        Return a copy of the base with the adapter of an agent merged into its weights, for use without PEFT. It does
        not include the agent's prompts, which are in `team.agents`.
        """
        adapter, model = self._find_agent(agent).adapter, self._further.get(agent, self.model)
        with self._reserve_model():
            return files.merged(model, adapter) if isinstance(model, PeftModel) else copy.deepcopy(model)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """
        Save a loaded team in the format of [`MARFTTrainer`]: one PEFT folder per adapter, tokenizer, manifest and
        model card. To save a team in training, call `trainer.save_model()`.

        Args:
            folder (`str` or `os.PathLike`): target folder, which is created if it does not exist.
        """
        with self._reserve_model():
            self._require_loaded("save_pretrained").save(Path(folder))

    def push_to_hub(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload team",
    ) -> CommitInfo:
        """
        Push a loaded team to the Hub. Adapters in the repository that this team does not have are removed.

        Args:
            repo_id (`str`): Hub id, such as `"me/my-team"`. The repository is created if it does not exist.
            private (`bool`, *optional*): whether a new repository is private. Defaults to the owner's setting.
            token (`str` or `bool`, *optional*): Hub token.
            revision (`str`, *optional*): branch to push to.
            commit_message (`str`, *optional*, defaults to `"Upload team"`): message of the commit.
        """
        saved, hub = self._require_loaded("push_to_hub"), HfApi(token=token)
        with self._reserve_model(), tempfile.TemporaryDirectory() as parent:
            name = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
            folder = Path(parent) / name.rpartition("/")[2]  # the model card has the name of the folder
            saved.save(folder)
            return hub.upload_folder(
                repo_id=name,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                delete_patterns=["*/adapter_*"],  # of agents that are no longer in the team
            )

    def _find_agent(self, name: str) -> AgentSpec:
        agents = {agent.name: agent for agent in self.agents}
        if name not in agents:
            raise ValueError(
                f"The team has no agent {name!r}, only {', '.join(map(repr, agents))}.{did_you_mean(name, agents)}"
            )
        return agents[name]

    def _require_loaded(self, method: str) -> SavedTeam:
        if self._saved is None:
            how = "Save it with `trainer.save_model()`, and load it with `Team.from_pretrained`."
            raise RuntimeError(f"`{method}` needs a loaded team, but this team is in training. {how}")
        return self._saved

    @contextlib.contextmanager
    def _running(self, options: dict[str, Any], seed: int | None) -> Iterator[EpisodeRunner]:
        devices = list(dict.fromkeys(item.device for item in self._models if item.device.type != "cpu"))
        with self._reserve_model():
            randomness = UserRandomness(seed, self.model.device) if seed is not None else None
            runner = self._runner.changed(RunMode(options), randomness=randomness, keys=SeedKeys("seeded", seed or 0))
            kind = devices[0].type if devices else "cpu"
            with torch.random.fork_rng(devices, enabled=seed is not None, device_type=kind):
                if seed is not None:
                    torch.manual_seed(seed)
                runner.generator.publish(alone=True)
                yield runner
                self._finish()

    @contextlib.contextmanager
    def _reserve_model(self) -> Iterator[None]:
        """Reserve the model for this thread and turn dropout off within the context."""
        with self._runner.device_lock, contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(in_mode(model, training=False))
            yield


def _close(runner: EpisodeRunner) -> None:
    with contextlib.suppress(Exception):  # the servers may be gone
        runner.generator.close()
