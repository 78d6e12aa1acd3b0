"""Interpreters run the code that the model writes: embedded (a fork server of ours), Sandbox Fusion, E2B.

`torl_trl.interpreters.get_interpreter` makes one by its name.
"""
