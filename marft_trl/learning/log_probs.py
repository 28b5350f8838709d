# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Passes of rows through the model, and their log-probabilities and entropies under the right adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from ..adapters.policies import Policies
from ..algorithms.rows import MicroBatch, Row
from ..config.marft_config import MARFTConfig
from ..config.team_setup import TeamSetup
from ..seams.generation import HALF
from ..seams.libraries import get_logger
from ..seams.models import ScoringTemperature, is_checkpointing
from ..seams.swapping import swapped
from ..seams.vision import ImageProcessor, of_images
from ..shared_prefix import forward
from ..system.processes import Processes


logger = get_logger(__name__)


class ModelPass:
    """
    Passes of rows through a model: TRL's, on the device of the process, or a further one on `further_device`.
    `reference` is TRL's, without adapters; `has_aux_loss`: routers have a loss.
    """

    def __init__(
        self,
        model: nn.Module,
        has_adapters: bool,
        args: MARFTConfig,
        accelerator: Accelerator,
        reference: PreTrainedModel | None = None,
        has_aux_loss: bool = False,
        further_device: torch.device | None = None,
        images: ImageProcessor | None = None,  # of a vision-language model
    ):
        self.images = images
        self.model, self.reference, self._has_adapters = model, reference, has_adapters
        self._args, self._accelerator, self.is_further = args, accelerator, further_device is not None
        self.device = further_device or accelerator.device
        base = self.unwrap_base(model)
        self._warn_of_two_precisions(base)
        with self.autocast():  # a model may run in this precision alone, such as with FlashAttention
            self.share = args.share_prefixes and self._can_share(base, has_aux_loss)
            # TRL passes no `position_ids` (as in trl#6800), so models count padding on the left. Most are not affected
            needs_positions = not self.share and forward.needs_positions(base)
        self.give_positions = self.share or (needs_positions and not has_aux_loss)
        if self.give_positions and args.torch_compile:
            why = "passes with shared prefixes call the layers of the base directly"
            why = why if self.share else f"{type(base).__name__} needs position ids, which that pass does not get"
            cure = ", or set `share_prefixes=False` to compute every row in full with compiled passes"
            raise ValueError(
                f"`torch_compile=True` compiles the forward pass of GRPOTrainer, but {why}. Set `torch_compile=False`"
                f"{cure if self.share else ''}."
            )

    def unwrap_base(self, model: nn.Module) -> PreTrainedModel:
        """The language model under the wrappers of accelerate and PEFT."""
        model = self._accelerator.unwrap_model(model)
        return model if model is self.reference or not self._has_adapters else model.get_base_model()

    @property
    def base(self) -> PreTrainedModel:
        """The language model that is trained, without wrappers."""
        return self.unwrap_base(self.model)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Compute in the precision of training within the context."""
        return self._accelerator.autocast()

    def image_inputs(self, rows: Sequence[Row], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Inputs of TRL's pass for rows with images, whose other inputs are the `tensors` of [`collate`]."""
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
        ends = [tensors["prompt_ids"].size(1)] * len(rows)
        return cast(ImageProcessor, self.images).inputs([row.images for row in rows], ids, ends)

    @property
    def is_checkpointing(self) -> bool:
        return bool(self._args.gradient_checkpointing) or is_checkpointing(self.model)

    def without_checkpointing(self) -> contextlib.AbstractContextManager[None]:
        return disable_gradient_checkpointing(self.model, self._args.gradient_checkpointing_kwargs)

    def checkpoint_gradients(self) -> None:
        """Checkpoint gradients from now on. Settings of the training arguments stay as they are."""
        model = self._accelerator.unwrap_model(self.model)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, **(self._args.gradient_checkpointing_kwargs or {})}
        )
        if self._has_adapters:
            model.enable_input_require_grads()

    def _warn_of_two_precisions(self, base: PreTrainedModel) -> None:
        """Warn if a frozen base samples in float32 and scores in mixed precision, as in `GRPOTrainer`."""
        if self._has_adapters and self._accelerator.mixed_precision in HALF and base.dtype == torch.float32:
            logger.warning(
                f"The base is in float32 and `{self._accelerator.mixed_precision}=True`, so turns are sampled in "
                "float32 and scored in half precision, as in GRPOTrainer. Log-probabilities differ, sampling is "
                "slower, and the base takes twice the memory. Load the base in half precision: "
                "`model_init_kwargs={'dtype': 'bfloat16'}`."
            )

    def _can_share(self, base: PreTrainedModel, has_aux_loss: bool) -> bool:
        reentrant = (self._args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if reentrant and self._args.gradient_checkpointing is not False:
            why: str | None = "reentrant checkpointing passes no gradients to cached keys and values"
        elif has_aux_loss:
            why = "the loss includes the router outputs of a mixture of experts"
        else:
            why = forward.find_obstacle(base)
        if why is not None:
            logger.warning(f"`share_prefixes` is off, so shared prefixes are computed again for every row: {why}.")
        return why is None

    def _dropout_of_base(self) -> dict[str, float]:
        settings = self.base.config.get_text_config().to_dict().items()
        rates = {name: value for name, value in settings if "drop" in name and isinstance(value, float) and value}
        # Not of the heads that do not generate
        return {name: value for name, value in rates.items() if not name.startswith(("classifier_", "summary_"))}

    def warn_of_dropout(self, policies: Policies) -> None:
        """Warn of dropout that differs between the scoring of turns before the updates and in the updates."""
        configs = getattr(self._accelerator.unwrap_model(self.model), "peft_config", {})
        pairs = [(adapter, agent) for adapter in policies.trained for agent in policies.get_agents(adapter)]
        rates = {agent: getattr(configs.get(adapter), "lora_dropout", 0.0) for adapter, agent in pairs}
        parts = [f"`lora_dropout={rate:g}` of agent {agent!r}" for agent, rate in rates.items() if rate]
        parts += [f"`{name}={value:g}` of the base" for name, value in self._dropout_of_base().items()]
        if parts and not self._args.disable_dropout:
            names = ("num_iterations", "steps_per_generation", *(["use_vllm"] if self._args.use_vllm else []))
            settings = ", ".join(f"{name}={getattr(self._args, name)!r}" for name in names)
            logger.warning(
                f"{', '.join(parts)}, with `{settings}`: as in GRPOTrainer, the old log-probabilities and each update "
                "use different dropout masks, so ratios differ from 1 and tokens are clipped even before the first "
                "update. Use `disable_dropout=True`, or train once on each generation batch (`num_iterations=1`, and "
                "`steps_per_generation` no more than `gradient_accumulation_steps`)."
            )

    def sample_what_they_score(self) -> bool:
        """`True` if generation computes the same log-probabilities as scoring, in float32 and without dropout."""
        base = self.base
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in base.modules())
        types = {weight.dtype for weight in base.parameters() if weight.is_floating_point()}
        is_precise = self._accelerator.mixed_precision == "no" and types <= {torch.float32}
        is_exact = torch.get_float32_matmul_precision() == "highest" and not getattr(base, "is_quantized", False)
        return is_precise and is_exact and not drops and not self._dropout_of_base()


