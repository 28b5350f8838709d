# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A progress bar that shows the team's reward."""

from __future__ import annotations

from transformers import ProgressCallback


class TeamProgressCallback(ProgressCallback):
    """
    The progress bar of transformers with the team's reward beside it, in place of all metrics in lines of their own.

    ```python
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(TeamProgressCallback)
    ```
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and logs and "reward" in logs:
            self.training_bar.set_postfix_str(f"reward {logs['reward']:.2f}")
