"""What `kvstore inspect` prints: plain aligned text, one row a family of copies. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.inspection import Findings, Span

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_LISTED = 10


def lines(findings: Findings) -> Iterator[str]:
    files = f"; files take {size(findings.file_bytes)}" if findings.file_bytes is not None else ""
    yield f"{findings.target}: {findings.copy_count} copies, {size(findings.stored_bytes)}{files}"
    yield ""
    if findings.families:
        yield from _table(findings)
        yield ""
    for root in sorted({name.root for name in findings.families if name.root in findings.words}):
        words = ", ".join(f"{word} {said}" for word, said in sorted(findings.words[root].items()))
        yield f"root {root[:12]}: {words}"
    if findings.corrupt:
        causes = ", ".join(f"{cause} {count}" for cause, count in sorted(findings.corrupt.items()))
        yield f"corrupt     {sum(findings.corrupt.values())} ({causes})"
        for one in findings.corrupt_examples[:_LISTED]:
            yield f"            {one['cause']}: {one['copy']}"
        if len(findings.corrupt_examples) > _LISTED:
            yield "            ..."
    else:
        yield "corrupt     none" if findings.verified else "corrupt     not looked for (--verify)"
    if findings.signed_count:
        yield f"signed      {findings.signed_count} whose signature was not checked: set KVSTORE_SECRET"
    if findings.unsigned_count:
        yield f"unsigned    {findings.unsigned_count}: a store with this secret does not read them"
    if findings.used_again_count is not None:
        yield f"used again  {findings.used_again_count} since they were written"
    for label, count in (("gone", findings.gone_count), ("deleted", findings.deleted_count)):
        if count:
            yield f"{label:<11} {count}"
    if findings.foreign_count:
        yield f"foreign     {findings.foreign_count} keys that are no copies: {', '.join(findings.foreign_examples)}"
    for note in findings.notes:
        yield f"note        {note}"
    for problem in findings.problems:
        yield f"problem     {problem}"


def _table(findings: Findings) -> Iterator[str]:
    is_disk = findings.kind == "disk"
    head = ["root", "group", "codec", "form", "heads", "layers", "copies", "bytes", "corrupt"]
    head += ["written ago"] if is_disk else ["unused for", "time to live left"]
    rows = [[*head, "shape"]]
    for name, family in sorted(findings.families.items()):
        form = "exact" if name.exact else "lossy"
        row = [name.root[:12], str(name.group), name.codec, form, name.heads, name.layers]
        row += [str(family.copy_count), size(family.stored_bytes), str(family.corrupt_count)]
        row += [span(family.age_seconds)] if is_disk else [span(family.idle_seconds), span(family.ttl_seconds)]
        rows.append([*row, family.shape])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def size(byte_count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if byte_count < 1024:
            return f"{byte_count:.0f} {unit}" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1024
    return f"{byte_count:.1f} TiB"


def span(seconds: Span) -> str:
    if seconds.least is None or seconds.most is None:
        return "?"
    least, most = duration(seconds.least), duration(seconds.most)
    return least if least == most else f"{least} to {most}"


def duration(seconds: float) -> str:
    unit, divisor = next(((unit, divisor) for unit, divisor in _UNITS if seconds >= divisor), _UNITS[-1])
    return f"{seconds / divisor:.0f}{unit}"
