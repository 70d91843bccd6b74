"""Schedules, timelines and results in other forms: tables, charts, JSON, torch's CSV, Perfetto's traces, the explorer
in a file, recordings.

All chapters use the tables and charts. What is read is checked first, and text of strangers is made printable.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "balance_sheet": "Table num_messages table",
        "charts": "bars block_chart ranks stacked waterfall",
        "csv_form": "CLASSES check_order_of_losses read_csv to_csv unknown_to_torch",
        "explorer": "Exploration SCRIPTS STATIC TOLD explore frame_of in_script page_of read_static",
        "figures": "alternative_text figure_html",
        "json_form": "reading run_to_dict timeline_from_dict timeline_to_dict",
        "memory": "held_over_time memory_chart",
        "palette": "CATEGORIES COLOURS LIMIT LINES MARKS PART",
        "perfetto": "MICROSECONDS events_of to_perfetto write_events",
        "results": "Recording load results",
        "safe_text": "printable",
    },
)
