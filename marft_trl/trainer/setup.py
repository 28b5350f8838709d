# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Set-up before training: base model, tokenizer, workflow and critic, and checks of the trainer's arguments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl import GRPOConfig
from trl.trainer.utils import create_model_from_path, get_config_model_id

from ..adapters.lora import check_adapter_config
from ..adapters.manifest import MANIFEST_NAME, loading_model
from ..adapters.policies import Policies
from ..agents import AgentSpec, as_reward_funcs, as_tools
from ..algorithms.baselines import CREDITS
from ..algorithms.critics import CRITICS, Critic
from ..algorithms.rows import Level
from ..config.checks import (
    check_engine,
    check_timeouts,
    completes_candidates,
    environment_flag_is_set,
    uses_candidates,
)
from ..config.dataset_checks import PLACEHOLDER, check_datasets, named_sets
from ..config.marft_config import MARFTConfig
from ..episodes.tools import ToolLimits
from ..rewards import environment_reward
from ..rollout.reward_scorer import check_judges, check_reward_functions, check_turn_reward_functions, unique_names
from ..seams.libraries import get_logger
from ..seams.models import keep_4bit_weights
from ..seams.runs import timeout_of_processes
from ..system.hints import brief, did_you_mean
from ..system.processes import device_map_kwargs, restrict_to_one_device
from ..system.redaction import without_secrets
from ..workflows import ByColumn, EnvironmentLoop, Sequential, Workflow
from ..workflows.base import alias_names, anonymize


if TYPE_CHECKING:
    from ..extras.engines.setup import Engine


logger = get_logger(__name__)


def as_marft_config(args: GRPOConfig | None, model: str | PreTrainedModel | PeftModel) -> MARFTConfig:
    """Convert the arguments to a [`MARFTConfig`]. Without any, the folder of the run is named after the model."""
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return MARFTConfig(f"{name.split('/')[-1]}-MARFT")
    if isinstance(args, MARFTConfig):
        return args
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a `MARFTConfig` (or a `GRPOConfig`), got {type(args).__name__}.")
    return MARFTConfig.of(args)


def load_processing_class(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    model: PreTrainedModel | PeftModel,
    args: MARFTConfig,
    init_kwargs: Mapping[str, Any] | None,
) -> PreTrainedTokenizerBase | ProcessorMixin:
    if processing_class is None:
        processing_class = AutoProcessor.from_pretrained(
            get_config_model_id(model.config),
            revision=(init_kwargs or {}).get("revision"),
            truncation_side="left",
            padding_side="left",
            trust_remote_code=args.trust_remote_code,
        )
        if isinstance(processing_class, PreTrainedTokenizerBase) and not processing_class("How many?")["input_ids"]:
            raise ValueError(
                f"`model={get_config_model_id(model.config)!r}` has no tokenizer, and the one that transformers makes "
                "has no vocabulary. Pass `processing_class=AutoTokenizer.from_pretrained(...)`."
            )
    if not isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
        raise TypeError(f"`processing_class` must be a tokenizer or processor, got {type(processing_class).__name__}.")
    if isinstance(processing_class, ProcessorMixin) and getattr(processing_class, "image_token", None) is None:
        raise ValueError(
            f"The processor {type(processing_class).__name__} is not that of a vision-language model: it has no "
            "`image_token`. Pass its tokenizer as `processing_class` to train on texts."
        )
    return processing_class


# Variables by which launchers say how many processes they have started
_COUNTS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def _warn_of_lone_process(world_size: int) -> None:
    """
    Warn of a process that trains alone although a launcher has started several: each trains a run of its own, without
    an error. `accelerate launch` (1.15) does so for `distributed_type: MULTI_CPU` and `--cpu` without MPI.
    """
    counts = {name: os.environ[name] for name in _COUNTS if os.environ.get(name, "").isdigit()}
    if more := {name: count for name, count in counts.items() if int(count) > world_size}:
        why = f"the launcher reports {', '.join(f'{name}={count}' for name, count in more.items())}"
    elif world_size == 1 and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        why = "the launcher has set MASTER_PORT, as for several processes, and no WORLD_SIZE"
    else:
        return
    logger.warning(
        f"This run has {world_size} process{'es' if world_size > 1 else ''}, but {why}, so the other processes "
        "may be separate runs. Use `torchrun --nnodes ... --nproc_per_node ...`, or `accelerate launch` with "
        "`distributed_type: MULTI_GPU` (on a CPU with ACCELERATE_USE_CPU=true). See docs/guide/several_machines.md."
    )


