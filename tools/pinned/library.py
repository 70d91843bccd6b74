"""Runs in Pyodide: /python_stdlib.zip becomes /stdlib.zip, compiled, without what no cell of a page can use."""

import importlib.util
import marshal
import zipfile

LEFT_OUT = set(
    """
    _aix_support _android_support _apple_support _ios_support _osx_support _pyrepl antigravity compileall ctypes curses
    dbm ensurepip ftplib idlelib imaplib lib2to3 mailbox mailcap msilib multiprocessing netrc nntplib pip plistlib
    poplib pty pyclbr pydoc pydoc_data rlcompleter smtplib sqlite3 telnetlib test this tkinter trace turtle turtledemo
    venv webbrowser wsgiref xmlrpc zipapp
    """.split()
)
ENCODINGS = set(
    """
    __init__ aliases ascii cp437 cp1252 idna latin_1 raw_unicode_escape unicode_escape
    utf_8 utf_8_sig utf_16 utf_16_le utf_16_be
    """.split()
)
UNCHECKED = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)  # there is no source
WHEN = (1980, 1, 1, 0, 0, 0)


def is_kept(name: str) -> bool:
    first, *rest = name.removesuffix(".py").split("/")
    if name.endswith("/") or first in LEFT_OUT or "tests" in rest:
        return False
    return first != "encodings" or rest[-1] in ENCODINGS


with zipfile.ZipFile("/python_stdlib.zip") as given, zipfile.ZipFile("/stdlib.zip", "w") as made:
    for name in sorted(filter(is_kept, given.namelist())):
        content = given.read(name)
        if name.endswith(".py"):
            content = UNCHECKED + marshal.dumps(compile(content, name, "exec", dont_inherit=True))
            name += "c"
        made.writestr(zipfile.ZipInfo(name, WHEN), content)  # stored, so that the archive around it is smaller
