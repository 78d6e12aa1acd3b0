"""What runs beside the model's programs: standard library only, nothing of torl_trl, so that it can run anywhere.

The embedded interpreter starts these files in its sandbox; the remote ones send their text along with a program.
"""