def check_launcher(args: MARFTConfig) -> ModuleType | None:
    """Check the launcher of a run. Returns the module that shards the base, if FSDP is requested."""
    check_engine(args)
    _warn_of_lone_process(args.world_size)
    if args.world_size > 1:
        check_timeouts(args, timeout_of_processes())
    if not args.fsdp and not environment_flag_is_set("ACCELERATE_USE_FSDP"):
        return None
    from ..extras.engines import fsdp2

    fsdp2.check_plugin(args)
    return fsdp2


def make_engines(args: MARFTConfig, agents: Mapping[Any, Sequence[AgentSpec]]) -> dict[Any, Engine]:
    """The servers of each model, given its agents; none if this process generates."""
    if not args.use_vllm:
        return {}
    from ..extras.engines.setup import start_engine

    return {model: start_engine(args, model, own) for model, own in agents.items()}


def named_apart(names: Sequence[str]) -> list[str]:
    """Return the names of reward functions for metrics. Repeated names get a number, with a warning."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        logger.warning(
            f"Several reward functions have the name {', '.join(map(repr, repeated))}. Their metrics are "
            f"{', '.join(f'`rewards/{name}`' for name in unique_names(names))}, in the order of `reward_funcs`. Give "
            "each function a unique name (`def`, or `function.__name__ = ...`) to tell them apart."
        )
    return unique_names(names)


def user_objects(
    reward_funcs: Sequence, turn_rewards: Mapping[str, Sequence], workflow: Workflow, agents: Sequence[AgentSpec]
) -> dict[str, Any]:
    """Users' objects that may have state, by the names that they have in checkpoints and messages."""
    objects: dict[str, Any] = {}
    for owner, functions in {"": reward_funcs, **turn_rewards}.items():
        for position, function in enumerate(functions):
            name = f"{owner}.reward_funcs[{position}]" if owner else f"reward_funcs[{position}]"
            # Two methods of one object have one state
            objects[name] = getattr(function, "__self__", function)  # the object of a bound method
    for agent in agents:
        if agent.reply is not None:
            reply = agent.reply
            while isinstance(reply, functools.partial):
                reply = reply.func
            objects[f"{agent.name}.reply"] = getattr(reply, "__self__", reply)
    return {**objects, "workflow": workflow, "environment": getattr(workflow, "environment", None)}


def tool_limits(args: MARFTConfig) -> ToolLimits:
    return ToolLimits(args.max_tool_calls, args.max_tool_calling_iterations, seconds=args.tool_timeout)


def with_tools(agents: Sequence[AgentSpec], tools: Any) -> list[AgentSpec]:
    # As in TRL, tools of the trainer are everybody's; an agent's own replace them
    general = as_tools(tools, "the trainer")
    return [
        dataclasses.replace(agent, tools=general) if general and agent.has_policy and agent.tools is None else agent
        for agent in agents
    ]


def choose_workflow(
    agents: Sequence[AgentSpec], workflow: Workflow | None, environment_factory: Any, rollout_func: Any
) -> Workflow:
    """Return the workflow, checked: `workflow`, an `EnvironmentLoop` if there is an environment, or else a chain."""
    if rollout_func is not None:
        raise ValueError("`rollout_func` is not supported by MARFTTrainer. Pass a workflow as `workflow=`.")
    if environment_factory is not None and workflow is not None:
        raise ValueError("`workflow` and `environment_factory` were both passed. Leave one of them out.")
    if isinstance(environment_factory, Mapping):  # as in TRL, rows choose among several by a column
        workflow = ByColumn({name: EnvironmentLoop(factory) for name, factory in environment_factory.items()})
    elif environment_factory is not None:
        workflow = EnvironmentLoop(environment_factory)
    return check_workflow(Sequential() if workflow is None else workflow, agents)


