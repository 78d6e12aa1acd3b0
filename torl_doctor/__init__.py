"""Will a run work? Told before it takes GPUs: `python -m torl_trl.doctor`, and `preflight` in each training."""
