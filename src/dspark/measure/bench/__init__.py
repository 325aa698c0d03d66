"""`dspark bench`: modes and baselines side by side on the same prompts, with a control, and what came of it."""