def check_votes(args: MARFTConfig, vote: Any, rewards: Sequence[str]) -> None:
    if vote is not None and not callable(vote):
        raise TypeError(f"`eval_vote` must be a function that takes the text of an answer, got {vote!r}.")
    if args.eval_right_by is not None and args.eval_right_by not in rewards:
        raise ValueError(
            f"`eval_right_by={args.eval_right_by!r}` is not a reward function; the reward functions are "
            f"{', '.join(map(repr, rewards))}.{did_you_mean(args.eval_right_by, rewards)}"
        )


def prepare_datasets(args: MARFTConfig, workflow: Workflow, train_dataset: Any, eval_dataset: Any) -> tuple[Any, Any]:
    """Return both datasets after all checks. Where environments own the data, missing prompts are empty."""
    prompts_per_generation = args.generation_batch_size // args.num_generations
    if train_dataset is None and isinstance(workflow, EnvironmentLoop):
        if args.max_steps <= 0:
            raise ValueError(
                "When training without a `train_dataset` (the environment returns the prompt from `reset()`), "
                "`max_steps` must be set to a positive value. Set it via `MARFTConfig(max_steps=...)`."
            )
        # As in `GRPOTrainer` (1.16). The environment gives the prompts, so any number of rows would do
        train_dataset = Dataset.from_dict({"prompt": [PLACEHOLDER] * prompts_per_generation})
    train_dataset, eval_dataset = with_prompts(workflow, train_dataset), with_prompts(workflow, eval_dataset)
    check_best_metric(args, eval_dataset)
    check_datasets(train_dataset, eval_dataset, prompts_per_generation)
    check_column(args, workflow, train_dataset, eval_dataset)
    check_stream(args, train_dataset)
    return train_dataset, eval_dataset


def with_prompts(workflow: Workflow, dataset: Any) -> Any:
    """A dataset, or several by name, with empty prompts where it has none and environments give them."""
    if isinstance(dataset, Mapping):
        return {name: with_prompts(workflow, item) for name, item in dataset.items()}
    played = workflow.workflows.values() if isinstance(workflow, ByColumn) else [workflow]
    have_environments = all(isinstance(item, EnvironmentLoop) for item in played)
    if not have_environments or not isinstance(dataset, (Dataset, IterableDataset)):
        return dataset
    columns = dataset.column_names
    if columns is None:
        return dataset.map(lambda row: {"prompt": PLACEHOLDER, **row})
    return dataset if "prompt" in columns else dataset.map(lambda row: {"prompt": PLACEHOLDER})


def prepare_rewards(
    args: MARFTConfig,
    agents: Sequence[AgentSpec],
    workflow: Workflow,
    reward_funcs: Any,
    train_dataset: Any,
    eval_dataset: Any,
) -> tuple[list, list[float] | None, dict[str, tuple[Callable, ...]]]:
    """Return the team's reward functions, their weights, and the functions of turns by agent, after all checks."""
    functions, weights = team_reward_funcs(reward_funcs, args, workflow)
    check_reward_functions(functions, train_dataset, eval_dataset)
    of_turns = turn_reward_funcs(args, agents, workflow)
    check_judges(agents, functions, of_turns)
    check_turn_reward_functions(of_turns, train_dataset)
    if args.remove_unused_columns and "prompt" in (train_dataset.column_names or ()):
        prompts = train_dataset.select_columns(["prompt"])
        try:
            check_reward_functions(functions, prompts)
            check_turn_reward_functions(of_turns, prompts)
        except ValueError as error:
            raise ValueError(
                f"`remove_unused_columns=True` keeps only the column `prompt`. Set it to False. {error}"
            ) from None
    return functions, weights, of_turns


def check_best_metric(args: MARFTConfig, eval_dataset: Any) -> None:
    """Check that several evaluation sets log `metric_for_best_model`, and that no setting needs a single set."""
    metric = args.metric_for_best_model
    if isinstance(eval_dataset, dict) and args.on_collapse == "restore":
        raise ValueError(
            "`on_collapse='restore'` needs `eval_reward`, which is not logged with several evaluation sets. Pass one "
            "`eval_dataset`, or set `on_collapse='warn'`."
        )
    if not isinstance(eval_dataset, dict) or not eval_dataset or metric is None:
        return
    names = [f"{name}_" for name in eval_dataset]
    own = metric.removeprefix("eval_")  # with several sets, the Trainer looks for `eval_<set>_<name>`
    if not own.startswith(tuple(names)):
        raise ValueError(
            f"`metric_for_best_model={metric!r}` is not a metric of the evaluation sets "
            f"{', '.join(map(repr, eval_dataset))}: each starts with the name of a set. Set e.g. {names[0] + own!r}."
        )


