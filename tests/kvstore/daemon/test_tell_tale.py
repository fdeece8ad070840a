"""A daemon's death is heard at once, however much memory the kernel has to give back first."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.daemon.tell_tale import TellTales
from kvstore.testing.transfer_contract import key_of
from tests.kvstore.daemon.kit import ROOT, ServeProcess, put, tier_at, until


def hung_up(descriptor: int, seconds: float = 0) -> bool:
    poller = select.poll()
    poller.register(descriptor, 0)
    return bool(poller.poll(int(seconds * 1000)))


def test_they_hang_up_with_close_and_leave_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tales = TellTales()
    if not tales.read_fds:
        pytest.skip("no close_range here")
    (tmp_path / "file").write_text("kept")
    copies = [os.dup(descriptor) for descriptor in tales.read_fds]
    with (tmp_path / "file").open() as file:  # what is opened and closed here is not the threads' table
        assert file.read() == "kept"
    assert [hung_up(one) for one in copies] == [False, False]
    tales.close()
    tales.close()
    assert [hung_up(one, 10) for one in copies] == [True, True]
    for one in copies:
        os.close(one)
    assert len(os.listdir("/proc/self/fd")) == before


def test_they_hang_up_when_a_process_is_killed_whose_sockets_another_holds() -> None:
    script = (
        "import os, sys, time; from kvstore.daemon.tell_tale import TellTales\n"
        "tales = TellTales(); os.dup2(tales.read_fds[0] if tales.read_fds else 0, int(sys.argv[1]))\n"
        "print(len(tales.read_fds), os.fork() if True else 0, flush=True); time.sleep(60)"
    )
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(theirs)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=[theirs],
    )  # fmt: skip
    assert process.stdout is not None
    count, child = (int(word) for word in process.stdout.readline().split())
    try:
        if not count:
            pytest.skip("no close_range here")
        pipe = os.open(f"/proc/{process.pid}/fd/{theirs}", os.O_RDONLY)
        assert not hung_up(pipe)
        process.kill()
        assert hung_up(pipe, 10), "a forked child holds what its parent had, but not this"
        os.close(pipe)
    finally:
        process.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        os.close(ours)
        os.close(theirs)


@pytest.mark.faults
def test_clients_hear_of_a_death_before_its_memory_is_gone(tmp_path: Path) -> None:
    server = ServeProcess(tmp_path / "d.sock", "--host-bytes", "2 GiB", environ={"KVSTORE_HOST_PREFAULT": "true"})
    tier = tier_at(str(tmp_path / "d.sock"))
    put(tier, [key_of(1)])
    reserved = Path(f"/proc/{server.process.pid}/status")
    until(
        lambda: int(next(x for x in reserved.read_text().splitlines() if x.startswith("VmSize")).split()[1]) > 2 << 20,
        60,
    )
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(server.process.pid, signal.SIGKILL)
    heard = until(lambda: not tier.is_up)
    server.process.wait()
    gone = time.monotonic() - began
    print(f"heard after {1000 * heard:.1f} ms, gone after {1000 * gone:.1f} ms")
    assert heard < gone / 4
    server.kill()
    tier.close()
