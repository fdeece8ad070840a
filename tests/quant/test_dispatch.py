"""The dispatch: the best that can run is decided on once, the rest says why not, and tests can force any of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quant import dispatch
from quant.dispatch import Implementation, Speed

ROOT = Path(__file__).resolve().parents[2]
SUM = "test_sum"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    dispatch.withdraw(SUM, "cpu")


def test_the_first_that_can_run_is_decided_on_once() -> None:
    asked: list[str] = []

    def absent() -> str:
        asked.append("fast")
        return "no such unit"

    dispatch.offer(
        SUM,
        "cpu",
        [Implementation("fast", absent), Implementation("good", variant=lambda: "v2"), Implementation("plain")],
    )
    for _ in range(3):
        assert dispatch.implementation_of(SUM, "cpu") == "good"
    assert asked == ["fast"]
    found = dispatch.decision(SUM, "cpu")
    assert (found.path, found.implementation, found.passed_over) == ("good-v2", "good", (("fast", "no such unit"),))
    assert found in dispatch.decisions("cpu")
    assert found not in dispatch.decisions("cuda")


def test_nothing_that_can_run_is_said() -> None:
    dispatch.offer(SUM, "cpu", [Implementation("fast", lambda: "no such unit")], measure=lambda: Speed(1, "x", 1, "y"))
    assert dispatch.decision(SUM, "cpu").path == "none"
    assert dispatch.measured(SUM, "cpu") is None


def test_forcing_holds_for_a_while_and_only_for_what_can_run() -> None:
    dispatch.offer(SUM, "cpu", [Implementation("fast"), Implementation("plain"), Implementation("far", lambda: "away")])
    with dispatch.forced(SUM, "cpu", "plain"):
        assert dispatch.implementation_of(SUM, "cpu") == "plain"
    assert dispatch.implementation_of(SUM, "cpu") == "fast"
    with (
        pytest.raises(ValueError, match=r"got 'far', which cannot run \(away\); offered: fast, plain, far"),
        dispatch.forced(SUM, "cpu", "far"),
    ):
        pass
    with pytest.raises(ValueError, match="nobody offers it"), dispatch.forced("test_nothing", "cpu", "plain"):
        pass


def test_off_leaves_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_KERNELS", "off")
    dispatch.offer(SUM, "cpu", [Implementation("fast"), Implementation("good"), Implementation("plain")])
    found = dispatch.decision(SUM, "cpu")
    assert found.path == "plain"
    assert found.passed_over == (
        ("fast", "switched off by KVSTORE_KERNELS=off"),
        ("good", "switched off by KVSTORE_KERNELS=off"),
    )


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="expected distinct ones"):
        dispatch.offer(SUM, "cpu", [Implementation("a"), Implementation("a")])
    with pytest.raises(ValueError, match="at least one"):
        dispatch.offer(SUM, "cpu", [])
    with pytest.raises(ValueError, match=r"nobody offers it; known: .*int4_encode on cpu"):
        dispatch.implementation_of("test_nothing", "cpu")


def test_a_measurement_is_of_what_runs() -> None:
    dispatch.offer(SUM, "cpu", [Implementation("plain")], measure=lambda: Speed(12.345, "GB/s", 0.5, "a copy"))
    assert str(dispatch.measured(SUM, "cpu")) == "12.3 GB/s, 0.5 of a copy"


def test_an_optional_part_says_what_is_missing() -> None:
    assert dispatch.module_absence("quant.codec", "no_such_package_here") == "no no_such_package_here"
    assert dispatch.module_absence("quant.no_such_part") == "quant.no_such_part is not part of this version"


def test_codec_and_pages_are_offered_without_torch() -> None:
    program = (
        "import sys; from quant import dispatch; "
        "print([(d.operation, d.device) for d in dispatch.decisions()], 'torch' in sys.modules, 'cupy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    for operation in ("int4_encode", "int4_decode", "page_copy"):
        for device in ("cpu", "cuda"):
            assert repr((operation, device)) in done.stdout
    assert done.stdout.strip().endswith("False False")


def test_the_codec_runs_where_it_is_forced_to(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from quant import get_codec, native

    if native.kernels is None:
        pytest.skip(native.reason)
    assert dispatch.implementation_of("int4_encode", "cpu") == "native"
    assert dispatch.implementation_of("int4_decode", "cpu") == "native"

    keys = torch.randn(1, 2, 16, 64, generator=torch.Generator().manual_seed(0))
    codec = get_codec("int4")
    expected = codec.encode(keys, keys)
    with dispatch.forced("int4_encode", "cpu", "torch"), monkeypatch.context() as patched:
        patched.setattr(native, "kernels", None)  # whoever still went there would fail
        assert codec.encode(keys, keys) == expected
