"""Engines generate turns for `run_rollouts`; the protocol is in `base`."""
