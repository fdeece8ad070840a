"""A report as one HTML page that needs no other file: frame and style. Light and dark by the reader's own setting.

Pure text; the charts that go into it are in `kvstore.charts`. Used by the demo's report and by commands with `--html`.
"""

from __future__ import annotations

from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16181d; --soft: #5a6270; --line: #d9dde3;
  --ample: #6b7280; --tight: #c2570c; --int4: #1d5fd1; --host: #7c4fc4; --full: #0f7f74; --work: #b0455c;
  --good: #1a7f37; --bad: #c62828;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101216; --card: #191c22; --ink: #e8eaee; --soft: #a3abb8; --line: #333943;
    --ample: #9aa3b2; --tight: #f0883e; --int4: #6aa5ff; --host: #b794f6; --full: #3fbfae; --work: #f08aa0;
    --good: #4cc26a; --bad: #ff7b72;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 8px 0; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 4px; }
p { margin: 6px 0 12px; max-width: 76ch; }
.soft, figcaption, .note { color: var(--soft); font-size: .9rem; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.grid.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); margin-bottom: 16px; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 200px), 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; margin: 0;
  min-width: 0; }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; }
.tile span { color: var(--soft); font-size: .9rem; }
svg { display: block; width: 100%; height: auto; margin: 8px 0 4px; }
svg text { fill: var(--soft); font: 13px system-ui, sans-serif; }
svg text.axis { fill: var(--ink); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .limit { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 5 4; }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.line.ample { stroke: var(--ample); stroke-dasharray: 7 3; }
.line.tight { stroke: var(--tight); }
.line.int4 { stroke: var(--int4); }
.line.full { stroke: var(--full); }
.line.host { stroke: var(--host); }
.line.work { stroke: var(--work); }
.area.full { fill: var(--full); }
.area.int4 { fill: var(--int4); }
.swatch.ample, .piece.ample { background: var(--ample); }
.swatch.tight, .piece.tight { background: var(--tight); }
.swatch.int4, .piece.int4 { background: var(--int4); }
.swatch.host, .piece.host { background: var(--host); }
.swatch.full, .piece.full { background: var(--full); }
.swatch.work, .piece.work { background: var(--work); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 4px 0;
  font-size: .85rem; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.bar { margin: 8px 0; }
.bar-name { display: flex; justify-content: space-between; gap: 12px; font-size: .9rem; }
.track { display: flex; height: 14px; background: var(--page); border-radius: 4px; overflow: hidden; }
.piece { height: 100%; min-width: 2px; }
.promises { list-style: none; padding: 0; margin: 0; }
.promises li { padding: 10px 0; border-bottom: 1px solid var(--line); }
.promises li:last-child { border-bottom: 0; }
.mark { font-weight: 700; margin-right: 8px; }
.mark.yes { color: var(--good); } .mark.no { color: var(--bad); } .mark.skip { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.meaning { text-align: left; white-space: normal; min-width: 260px; color: var(--soft); }
th.words, td.words { text-align: left; white-space: normal; min-width: 110px; }
tbody th { font-weight: 600; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
"""


def html_page(title: str, body: str) -> str:
    """The whole page. `title` is escaped here; `body` is HTML, the contents of <main>."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )
