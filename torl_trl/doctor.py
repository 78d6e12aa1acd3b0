"""Look a run over before GPUs are taken: `python -m torl_trl.doctor --config X.yaml [--key value ...] [--json]`.

The command keeps its name here; the doctor is the package `torl_doctor`, above all that it looks at.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("torl_doctor", run_name="__main__", alter_sys=True)
