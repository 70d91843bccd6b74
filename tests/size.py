"""How much of a file a reader has to read, the same on every Python."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

UNREAD = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT), tokenize.ENDMARKER}


def tokens(path: Path) -> int:
    """What a reader has to read: all but comments, docstrings and the ends of lines; an f-string is one token."""
    text, docs = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docs.add(node.body[0].lineno)
    start, end = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)  # from Python 3.12 on
    count = inside = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        inside += token.type == start
        if not inside and token.type not in UNREAD and not (token.type == tokenize.STRING and token.start[0] in docs):
            count += 1
        if token.type == end:
            inside -= 1
            count += not inside
    return count
