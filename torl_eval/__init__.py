"""Evaluation on benchmarks: the sets, the runs of a protocol over them, estimates with their errors, comparisons."""
