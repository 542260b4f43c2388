"""Data sets, metrics, runner, experiments."""
