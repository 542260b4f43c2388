"""The paper's experiments: their settings, how they run, and their tables and plots."""
