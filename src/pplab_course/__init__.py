"""Checkers of the chapters' exercises: each takes an answer, accepts any right one, and explains a wrong one."""

from .verdict import Verdict

__all__ = ["Verdict"]
