"""`kvstore doctor`: what it says, where it says it, its exit codes, and what it does not import."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvstore.cli import json_target, machine

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPERATIONS = {
    *((name, device) for name in ("int4_encode", "int4_decode", "page_copy") for device in ("cpu", "cuda")),
    *((name, device) for name in ("decode_attention", "prefill_attention") for device in ("cpu", "cuda")),
    ("hash_chain", "cpu"),
    ("checksum", "cpu"),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the entry points of pyproject.toml known, as an installation does."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "kvstore_llm-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvstore-llm\nVersion: 0\n")
    lines = []
    for group, entries in PROJECT["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    lines += ["[kvstore.commands]", "hello = hello_command:hello", "broken = hello_command:missing"]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "hello_command.py").write_text(
        "import typer\n\ndef hello(name: str, fail: bool = False) -> None:\n"
        "    '''Say hello.'''\n    print('hello', name)\n    raise typer.Exit(1 if fail else 0)\n"
    )
    return folder


def kvstore(installed: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KVSTORE_KERNELS"} | variables
    environment["PYTHONPATH"] = f"{installed}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", "kvstore.cli", *words]
    return subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, check=False)


def test_every_operation_is_listed_with_its_path_and_reasons(installed: Path) -> None:
    done = kvstore(installed, "doctor", "--kernels", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)["kernels"]
    assert {(one["operation"], one["device"]) for one in report["operations"]} == OPERATIONS
    for one in report["operations"]:
        assert one["path"]
        assert all(other["reason"] for other in one["passed_over"])
        assert one["speed"] is None
    assert report["problems"] == []
    if report["extension"]:  # an operation that misses a function of the extension would quietly run on torch
        said = [other["reason"] for one in report["operations"] for other in one["passed_over"]]
        assert [reason for reason in said if "the extension has no" in reason] == []
    assert {one["path"] for one in report["paths"]} >= ({"baseline"} if report["extension"] else set())
    assert report["threads"]["cores"] >= 1
    assert report["huge_pages"]["meaning"]


def test_the_table_says_the_same(installed: Path, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    done = kvstore(installed, "doctor", "--json", str(file))
    assert done.returncode == 0
    report = json.loads(file.read_text())["kernels"]
    lines = done.stdout.splitlines()
    for one in report["operations"]:
        assert any(line.split()[:3] == [one["operation"], one["device"], one["path"]] for line in lines)
    for word in (f"(ABI {report['abi']})", "CPU", "threads", "transparent huge pages"):
        assert word in done.stdout


def test_switched_off_everything_plain_runs_and_says_why(installed: Path) -> None:
    done = kvstore(installed, "doctor", "--json", "-", KVSTORE_KERNELS="off")
    report = json.loads(done.stdout)["kernels"]
    assert (done.returncode, report["active"], report["reason"]) == (0, None, "switched off by KVSTORE_KERNELS=off")
    paths = {one["operation"]: one for one in report["operations"] if one["device"] == "cpu"}
    assert {one["path"] for one in paths.values()} <= {"torch", "numpy", "hashlib", "xxhash"}
    assert paths["int4_encode"]["passed_over"] == [{"path": "native", "reason": "switched off by KVSTORE_KERNELS=off"}]


def test_a_setting_that_cannot_be_met_is_a_problem(installed: Path) -> None:
    done = kvstore(installed, "doctor", KVSTORE_KERNELS="avx1024")
    report_line = next((line for line in done.stdout.splitlines() if line.startswith("problem")), "")
    if "not built" in done.stdout:
        pytest.skip("there is no extension that could refuse it")
    assert (done.returncode, done.stderr) == (1, "")
    assert "KVSTORE_KERNELS='avx1024': expected off, auto or a path that runs here" in report_line


def test_a_check_that_fails_is_a_problem_and_hides_no_other(installed: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "other-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[kvstore.doctor]\nkernels-a = no_such_module:check\nloop = no_such:check\n"
    )
    done = kvstore(installed, "doctor", "--json", "-", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0  # PYTHONPATH above is replaced: the control
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, installed, ROOT)))}
    command = [sys.executable, "-m", "kvstore.cli", "doctor", "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)["kernels"]
    assert done.returncode == 1
    assert report["problems"] == ["check kernels-a: ModuleNotFoundError: No module named 'no_such_module'"]
    assert {(one["operation"], one["device"]) for one in report["operations"]} == OPERATIONS


@pytest.mark.parametrize(
    "words",
    [["doctor", "--nonsense"], ["no-such-command"], ["doctor", "--json", "/nowhere/report.json"], ["doctor", "--json"]],
)
def test_bad_usage_is_2(installed: Path, words: list[str]) -> None:
    done = kvstore(installed, *words)
    assert done.returncode == 2
    assert done.stderr


def test_packages_above_add_commands(installed: Path) -> None:
    done = kvstore(installed, "hello", "you")
    assert (done.returncode, done.stdout) == (0, "hello you\n")
    assert "command broken left out: AttributeError" in done.stderr
    assert kvstore(installed, "hello", "you", "--fail").returncode == 1
    listed = kvstore(installed, "--help")
    assert (listed.returncode, "hello" in listed.stdout, "doctor" in listed.stdout) == (0, True, True)


def test_it_starts_light(installed: Path) -> None:
    program = (
        "import sys; from kvstore.cli import main; code = main(['doctor', '--json', sys.argv[1]]); "
        "heavy = {'torch', 'cupy', 'triton', 'redis', 'lmdb', 'prometheus_client', 'hello_command'}; "
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    environment = dict(os.environ) | {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(installed / "light.json")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_measuring_gives_a_figure_of_what_runs_on_the_cpu(installed: Path) -> None:
    done = kvstore(installed, "doctor", "--measure", "--json", "-")
    report = json.loads(done.stdout)["kernels"]
    figures = {one["operation"]: one["speed"] for one in report["operations"] if one["device"] == "cpu"}
    for operation in ("int4_encode", "int4_decode", "hash_chain"):
        assert figures[operation]["value"] > 0
        assert figures[operation]["ratio"] > 0


def test_entry_points_of_the_project_exist() -> None:
    values = [value for entries in PROJECT["entry-points"].values() for value in entries.values()]
    for value in [*PROJECT["scripts"].values(), *values]:
        module, _, name = value.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_where_nothing_can_be_written_is_known_before(tmp_path: Path) -> None:
    assert json_target.cannot_write("-") == ""
    assert json_target.cannot_write(str(tmp_path / "new.json")) == ""
    assert not (tmp_path / "new.json").exists()
    assert "folder" in json_target.cannot_write(str(tmp_path))
    assert "there is no folder" in json_target.cannot_write(str(tmp_path / "none" / "new.json"))


def test_huge_pages_are_measured_not_only_read() -> None:
    pages = machine.huge_pages()
    if pages.setting in ("always", "madvise") and pages.granted_fraction is not None:
        assert pages.granted_fraction > 0.5 or "none were free" in pages.meaning
    if pages.setting == "never":
        assert pages.granted_fraction in (0, None)
