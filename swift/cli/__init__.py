"""Floor 7: the program `swift`. Finds the command, parses, checks, starts processes, and turns errors into exit codes.

Nothing here or below it on the way to a command imports torch: a wrong flag is answered in a fraction of a second.
Exit codes: 0 done (or stopped on request after saving), 1 the run failed, 2 the request was wrong; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from swift.core.errors import SwiftError, UsageError, nearest
from swift.core.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: the words after `swift`; default: those of this process.

    Returns:
        The exit code.
    """
    from swift.config.parse import HelpRequested

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except HelpRequested as request:
        return _print(request.text)
    except SwiftError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        _silence_stdout()
        asked_only = not words or words[0] in ("config", "data", "doctor", "help") or words[0].startswith("-")
        if asked_only or "--help" in words or "-h" in words:
            return 0
        print(f"swift {words[0]} stopped: nobody reads its output any more", file=sys.stderr)
        return 1
    except Exception as error:  # the process boundary: anything else is a bug, and its traceback is the report
        import traceback

        if _lost_peer(error):
            print(f"rank {os.environ['RANK']} stopped: another process of the run has gone", file=sys.stderr)
            return 1
        traceback.print_exc()
        return 1


def _lost_peer(error: Exception) -> bool:
    """Whether a collective failed since another process ended; that one's end is the news, not this one's trace."""
    words = str(error)
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and (
        "Connection closed by peer" in words or "Connection reset by peer" in words
    )


def _dispatch(words: list[str]) -> int:
    from swift.config.catalog import COMMANDS, LATER

    if not words or words[0] in ("-h", "--help"):
        return _print(overview())
    if words[0] in ("--version", "-V", "version"):
        return _print(f"swift {__version__}\n")
    name, rest = words[0].replace("_", "-"), words[1:]
    if name == "help":
        return _dispatch([*rest[:1], "--help", *rest[1:]])
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name in LATER:
        raise UsageError(f"`swift {name}` is not available yet", fix=LATER[name])
    if name not in COMMANDS:
        close = nearest(name, [*COMMANDS, "help"])
        fix = f"did you mean `swift {close[0]}`? " if close else ""
        if name.startswith("-") or name.endswith((".yaml", ".yml", ".json")):
            fix = "the command comes first: `swift sft ...`; "
        raise UsageError(f"there is no command {words[0]!r}", fix=fix + "`swift --help` lists them")
    command = COMMANDS[name]
    if command.config is None:
        return int(_command_main(command.module)(rest))
    return _run_configured(command.name, rest)


def _run_configured(name: str, words: list[str]) -> int:
    """Parse, check, then run a command here or in several processes."""
    from swift.cli import launch
    from swift.config import commands as classes
    from swift.config.catalog import COMMANDS
    from swift.config.parse import parse_command_line
    from swift.core.logging import get_logger

    command = COMMANDS[name]
    assert command.config is not None
    parsed = parse_command_line(getattr(classes, command.config), words, command=name, usage=command.usage)
    from swift.commands.precheck import precheck  # not before: help and wrong flags don't need it

    if command.distributed:
        launch.adopt(parsed.config)
    precheck(parsed.config, places=parsed.places)
    if command.distributed and not launch.inside():
        code = launch.launch([*name.split(), *words], parsed.config)
        if code is not None:
            return code
    for note in parsed.notes:
        get_logger().info(note)
    return int(_command_main(command.module)(parsed.config))


def _command_main(module: str) -> Callable[[Any], int]:
    return importlib.import_module(f"swift.commands.{module}").main


def overview() -> str:
    """What `swift --help` prints."""
    from swift.config.catalog import COMMANDS
    from swift.config.helptext import Style

    style = Style.for_stdout()
    lines = [f"swift {__version__}: tune, evaluate and serve large models", "", "usage: swift COMMAND [...]", ""]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(style.bold(group))
        lines += [f"  {c.name:<12} {c.help}" for c in COMMANDS.values() if c.group == group]
        lines.append("")
    lines += [
        "swift COMMAND --help         its settings; swift COMMAND --help WORD: some of them",
        "swift quickstart             the whole way on a small model, in minutes",
        "swift config show FILE.yaml  what a configuration file comes to",
    ]
    return "\n".join(lines) + "\n"


def _print(text: str) -> int:
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def _report(error: SwiftError) -> None:
    from swift.core.logging import local_rank, rank, world_size

    where = f"[rank {rank()}] " if world_size() > 1 and rank() > 0 else ""
    if where and local_rank() > 0:  # most often what the first rank of this machine says as well: one line is enough
        print(f"{where}error: {error.message.splitlines()[0]}", file=sys.stderr)
    else:
        print(f"{where}error: {error.render()}", file=sys.stderr)


def _silence_stdout() -> None:
    """Keep the interpreter from flushing into the closed pipe once more at exit."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)
