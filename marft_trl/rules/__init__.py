# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Tables that users choose from by name: baselines, credit rules, levels, critics; and the row that they fill."""
