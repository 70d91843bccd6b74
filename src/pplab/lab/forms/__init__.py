"""Other forms of schedules, timelines and results: tables, charts, JSON, torch's CSV, Perfetto's
traces, the explorer in a file, recordings.

All chapters use the tables and charts. Whatever is read is checked first, and the text of other
people's files is made printable.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(__name__, __file__)