def check_column(args: MARFTConfig, workflow: Workflow, train_dataset: Any, eval_dataset: Any) -> None:
    """Check that the column of [`ByColumn`] selects a workflow for each row, and that `rae_column` exists."""
    present = train_dataset.column_names if args.rae_column is not None else None
    if args.rae_column is not None and present is not None and args.rae_column not in present:
        hint = did_you_mean(args.rae_column, present) or f" It has {', '.join(map(repr, sorted(present)))}."
        raise ValueError(f"`rae_column={args.rae_column!r}` is not a column of `train_dataset`.{hint}")
    if not isinstance(workflow, ByColumn):
        return
    if args.remove_unused_columns:
        raise ValueError(
            f"`remove_unused_columns=True` keeps only the column `prompt`, but the column {workflow.column!r} selects "
            "the workflow. Set `remove_unused_columns=False`."
        )
    for name, dataset in {"train_dataset": train_dataset, **named_sets(eval_dataset)}.items():
        names = dataset.column_names if dataset is not None else [workflow.column] * (name != "train_dataset")
        if names is not None and workflow.column not in names:
            raise ValueError(
                f"`{name}` needs the column {workflow.column!r}, which selects the environment (or workflow) of each "
                f"row; it has {sorted(names)}."
            )
        for value in dataset.unique(workflow.column) if isinstance(dataset, Dataset) else ():
            workflow.of(value)


def check_eval_set(dataset: Any, known: Any) -> None:
    names = list(known) if isinstance(known, Mapping) else []
    if isinstance(dataset, str) and dataset not in names:
        hint = f"the sets are {', '.join(map(repr, names))}" if names else "the sets of the trainer have no names"
        raise ValueError(f"Unknown evaluation set {dataset!r}: {hint}. Pass a known name, or a `Dataset`.")


def check_workflow(workflow: Workflow, agents: Sequence[AgentSpec]) -> Workflow:
    if not isinstance(workflow, Workflow):
        hint = " Pass an object: `workflow=MyWorkflow()`." if isinstance(workflow, type) else ""
        if hasattr(workflow, "reset"):
            hint = " For an environment, pass `workflow=EnvironmentLoop(Environment)` with its class."
        elif inspect.isroutine(workflow):
            hint = (
                " Put the function into a class as `async def run(self, episode)`: `class MyWorkflow(Workflow)`, and "
                "pass `workflow=MyWorkflow()`. For an application that calls an OpenAI client, pass "
                "`workflow=ExternalApp(function)`."
            )
        raise TypeError(f"`workflow` must be a `Workflow`, got {workflow!r}.{hint}")
    # Names that a workflow was made with may be misspelt; a run would find out in its first episode
    workflow.check([agent.name for agent in agents])
    if not any(agent.trainable for agent in agents):
        raise ValueError(
            "All agents have `trainable=False` or `reply` (a function writes their turns), so nothing would be "
            "trained. Make at least one agent trainable."
        )
    return workflow


def team_reward_funcs(reward_funcs: Any, args: MARFTConfig, workflow: Workflow) -> tuple[list, list[float] | None]:
    """Return the team's reward functions and weights, with [`environment_reward`] if the workflow earns rewards."""
    weights = args.reward_weights
    reward_funcs = list(reward_funcs) if isinstance(reward_funcs, tuple) else reward_funcs
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] * (reward_funcs is not None)
    if workflow.earns and uses_candidates(args) and CREDITS[args.credit].scores_turns:
        raise ValueError(
            "`advantage='turn'` with `credit='per_step'` scores each candidate only by its own reward functions, not "
            f"by the rewards of the workflow `{type(workflow).__name__}`. Set `credit='equal'`, which completes the "
            "episode from every candidate."
        )
    if workflow.earns and uses_candidates(args) and not completes_candidates(args):
        raise ValueError(
            "`advantage='turn_itself'` scores each candidate before the episode continues, so the rewards of the "
            f"workflow `{type(workflow).__name__}` are not known yet. Set `advantage='turn'`."
        )
    if workflow.earns and args.multi_objective_aggregation == "normalize_then_sum" and args.credit_kind == "rewards":
        raise ValueError(
            "`multi_objective_aggregation='normalize_then_sum'` changes the rewards of the workflow, so "
            "`credit_kind='rewards'` cannot assign them to the turns that earned them. Set `credit_kind='returns'`."
        )
    own = [item for item in functions if getattr(item, "__name__", "") == environment_reward.__name__]
    if workflow.earns and any(function is not environment_reward for function in own):
        raise ValueError(
            "A function in `reward_funcs` is named 'environment_reward', like the function that the trainer adds for "
            f"the rewards of the workflow `{type(workflow).__name__}`. Rename your function."
        )
    if workflow.earns and environment_reward not in functions:
        if weights is not None and len(weights) == len(functions):
            weights = [*weights, 1.0]
        functions = [*functions, environment_reward]
    return functions, weights


