"""Which path is chosen, and what is said when a better one, or none, can be used."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from quant import native
from quant.native import choice, selftest
from tests.quant.native.build_kit import CAN_BUILD, ROOT, ask, needs_extension

PROGRAM = "import quant.native as n; print(n.active_path(), '|', n.reason)"


@pytest.fixture
def kernels() -> Any:
    """The extension; its path is put back afterwards."""
    before = native.active_path()
    yield native.kernels
    native.kernels.activate(before)


def test_the_extension_is_there_where_it_can_be_built() -> None:
    if not CAN_BUILD:
        pytest.skip("no C compiler, or no headers of Python")
    if "switched off" in native.reason:
        pytest.skip(native.reason)
    assert native.kernels is not None, native.reason


@needs_extension
def test_every_path_that_runs_here_passes_its_self_test() -> None:
    failed = [state for state in native.self_test_every_path() if state.failed]
    assert failed == []


@needs_extension
def test_a_path_that_fails_its_self_test_is_passed_over(kernels: Any) -> None:
    if len(native.available_paths()) < 2:
        pytest.skip("one path only, as on Arm")
    best, second = native.available_paths()[:2]
    asked: list[str] = []

    def broken_on_best(extension: Any) -> str:
        asked.append(extension.active())
        return "2 + 2 is 5" if extension.active() == best else ""

    chosen = choice.choose(kernels, checks={"sums": broken_on_best})
    assert (chosen.path, chosen.reason, kernels.active()) == (second, "", second)
    assert asked == [best, second]
    (failed,) = [state for state in chosen.states if state.failed]
    assert (failed.name, failed.reason) == (best, "self-test of sums failed: 2 + 2 is 5")


@needs_extension
def test_a_check_that_raises_has_failed(kernels: Any) -> None:
    def raises(extension: Any) -> str:
        raise OverflowError("too far")

    chosen = choice.choose(kernels, checks={"fine": lambda extension: "", "sums": raises})
    assert chosen.path is None
    assert chosen.reason.count("self-test of sums failed: OverflowError: too far") == len(native.available_paths())


@needs_extension
def test_a_named_path_that_fails_is_not_replaced(kernels: Any) -> None:
    chosen = choice.choose(kernels, "baseline", checks={"sums": lambda extension: "wrong"})
    assert (chosen.path, chosen.reason) == (None, "baseline: self-test of sums failed: wrong")


@needs_extension
@pytest.mark.parametrize("setting", ["baseline", " BASELINE "])
def test_the_setting_names_a_path(setting: str) -> None:
    assert ask(ROOT, PROGRAM, KVSTORE_KERNELS=setting).strip() == "baseline |"


@needs_extension
def test_a_setting_that_cannot_be_met_is_said_and_nothing_native_runs() -> None:
    said = ask(ROOT, PROGRAM, KVSTORE_KERNELS="avx1024")
    assert "None | KVSTORE_KERNELS='avx1024': expected off, auto or a path that runs here (" in said
    assert said.count("RuntimeWarning: kvstore-llm: no native kernels") == 1


def test_switched_off_is_silent() -> None:
    assert ask(ROOT, PROGRAM, KVSTORE_KERNELS="off").strip() == "None | switched off by KVSTORE_KERNELS=off"


@needs_extension
def test_a_path_is_forced_for_a_while(kernels: Any) -> None:
    before = kernels.active()
    for name in native.available_paths():
        with native.forced_path(name):
            assert native.active_path() == name
        assert native.active_path() == before
    with pytest.raises(ValueError, match="avx1024"), native.forced_path("avx1024"):
        pass


@needs_extension
def test_a_failing_check_is_warned_of_once_at_import() -> None:
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("quant.native.selftest", {str(ROOT / "quant/native/selftest.py")!r})
selftest = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(selftest)
selftest.CHECKS["sums"] = lambda extension: "wrong" if extension.active() != "baseline" else ""
import quant.native
print(quant.native.active_path())
"""
    said = ask(ROOT, program)
    assert said.splitlines()[0] == "baseline" or said.splitlines()[-1] == "baseline"
    if len(native.available_paths()) > 1:
        assert said.count("RuntimeWarning: kvstore-llm: native kernels run on path baseline, since ") == 1
        assert "self-test of sums failed: wrong" in said


@needs_extension
def test_what_the_cpu_lacks_is_named(kernels: Any) -> None:
    for state in choice.states(kernels):
        assert state.usable == (state.reason == "")
    assert choice._lacking("amx", frozenset({"avx2", "fma", "f16c", "bmi2"})) == (
        "this CPU lacks avx512f, avx512bw, avx512dq, avx512vl, avx512_vnni, avx512_bf16, amx_tile, amx_int8"
    )
    everything = frozenset(flag for flags in choice.NEEDS.values() for flag in flags)
    assert "the system does not let processes use it" in choice._lacking("amx", everything)


@needs_extension
def test_features_agree_with_the_paths(kernels: Any) -> None:
    runnable = {name for name, runs_here in kernels.paths() if runs_here} - {"baseline"}
    assert set(native.features()) & set(choice.NEEDS) >= runnable
    source = (ROOT / "quant/native/csrc/kernels.h").read_text(encoding="ascii")
    for bit, name in enumerate(choice.FEATURES):
        assert f"KV_CPU_{name.upper()} = 1 << {bit}," in source


def test_a_stale_build_is_refused() -> None:
    class Old:
        ABI = choice.ABI - 1

    assert choice.refused_by_abi(Old) == (
        f"stale build (its ABI number is {choice.ABI - 1}, this version needs {choice.ABI}); reinstall"
    )
    assert "its ABI number is None" in choice.refused_by_abi(object())


@needs_extension
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers take their time")
def test_self_tests_are_quick(kernels: Any) -> None:
    best = native.available_paths()[0]
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        assert selftest.failures(kernels, best) == ""
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02
