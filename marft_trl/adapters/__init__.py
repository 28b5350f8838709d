# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The weights of a team: adapters on one base, their policies, references and files."""
