"""To frameworks and back: a plan as what Megatron-LM, torchtitan or torch has to be told, and a launch line or a layout
string as what a plan is asked.

Chapters 11 and 12 use it, and `pplab choose`. Flags and fields are those of Megatron-LM d98e8a64, torchtitan b5bcd76c
and torch 2.13; tests read them back by parsers of their own.
"""

from ...optional import lazily

__all__, __getattr__, __dir__ = lazily(
    __name__,
    {
        "to_paste": "flags",
    },
)