def prompted(agents: Sequence[AgentSpec], workflow: Workflow, anonymous: str | None = None) -> list[AgentSpec]:
    for agent in agents:
        if without_secrets(agent.system_prompt) != agent.system_prompt:
            logger.warning(
                f"The system prompt of agent {agent.name!r} has what looks like a secret (a token, or a password in a "
                "URL). The prompt is saved and published with the team, and shown to the model. Remove the secret "
                "unless this is intended."
            )
    if anonymous is not None:
        aliases = alias_names(agents)
        prompts = workflow.system_prompts([dataclasses.replace(agent, description=None) for agent in agents], aliases)
        return anonymize(agents, anonymous, prompts)
    prompts = workflow.system_prompts(agents)  # an agent's own prompt goes before that of its role
    return [
        dataclasses.replace(agent, system_prompt=prompts[agent.name])
        if agent.system_prompt is None and agent.name in prompts
        else agent
        for agent in agents
    ]


def turn_reward_funcs(
    args: MARFTConfig, agents: Sequence[AgentSpec], workflow: Workflow
) -> dict[str, tuple[Callable, ...]]:
    """Reward functions of single turns, by agent: those of the agent, or else those of the workflow."""
    general = as_reward_funcs(workflow.reward_funcs, f"the workflow `{type(workflow).__name__}`")
    functions = {agent.name: as_reward_funcs(agent.reward_funcs, agent.name) or general for agent in agents}
    for agent in agents:
        if CREDITS[args.credit].scores_turns and agent.trainable and not functions[agent.name] and not workflow.earns:
            raise ValueError(
                f"`credit='per_step'` scores every turn, but no function scores the turns of agent {agent.name!r}. "
                "Set its `AgentSpec(reward_funcs=...)`, such as `get_outcome_reward(your_reward)` of "
                "`marft_trl.rewards` for the reward of the whole episode, or set `reward_funcs` of the workflow."
            )
        if not CREDITS[args.credit].scores_turns and functions[agent.name]:
            raise ValueError(
                f"`reward_funcs` of agent {agent.name!r} (or of the workflow) score single turns, which "
                f"`credit={args.credit!r}` does not use. Set `credit='per_step'`, or leave them out."
            )
    return functions


def check_stream(args: MARFTConfig, train_dataset: Any) -> None:
    if args.dynamic_sampling and isinstance(train_dataset, IterableDataset):
        raise ValueError(
            "`dynamic_sampling=True` draws further prompts at random, which a streamed `train_dataset` does not "
            "support. Pass a `Dataset`, or leave `dynamic_sampling` out."
        )
    if args.update_order == "sequential" and isinstance(train_dataset, IterableDataset):
        raise ValueError(
            "`update_order='sequential'` uses every generation batch once per agent, but TRL repeats the rows of a "
            "streamed `train_dataset` a fixed number of times, so most of them would be skipped. Pass a `Dataset`, or "
            "set `update_order='resampled'`."
        )


