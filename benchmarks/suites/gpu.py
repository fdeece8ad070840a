"""The kernels on a CUDA card: achieved bytes a second beside a copy inside the device, attention beside rivals.

`python -m benchmarks.suites.gpu` prints how the card's page is called, or says that there is no card and exits with 1.
"""

from __future__ import annotations

import importlib
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.rows import Options, Row, compared, spread

if TYPE_CHECKING:
    import torch

    from benchmarks.card.clock import DeviceClock, Timed
    from benchmarks.card.scene import Scene

NO_CARD = "no CUDA device: this suite measures on a card; nothing was measured"
COPY = "device copy"
_GIGA = 1e-9


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is moved and read."""

    copy_bytes: int = 1 << 30
    contexts: tuple[tuple[str, int, int], ...] = (("8k_b8", 8_192, 8), ("32k_b8", 32_768, 8))
    codec_blocks: int = 16_384


SMALL = Sizes(copy_bytes=1 << 20, contexts=(("8k_b8", 256, 2),), codec_blocks=32)


def rows(options: Options) -> Iterator[Row]:
    """Rows of the first card. RuntimeError without one."""
    yield from device_rows(_card(), SMALL if options.quick else Sizes(), options)


def describe() -> dict[str, Any]:
    """What the environment of a report says beside the machine."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def page_name() -> str:
    """`gpu-CARD-DATE`: how the page of this card's figures is called. RuntimeError without a card."""
    import torch

    card = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(_card()).lower()).strip("-")
    return f"gpu-{card}-{time.strftime('%Y-%m-%d', time.gmtime())}"


def device_rows(device: torch.device, sizes: Sizes, options: Options) -> Iterator[Row]:
    """The rows on any device that torch knows; parts that need CUDA kernels are left out elsewhere, with a word."""
    import torch

    from benchmarks.card.clock import DeviceClock
    from benchmarks.card.scene import Scene, Shape

    clock = DeviceClock(device)
    with torch.inference_mode():
        yield from _copy_rows(clock, sizes, options)
        yield from _page_rows(clock, sizes, options)
        for name, context, batch in sizes.contexts:
            scene = Scene(Shape(), batch, context, device, options.seed)
            if name == sizes.contexts[0][0]:
                yield from _codec_rows(clock, scene, sizes, options)
            yield from _attention_rows(name, clock, scene, options)
            del scene


def _card() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(NO_CARD)
    return torch.device("cuda", torch.cuda.current_device())


# -- copies -----------------------------------------------------------------------------------------------------------


def _copy(device: torch.device, size: int) -> Timed:
    import torch

    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _copy_rows(clock: DeviceClock, sizes: Sizes, options: Options) -> Iterator[Row]:
    found = clock.samples({"copy": _copy(clock.device, sizes.copy_bytes)}, options.rounds)["copy"]
    rates = [2 * sizes.copy_bytes * _GIGA / seconds for seconds in found]
    note = "device_copy: a copy inside the device's memory; rates count bytes read and bytes written."
    yield compared("gpu", "device_copy", "GB/s", rates, better="larger", note=note)


def _page_rows(clock: DeviceClock, sizes: Sizes, options: Options) -> Iterator[Row]:
    """Gather and scatter of scattered pages by our kernel and by torch's index_select, beside the copy."""
    import torch

    for label, page_bytes in (("32KiB", 32 << 10), ("2KiB", 2 << 10)):
        count = max(1, sizes.copy_bytes // 2 // page_bytes)
        slab = torch.randint(0, 255, (2 * count, page_bytes), dtype=torch.uint8, device=clock.device)
        run = torch.empty((count, page_bytes), dtype=torch.uint8, device=clock.device)
        order = torch.randperm(2 * count, device=clock.device)[:count]
        sides: dict[str, Timed] = {
            f"gather_torch_{label}": _gather(slab, order, run),
            "copy": _copy(clock.device, count * page_bytes),
        }
        sides |= _kernel_pages(label, slab, run, order, page_bytes, options)
        found = clock.samples(sides, options.rounds)
        for case in sides:
            if case != "copy":
                yield _rate(
                    case, found[case], found["copy"], 2 * count * page_bytes, "pages scattered over twice as many"
                )


def _gather(slab: torch.Tensor, order: torch.Tensor, run: torch.Tensor) -> Timed:
    import torch

    return lambda: torch.index_select(slab, 0, order, out=run)


def _kernel_pages(
    label: str, slab: torch.Tensor, run: torch.Tensor, order: torch.Tensor, page_bytes: int, options: Options
) -> dict[str, Timed]:
    """Our copier on torch's current stream, so that the clock's events stand around it."""
    if slab.device.type != "cuda":
        options.log("gpu: gather and scatter kernels need a card: left out")
        return {}
    cuda = _cuda_package(options)
    if cuda is None:
        return {}
    codec = importlib.import_module("quant.cuda.codec")
    device = cuda.cuda_device(slab.device.index)
    stream = codec.current_stream(slab.device.index)
    copier = cuda.PageCopier(device, stream)
    pages = cuda.PageSet.of_tensor(slab, order.cpu().numpy() * page_bytes)
    address = run.data_ptr()
    return {
        f"gather_{label}": lambda: copier.gather(pages, address, page_bytes, run),
        f"scatter_{label}": lambda: copier.scatter(address, pages, page_bytes, run),
    }


def _cuda_package(options: Options) -> Any:
    """`quant.cuda` when its kernels work here, else None, with the reason in the log."""
    try:
        cuda = importlib.import_module("quant.cuda")
    except ImportError as error:
        options.log(f"gpu: no CUDA kernels: {error}")
        return None
    usable, reason = cuda.status()
    if not usable:
        options.log(f"gpu: no CUDA kernels: {reason}")
        return None
    return cuda


# -- codec ------------------------------------------------------------------------------------------------------------


def _codec_rows(clock: DeviceClock, scene: Scene, sizes: Sizes, options: Options) -> Iterator[Row]:
    """Encode and decode of whole blocks, beside a copy of the bf16 side."""
    import torch

    count = min(sizes.codec_blocks, len(scene.full_slots))
    index = torch.from_numpy(scene.full_slots[:count]).to(clock.device)
    keys, values = scene.slab.keys_view(0)[index].contiguous(), scene.slab.values_view(0)[index].contiguous()
    records = torch.empty((count, scene.record_bytes), dtype=torch.uint8, device=clock.device)
    decoded = torch.empty_like(keys), torch.empty_like(values)
    codec = scene.codec
    raw_bytes = keys.nbytes + values.nbytes
    sides: dict[str, Timed] = {
        "encode_int4_d128": lambda: codec.encode_batch(keys, values, records),
        "decode_int4_d128": lambda: codec.decode_into(records, *decoded),
        "copy": _copy(clock.device, raw_bytes),
    }
    found = clock.samples(sides, options.rounds)
    note = "codec rows: rates count the bf16 side once and the records once; the copy is one of the bf16 side"
    for case in ("encode_int4_d128", "decode_int4_d128"):
        yield _rate(case, found[case], found["copy"], raw_bytes + records.nbytes, note, copied_bytes=2 * raw_bytes)


def _rate(
    case: str, ours: list[float], copy: list[float], moved_bytes: int, note: str, copied_bytes: int | None = None
) -> Row:
    """GB/s beside the copy's; the ratio is the copy's time over ours."""
    rates = [moved_bytes * _GIGA / seconds for seconds in ours]
    beside = [(copied_bytes or moved_bytes) * _GIGA / seconds for seconds in copy]
    return Row(
        suite="gpu",
        case=case,
        unit="GB/s",
        value=statistics.median(rates),
        baseline=COPY,
        baseline_value=statistics.median(beside),
        ratio=statistics.median(copy) / statistics.median(ours),
        rounds=len(ours),
        spread=spread(rates),
        note=note,
    )


# -- attention --------------------------------------------------------------------------------------------------------


def _attention_rows(name: str, clock: DeviceClock, scene: Scene, options: Options) -> Iterator[Row]:
    """Decode attention in place: bytes of KV read a second beside a copy, and times beside every rival."""
    from benchmarks.card.rivals import RIVALS
    from engine_adapter.attention import backend_names, get_backend

    backend = get_backend("triton" if "triton" in backend_names() and clock.device.type == "cuda" else "torch")
    sides: dict[str, Timed] = {
        "bf16": scene.attend(backend, cold=False),
        "int4": scene.attend(backend, cold=True),
        "copy": _copy(clock.device, max(1, scene.full_bytes // 2)),
    }
    rivals = []
    for rival, build in RIVALS.items():
        try:
            sides[rival] = build(scene)
            sides[rival]()
        except Exception as error:  # not installed, or not for this card: whatever it is, the others go on
            sides.pop(rival, None)
            options.log(f"gpu: {rival} left out: {type(error).__name__}: {error}")
        else:
            rivals.append(rival)
    found = clock.samples(sides, options.rounds)
    note = (
        f"attention rows: 32 query and 8 KV heads of 128, backend {backend.name}; int4: first block and newest 128 "
        "tokens in bf16; rates count the KV bytes that are read, the copy's bytes read and written"
    )
    read = {"bf16": scene.full_bytes, "int4": scene.cold_bytes}
    for form, read_bytes in read.items():
        case = f"attention_{form}_{name}"
        yield compared(
            "gpu",
            case,
            "GB/s",
            [read_bytes * _GIGA / seconds for seconds in found[form]],
            better="larger",
            baseline=COPY,
            theirs=[scene.full_bytes * _GIGA / seconds for seconds in found["copy"]],
            note=note,
        )
        for rival in rivals:
            yield compared(
                "gpu",
                f"{case}_vs_{rival}",
                "ms",
                [1e3 * seconds for seconds in found[form]],
                better="smaller",
                baseline=rival,
                theirs=[1e3 * seconds for seconds in found[rival]],
                note=note,
            )


if __name__ == "__main__":
    try:
        print(page_name())
    except RuntimeError as missing:
        print(f"gpu: {missing}", file=sys.stderr)
        sys.exit(1)
