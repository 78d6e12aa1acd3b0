"""Errors that a user can mend: the launch scripts print their one sentence, without a traceback."""


class UserError(ValueError):
    """What is wrong, the value, and what to do, in one sentence."""
