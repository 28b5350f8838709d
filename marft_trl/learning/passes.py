# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The model as rows go through it: shared prefixes, positions, precision, gradient checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from ..adapters.policies import Policies
from ..config.marft_config import MARFTConfig
from ..seams.generation import HALF
from ..seams.libraries import get_logger
from ..seams.models import is_checkpointing
from ..shared_prefix import forward


logger = get_logger(__name__)


class ModelPass:
    """
    How rows go through a model: whether they share common prefixes, whether they get positions, and what is kept for
    the backward pass. `reference` is TRL's reference model, of a team without adapters; `has_aux_loss`: the routers of
    a mixture of experts have a loss.
    """

    def __init__(
        self,
        model: nn.Module,
        has_adapters: bool,
        args: MARFTConfig,
        accelerator: Accelerator,
        reference: PreTrainedModel | None = None,
        has_aux_loss: bool = False,
    ):
        self.model, self.reference, self._has_adapters = model, reference, has_adapters
        self._args, self._accelerator = args, accelerator
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

    @property
    def device(self) -> torch.device:
        return self._accelerator.device

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: the precision of training."""
        return self._accelerator.autocast()

    # ---- What is kept for the backward pass ----

    @property
    def is_checkpointing(self) -> bool:
        return bool(self._args.gradient_checkpointing) or is_checkpointing(self.model)

    def without_checkpointing(self) -> contextlib.AbstractContextManager[None]:
        """Context manager: gradients are not checkpointed."""
        return disable_gradient_checkpointing(self.model, self._args.gradient_checkpointing_kwargs)

    def checkpoint_gradients(self) -> None:
        """Checkpoint gradients from now on. Settings of the training arguments stay as they are."""
        model = self._accelerator.unwrap_model(self.model)
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, **(self._args.gradient_checkpointing_kwargs or {})}
        )
        if self._has_adapters:
            model.enable_input_require_grads()

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Context manager: the model is in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    # ---- What the model can do ----

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
        found = {name: value for name, value in settings if "drop" in name and isinstance(value, float) and value}
        # Those of other heads than the one that generates
        return {name: value for name, value in found.items() if not name.startswith(("classifier_", "summary_"))}

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
        noisy = drops or bool(self._dropout_of_base())
        weights = [tensor for tensor in base.parameters() if tensor.is_floating_point()]
        precise = self._accelerator.mixed_precision == "no" and all(it.dtype == torch.float32 for it in weights)
        exact = torch.get_float32_matmul_precision() == "highest" and not getattr(base, "is_quantized", False)
        return precise and exact and not noisy