def check_learning(args: MARFTConfig, base: PreTrainedModel | PeftModel, sharding: ModuleType | None) -> None:
    has_adapters = isinstance(base, PeftModel)
    if sharding is not None:
        sharding.check_team(has_adapters)
    if not has_adapters:
        needs = {"critic": args.critic is not None, "credit": CREDITS[args.credit].uses_references}
        needs["on_collapse"] = args.on_collapse == "restore"
        for name, is_set in needs.items():
            if is_set:
                raise ValueError(
                    f"`{name}={getattr(args, name)!r}` needs a frozen base, but without a `peft_config` the base "
                    "itself is trained. Pass `peft_config=LoraConfig(...)`."
                )
    if args.cast_lm_head_to_fp32 and has_adapters and base.config.get_text_config().tie_word_embeddings:
        raise ValueError(
            "`cast_lm_head_to_fp32=True` does not support adapters on a base with tied embeddings "
            "(`tie_word_embeddings`), whose head cannot be cast alone. Leave it out, or load the base in float32."
        )


def make_critic(
    args: MARFTConfig,
    policies: Policies,
    agents: Sequence[AgentSpec],
    peft_config: PeftConfig | None,
    level: Level,
    autocast: Callable[[], Any],
) -> Critic | None:
    kind = CRITICS[args.critic] if args.critic is not None else None
    if peft_config is not None and (kind is None or not kind.has_adapters):
        raise ValueError(f"`critic_peft_config` was passed, but `critic={args.critic!r}` has no LoRA. Leave it out.")
    if kind is None:
        return None
    configs: dict[str, PeftConfig] = {}
    for agent in agents:
        model, config = cast(PeftModel, policies.get_model(agent.name)), peft_config
        if config is None:
            # Layers and rank of a policy are known to fit the base
            fitting = (other.adapter for other in agents if other.has_policy and other.adapter in model.peft_config)
            config = copy.deepcopy(model.peft_config[next(fitting)])
            config.inference_mode = False
            if hasattr(config, "init_lora_weights"):
                config.init_lora_weights = True  # other values may change the base, which the policies share
        check_adapter_config(AgentSpec("critic"), config, model.get_base_model())
        configs[agent.name] = config
    return kind(policies, level, agents, configs, autocast)


def load_base(
    model: str | PreTrainedModel | PeftModel,
    args: MARFTConfig,
    quantization_config: Any,
    is_frozen: bool,
    init_kwargs: Mapping[str, Any] | None,
) -> PreTrainedModel | PeftModel:
    """
    Return the base model. A name is loaded like in `GRPOTrainer`, but for the precision of a frozen base, see
    [`choose_dtype`], and for its device: one process has one, and TRL's `device_map="auto"` would spread the base over
    all that the machine shows. `init_kwargs` are those of `from_pretrained`.
    """
    make_output_dir(args)
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    if isinstance(model, str):
        base = _load_by_name(model, args, quantization_config, is_frozen, dict(init_kwargs or {}))
    elif isinstance(model, (PreTrainedModel, PeftModel)):
        base = model
        if quantization_config is not None:
            logger.warning(
                "You passed `quantization_config` to the trainer, but your model is already instantiated. The "
                "`quantization_config` will be ignored."
            )
    else:
        raise TypeError(f"`model` must be the name or folder of a model, or a model, got {type(model).__name__}.")
    keep_4bit_weights(base)
    _warn_of_generation_config(base, args)
    restrict_to_one_device(args, base)
    return base


def _load_by_name(
    model: str, args: MARFTConfig, quantization_config: Any, is_frozen: bool, model_init_kwargs: dict[str, Any]
) -> PreTrainedModel:
    if (Path(model) / MANIFEST_NAME).is_file():
        raise ValueError(
            f"`model={model!r}` is the folder of a saved team. To continue training, load its adapters onto the base: "
            f"`model=load_adapters(AutoModelForCausalLM.from_pretrained(base), {model!r})`. For inference, use "
            f"`Team.from_pretrained({model!r})`."
        )
    if isinstance(quantization_config, bool):
        raise TypeError("`quantization_config` must be a config such as `BitsAndBytesConfig(load_in_4bit=True)`.")
    if quantization_config is not None:
        if "quantization_config" in model_init_kwargs:
            raise ValueError(
                "You set `quantization_config` both as a trainer argument and in `args.model_init_kwargs`. "
                "Please set it in only one place, preferably as a trainer argument."
            )
        model_init_kwargs["quantization_config"] = quantization_config
    if args.world_size > 1:
        model_init_kwargs["device_map"] = None  # "auto" fails in distributed training
    elif "device_map" not in model_init_kwargs:
        model_init_kwargs |= device_map_kwargs(args.device)
    if (dtype := choose_dtype(args, is_frozen, model_init_kwargs)) is not None:
        model_init_kwargs["dtype"] = dtype
        if "quantization_config" in model_init_kwargs:
            model_init_kwargs["quantization_config"] = computing_in(model_init_kwargs["quantization_config"], dtype)
    model_init_kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    with loading_model(model):
        return create_model_from_path(model, **model_init_kwargs)


