"""The grader of answers, which is a package of its own: torl_grading."""

from torl_grading import Grader, GraderError, Reason, Verdict, grade

__all__ = ["Grader", "GraderError", "Reason", "Verdict", "grade"]
