"""Schedules, timelines and results in other forms: tables, charts, JSON, torch's CSV, Perfetto's
traces, the explorer in a file, recordings.

All chapters use the tables and charts. What is read is checked first, and text of strangers is made
printable.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