def make_output_dir(args: Any) -> None:
    """Make the folder of the run, or raise, before the base is loaded, which can take minutes."""
    try:
        if args.should_save:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The folder `output_dir={args.output_dir!r}` cannot be created: {error.strerror}: {error.filename!r}. "
            "Set `output_dir` to a folder that exists or can be created."
        ) from error


def stays_frozen(agents: Sequence[AgentSpec], peft_config: PeftConfig | None) -> bool:
    """`True` if the base of a team stays frozen and only adapters are trained."""
    configs = [config for agent in agents if (config := agent.peft_config or peft_config) is not None]
    whole = ("modules_to_save", "trainable_token_indices")  # PEFT trains copies of these in the precision of the base
    return bool(configs) and not any(getattr(config, name, None) for config in configs for name in whole)


def choose_dtype(args: MARFTConfig, is_frozen: bool, init_kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """
    Precision of the weights of a base that is loaded by name, if the user sets none; `None` for TRL's float32.

    With mixed precision on a GPU, products of a float32 base are cast to bfloat16 in training but not in generation,
    which takes more memory and time, and samples from other numbers than are scored. A base that stays frozen loses
    nothing in bfloat16 that training would need. Adapters stay in float32.
    """
    if not args.bf16 or args.device.type == "cpu" or "dtype" in init_kwargs:
        return None
    if is_frozen:
        logger.info(
            "The base is frozen and loaded in bfloat16; adapters are trained in float32. To load the base in float32, "
            "set `model_init_kwargs={'dtype': 'float32'}`."
        )
        return torch.bfloat16
    logger.info(
        "The weights of the base are trained, so they are loaded in float32, and products are computed in bfloat16. "
        "To halve their memory, set `model_init_kwargs={'dtype': 'bfloat16'}`."
    )
    return None


def computing_in(quantization_config: Any, dtype: torch.dtype | None) -> Any:
    """
    The config of a 4-bit base that computes in the precision that it is loaded in. The default of bitsandbytes (0.50),
    float32, casts inputs and weights in every pass, and cannot be told from a choice (for it, set `dtype`).
    """
    if isinstance(quantization_config, dict):
        follows = dtype is not None and quantization_config.get("load_in_4bit")
        return {"bnb_4bit_compute_dtype": dtype, **quantization_config} if follows else quantization_config
    computes = getattr(quantization_config, "bnb_4bit_compute_dtype", None)
    if dtype is None or computes != torch.float32 or not getattr(quantization_config, "load_in_4bit", False):
        return quantization_config
    quantization_config = copy.deepcopy(quantization_config)
    quantization_config.bnb_4bit_compute_dtype = dtype
    return quantization_config


# Settings of a generation config that training arguments replace, and those that do not say what is sampled
_REPLACED = {
    *("temperature", "top_p", "top_k", "repetition_penalty", "do_sample", "max_length", "max_new_tokens"),
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "cache_implementation"),
    *("use_cache", "cache_config", "disable_compile", "compile_config", "transformers_version"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
    "prefill_chunk_size",
}


def _warn_of_generation_config(base: PreTrainedModel | PeftModel, args: MARFTConfig) -> None:
    """Warn of settings in the generation config of the base that have no effect. Only its end tokens are used."""
    config = getattr(base, "generation_config", None)
    defaults = config.to_diff_dict() if config is not None else {}
    replaced = {*_REPLACED, *(args.generation_kwargs or {}), *(["min_p"] if args.min_p is not None else [])}
    unused = {name: value for name, value in defaults.items() if not name.startswith("_") and name not in replaced}
    if unused:
        logger.warning(
            "The generation config of the base sets "
            f"{', '.join(f'{name}={brief(repr(value), 60)}' for name, value in unused.items())}, which has no effect: "
            f"the training arguments set how turns are sampled. To use {', '.join(map(repr, unused))}, set "
            f"{'`min_p`' if set(unused) == {'min_p'} else '`generation_kwargs`'}."
        )
