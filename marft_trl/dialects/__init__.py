# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""OpenAI's API as programs speak it: requests to a model, and answers, in the two forms that there are."""

from .asked import Asked, Said, SaidCall
from .fields import RequestError


__all__ = ["Asked", "RequestError", "Said", "SaidCall"]
