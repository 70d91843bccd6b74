"""How much of a file a reader has to read, the same on every Python."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

UNREAD = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT), tokenize.ENDMARKER}


def tokens(path: Path) -> int:
    """What a reader has to read: all but comments, docstrings and the ends of lines. An f-string is one token and those
    of its expressions; a string of names that is split is one token a name."""
    text, docs, hidden = path.read_text(), set(), 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docs.add(node.body[0].lineno)
        elif isinstance(node, ast.FormattedValue):
            hidden += _plain(ast.unparse(node.value))
        elif isinstance(node, ast.Attribute) and node.attr == "split" and isinstance(node.value, ast.Constant):
            hidden += len(node.value.value.split()) - 1
    return hidden + _plain(text, docs)


def _plain(text: str, docs: set[int] = frozenset()) -> int:
    """Its tokens, an f-string being one, as before Python 3.12."""
    start, end = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    count = inside = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        inside += token.type == start
        if not inside and token.type not in UNREAD and not (token.type == tokenize.STRING and token.start[0] in docs):
            count += 1
        if token.type == end:
            inside -= 1
            count += not inside
    return count