# Changes the log-probabilities and entropies `(B, T)` before TRL's loss reads them
Transform = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LogProbs:
    """Scores completions. `plain` is TRL's own pass, see [`trl_log_probs`]; `passes` has the model of each agent."""

    def __init__(
        self,
        team: TeamSetup,
        temperature: ScoringTemperature,
        plain: Callable[..., tuple[torch.Tensor, Any, Any]],
        passes: Mapping[str, ModelPass],
        cut: Callable[[Sequence[Row]], Iterable[MicroBatch]],
        collate: Callable[[Sequence[Row]], Mapping[str, torch.Tensor]],
    ):
        self._policies, self._samplings = team.policies, team.samplings
        self._temperature, self._plain = temperature, plain
        self._pass_of, self._cut, self._collate = passes, cut, collate
        self._passes = next(iter(passes.values()))  # of the agent that is active
        self._transform: Transform | None = None
        self._hidden: torch.Tensor | None = None  # states of a pass that has been run already

    def activate(self, agent: str) -> None:
        """Let an agent's adapter act and be scored at the agent's temperature."""
        if self._hidden is None:
            self._policies.activate(agent)
        self._passes = self._pass_of[agent]
        self._temperature.switch_to(self._samplings[agent].temperature)

    @contextlib.contextmanager
    def scoring(self, dropout: bool = True) -> Iterator[None]:
        """Keep nothing for a backward pass within the context, and do not checkpoint gradients."""
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for passes in dict.fromkeys(self._pass_of.values()):
                stack.enter_context(passes.without_checkpointing())
                if not dropout:
                    stack.enter_context(forward.in_mode(passes.model, training=False))
            yield

    def with_old(self, rows: Sequence[Row]) -> list[Row]:
        """Rows with `old_per_token_logps` by the present policies, where they have none yet and are trained."""
        missing = [row for row in rows if row.is_trained and row.old_per_token_logps is None]
        scored = {row.number: logps for row, logps, _ in self._score(missing, by_reference=False)}
        return [replace(row, old_per_token_logps=scored.get(row.number, row.old_per_token_logps)) for row in rows]

    def with_reference(self, rows: Sequence[Row], num_features: Callable[[Row], int] = lambda row: 0) -> list[Row]:
        """Rows, where trained, with `ref_per_token_logps` and, as `features`, `num_features(row)` of its states."""
        filled = {}
        for row, logps, hidden in self._score([row for row in rows if row.is_trained], by_reference=True):
            count = num_features(row) if hidden is not None else 0
            features = hidden[:count].cpu().clone() if hidden is not None and count else row.features
            filled[row.number] = replace(row, ref_per_token_logps=logps, features=features)
        return [filled.get(row.number, row) for row in rows]

    def next_token(self, agent: str, ids: Sequence[int], by_reference: bool = False) -> torch.Tensor:
        """Log-probabilities `(V,)` of the token after `ids`, at temperature 1 and without dropout."""
        self.activate(agent)
        speaker = self._policies.reference(agent) if by_reference else contextlib.nullcontext()
        with self.scoring(dropout=False), speaker, self._passes.autocast():
            base = self._passes.base
            logits = base(input_ids=torch.tensor([list(ids)], device=base.device)).logits[0, -1].float()
        return torch.log_softmax(logits, dim=-1)

    def compute_log_probs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Log-probabilities `(L,)` of rows under the present policies."""
        scored = {row.number: logps for row, logps, _ in self._score(rows, by_reference=False)}
        return [scored[row.number] for row in rows]

    def _score(
        self, rows: Sequence[Row], by_reference: bool
    ) -> Iterator[tuple[Row, torch.Tensor, torch.Tensor | None]]:
        """For each row its log-probabilities `(L,)` and, where they are known, its hidden states `(V, H)`."""
        for batch in self._cut(rows):
            tensors = self._collate(batch.rows)
            ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
            mask = torch.cat([tensors["prompt_mask"], tensors["completion_attention"]], dim=1)
            self.activate(batch.agent)
            model = self._passes.model
            speaker: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if by_reference and self._passes.reference is not None:
                model = self._passes.reference
            elif by_reference:
                speaker = self._policies.reference(batch.agent)
            width = tensors["completion_ids"].size(1)
            with speaker:
                if self._passes.give_positions and not batch.has_images:
                    logps, _, hidden = self._placed(model, ids, mask, width)
                else:
                    logps, *_ = self._plain(model, ids, mask, width, **of_images(tensors))
                    hidden = [None] * len(batch.rows)
            for row, value, states in zip(batch.rows, logps.cpu(), hidden, strict=True):
                yield row, value[: len(row.completion_ids)].clone(), states

    def compute_states(self, batch: MicroBatch) -> torch.Tensor:
        """Hidden states `(B, V, H)` of a micro-batch, for [`~LogProbs.reading`]."""
        prompts = [row.prompt_ids.tolist() for row in batch.rows]
        completions = [row.completion_ids.tolist() for row in batch.rows]
        self.activate(batch.agent)
        with self._passes.autocast():
            return forward.hidden_states(self._passes.base.base_model, prompts, completions, self._passes.share)

    def reading(self, hidden: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Compute log-probabilities from these states `(B, V, H)` of a pass within the context."""
        return swapped(self, {"_hidden": hidden})

    def transformed(self, transform: Transform) -> contextlib.AbstractContextManager[None]:
        """Pass the result of `transform(logps, entropies)` to TRL's loss within the context."""
        return swapped(self, {"_transform": transform})

    def for_trl(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        """Log-probabilities, entropies and auxiliary loss, as `_get_per_token_logps_and_entropies` returns them."""
        model = self._passes.model if self._passes.is_further else model  # TRL passes its own, maybe with wrappers
        has_images = kwargs.get("num_images") is not None
        if self._passes.give_positions and self._transform is not None and not has_images:
            logps, entropies, _ = self._placed(model, input_ids, attention_mask, logits_to_keep)
            aux_loss = None
        else:
            logps, entropies, aux_loss = self._plain(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if self._transform is not None:
            logps, entropies = self._transform(logps, entropies)
        return logps, entropies, aux_loss

    def _placed(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Log-probabilities and entropies `(B, T)` of completions, 0 where they are masked (entropies of a separate
        reference too), and the hidden states `(B, V, H)` they were read from. Every row begins at position 0.
        `input_ids` and `attention_mask` are `(B, P + T)`, with prompts padded on the left; `width` is `T`.
        """
        base, device = self._passes.unwrap_base(model), input_ids.device
        # Read from the device at once: on a GPU, each look would wait for what was launched before
        ids, are_there = input_ids.tolist(), attention_mask.tolist()
        prompts = [list(compress(row[:-width], item[:-width])) for row, item in zip(ids, are_there, strict=True)]
        completions = [list(compress(row[-width:], item[-width:])) for row, item in zip(ids, are_there, strict=True)]
        with self._passes.autocast():
            hidden = self._hidden
            if hidden is None:
                hidden = forward.hidden_states(base.base_model, prompts, completions, self._passes.share)
            size = hidden.size(1)
            read = [row * size + place for row, item in enumerate(completions) for place in range(len(item))]
            states = hidden.flatten(0, 1).index_select(0, torch.tensor(read, dtype=torch.long, device=hidden.device))
            tokens = [token for completion in completions for token in completion]
            logps, entropies = forward.score(base, states, torch.tensor(tokens, dtype=torch.long, device=device))
        columns = [compress(range(width), entry[-width:]) for entry in are_there]
        written = [row * width + column for row, row_columns in enumerate(columns) for column in row_columns]
        places = torch.tensor(written, dtype=torch.long, device=device)

        def spread(values: torch.Tensor) -> torch.Tensor:
            empty = torch.zeros(len(ids) * width, device=device)
            return empty.index_copy(0, places, values.to(device)).view(len(ids), width)

        zeros = torch.zeros(len(ids), width, device=device)
        return spread(logps), zeros if entropies is None else spread(entropies), hidden

    def entropies(self, batch: MicroBatch) -> torch.Tensor:
        """Entropies of the tokens of a micro-batch that its loss counts `(N,)`."""
        tensors = self._collate(batch.rows)
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
        mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1)
        self.activate(batch.agent)
        width = tensors["completion_ids"].size(1)
        with self._passes.without_checkpointing():
            if self._passes.give_positions and not batch.has_images:
                _, entropies, _ = self._placed(self._passes.model, ids, mask, width)
            else:
                options = {"compute_entropy": True, **of_images(tensors)}
                _, entropies, _ = self._plain(self._passes.model, ids, mask, width, **options)
        return entropies[tensors["completion_mask"].bool()].float()

    @torch.no_grad()
    def high_entropy_thresholds(
        self, rows: Sequence[Row], quantile: float, processes: Processes
    ) -> dict[str, torch.Tensor]:
        """Of agents with several micro-batches or processes, the entropy above which tokens are trained."""
        if quantile >= 1.0:
            return {}
        batches: dict[str, list[MicroBatch]] = {name: [] for name in self._samplings}
        for batch in self._cut(rows):
            batches[batch.agent].append(batch)
        thresholds = {}
        for agent, agent_batches in batches.items():
            if processes.count == 1 and len(agent_batches) < 2:
                continue
            entropies = [value for batch in agent_batches for value in self.entropies(batch).tolist()]
            everywhere = torch.tensor(processes.gather(entropies), device=processes.device)
            if len(everywhere):
                thresholds[agent] = torch.quantile(everywhere, 1 - quantile)
        return thresholds
