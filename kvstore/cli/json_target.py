"""Where a command's --json goes: a file or standard output. Known to be writable before any work is done."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def cannot_write(target: str) -> str:
    """Why nothing can be written to `target` ("-": standard output), "" when it can."""
    if target == "-":
        return ""
    path = Path(target).absolute()
    if path.is_dir():
        return f"got the folder {path}, expected a file"
    if path.exists():
        return "" if os.access(path, os.W_OK) else f"no permission to write {path}"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "" if os.access(path.parent, os.W_OK) else f"no permission to write in {path.parent}"


def write(target: str, report: Any) -> None:
    """`report` as JSON, one key a line."""
    text = json.dumps(report, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")
