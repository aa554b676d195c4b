"""`swift doctor`: prints what is installed, what this machine can do and what is in the way. Never uses the network."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

from swift.config.fields import setting
from swift.config.parse import parse_command_line
from swift.core.doctor import Finding, examine, system_line
from swift.core.version import __version__

_COLORS = {"ok": "32", "info": "36", "warning": "33", "problem": "31"}


@dataclass
class DoctorOptions:
    """What is installed, what this machine can do, what is in the way. Exit code 1 if training cannot work."""

    json: bool = setting(False, help="print one JSON object")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse_command_line(DoctorOptions, argv, command="doctor", usage="[--json]").config
    findings = examine()
    problems = sum(finding.status == "problem" for finding in findings)
    if options.json:
        report = {
            "swift": __version__,
            "system": system_line(),
            "ok": problems == 0,
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(f"swift {__version__} · {system_line()}")
        for line in report_lines(findings, color=color):
            print(line)
    return 1 if problems else 0


def report_lines(findings: list[Finding], *, color: bool = False) -> list[str]:
    """The findings under their headings, then the count of what needs attention."""
    lines: list[str] = []
    for section in dict.fromkeys(finding.section for finding in findings):
        lines += ["", section]
        for finding in findings:
            if finding.section == section:
                status = f"{finding.status:<8}"
                shown = f"\x1b[{_COLORS[finding.status]}m{status}\x1b[0m" if color else status
                lines.append(f"  {shown} {finding.name:<14} {finding.detail}")
                if finding.fix:
                    lines.append(f"  {'':<8} {'':<14} -> {finding.fix}")
    counts = {status: sum(finding.status == status for finding in findings) for status in ("problem", "warning")}
    words = [f"{count} {status}{'s' if count > 1 else ''}" for status, count in counts.items() if count]
    lines += ["", ", ".join(words) if words else "no problems found"]
    return lines
