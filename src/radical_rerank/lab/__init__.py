"""The lab: data sets, evaluation, experiments, diagnosis and benchmarks. It needs the extra `[lab]`."""
