"""The live page at `/`: one HTML text with its style and its script, which asks /v1/stats and /v1/history. Pure text.

The script (page.js) puts everything that comes from outside into the page as text, never as markup; the policy sent
with the page lets nothing else run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from kvstore.page import STYLE, html_page

_HERE = Path(__file__).parent


@cache
def _own_files() -> tuple[str, str]:
    return (_HERE / "page.css").read_text(encoding="utf-8"), (_HERE / "page.js").read_text(encoding="utf-8")


@cache
def live_page() -> str:
    style, script = _own_files()
    body = (
        f"<style>{style}</style>\n"
        '<noscript><p>This page needs JavaScript. The same figures: <a href="/v1/stats">/v1/stats</a>, '
        '<a href="/metrics">/metrics</a>, <code>kvstore top</code>.</p></noscript>\n'
        f'<div id="app"></div>\n<script>{script}</script>'
    )
    return html_page("kvstore daemon", body)


@cache
def content_security_policy() -> str:
    """Only this page's own style and script, only this server's answers, in no other page's frame."""
    style, script = _own_files()
    styles = f"{_source(STYLE)} {_source(style)}"
    return (
        f"default-src 'none'; style-src {styles}; script-src {_source(script)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
