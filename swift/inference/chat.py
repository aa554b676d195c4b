"""A conversation with a model, line by line: messages, commands, answers as they come, Ctrl-C.

It works the same on a terminal and on a pipe. What is said stays in the history until `/reset`, including an answer
that was stopped halfway.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift.config.inference import GenerationConfig
from swift.core.errors import SwiftError, did_you_mean
from swift.data.rows import RowProblem
from swift.inference.engine import Completion, Engine
from swift.inference.terminal import Terminal

FENCE = '"""'
_COMMAND = re.compile(r"/([A-Za-z_-]+)(?:\s+(.*))?$", re.DOTALL)
_EXIT_WITHIN_S = 1.0  # two Ctrl-C in this time leave
_HELP = f"""\
Type a message and press Enter. A line of {FENCE} begins a message of several lines, another one sends it.
  /multi         the same as a line of {FENCE}
  /system TEXT   set the system prompt and start anew; /system alone shows it, /system {FENCE[:2]} removes it
  /reset         forget the conversation, keep the system prompt
  /save FILE     append the conversation to FILE as one JSON line, ready to be trained on
  /help          this text
  /exit          leave (so do Ctrl-D, and Ctrl-C twice within a second)
Ctrl-C stops the answer and keeps the conversation."""


class Chat:
    """One interactive session.

    Args:
        engine: answers.
        generation: how; `stream` False shows each answer when it is complete.
        terminal: where lines come from.
        system: system prompt to begin with; None leaves it to the template.
    """

    def __init__(
        self, engine: Engine, generation: GenerationConfig, terminal: Terminal, *, system: str | None = None
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._terminal = terminal
        self._system = system
        # the best beam is known at the end only
        self._streams = generation.stream if generation.stream is not None else generation.num_beams == 1
        self._turns: list[dict[str, Any]] = []
        self._answered = 0  # answers so far; seeds the next one
        self._interrupted_at = float("-inf")
        self._commands: dict[str, Callable[[str], bool]] = {
            "help": self._help,
            "multi": self._multi,
            "system": self._set_system,
            "reset": self._reset,
            "save": self._save,
            "exit": lambda _: False,
            "quit": lambda _: False,
        }

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, system prompt first."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + self._turns

    def run(self) -> int:
        """Read and answer until the end of input, `/exit` or a double Ctrl-C; returns the exit code, 0."""
        if self._terminal.interactive:
            self._terminal.note("/help lists the commands; Ctrl-D leaves")
        while True:
            try:
                line = self._terminal.read("you> ")
                if line is None:
                    break
                if not self._take(line):
                    break
            except KeyboardInterrupt:
                if self._second_interrupt():
                    break
                self._terminal.note("\n(Ctrl-C again within a second, Ctrl-D or /exit leaves)")
        if self._terminal.interactive:
            self._terminal.note("")
        return 0

    def _take(self, line: str) -> bool:
        """Handle one line; False ends the session."""
        if line.strip() == FENCE:
            return self._multi("")
        command = _COMMAND.match(line.strip())
        if command is None:
            if line.strip():
                self._answer(line)
            return True
        name, argument = command[1].lower(), (command[2] or "").strip()
        if name not in self._commands:
            hint = did_you_mean(f"/{name}", [f"/{known}" for known in self._commands])
            self._terminal.note(f"there is no command /{name}{'; ' + hint if hint else ''} (/help lists them)")
            return True
        return self._commands[name](argument)

    def _multi(self, _: str) -> bool:
        lines: list[str] = []
        while (line := self._terminal.read("...> ")) is not None and line.strip() != FENCE:
            lines.append(line)
        text = "\n".join(lines)
        if text.strip():
            self._answer(text)
        return line is not None

    def _answer(self, text: str) -> None:
        """Answer one message. A message that can't be answered leaves the conversation as it was."""
        self._turns.append({"role": "user", "content": text})
        pieces: list[str] = []
        note = None
        try:
            prompt = self._engine.encoder.encode_prompt(self.messages)
            if self._streams:
                note = self._stream(prompt, pieces)
            else:
                completion = self._engine.generate([prompt], self._generation, seeds=[self._answered])[0]
                pieces.append(completion.text)
                self._terminal.write(completion.text)
                note = self._cut_note(completion)
        except RowProblem as problem:
            self._refuse(problem.message)
            return
        except SwiftError as error:
            self._refuse(error.render())
            return
        except KeyboardInterrupt:
            if self._second_interrupt():
                raise
            note = "(stopped)"
        self._terminal.write("\n")
        if note:
            self._terminal.note(note)
        answer = "".join(pieces)
        if answer:
            self._turns.append({"role": "assistant", "content": answer})
            self._answered += 1
        else:
            self._turns.pop()

    def _refuse(self, reason: str) -> None:
        """Take the last message back and say why."""
        self._turns.pop()
        self._terminal.note(reason + ("\n/reset forgets the conversation so far" if self._turns else ""))

    def _stream(self, prompt: list[int], pieces: list[str]) -> str | None:
        """Show the answer as it comes, keeping its pieces even if Ctrl-C ends it; returns a note on how it ended."""
        stream = self._engine.stream(prompt, self._generation, seed=self._answered)
        try:
            for piece in stream:
                pieces.append(piece)
                self._terminal.write(piece)
        finally:
            stream.close()
        return self._cut_note(stream.completion) if stream.completion else None

    def _cut_note(self, completion: Completion) -> str | None:
        if completion.finish_reason != "length":
            return None
        context = self._engine.context_length
        full = context is not None and completion.num_prompt_tokens + len(completion.tokens) >= context
        why = f"the context of {context} tokens is full: /reset starts anew" if full else "see --max_new_tokens"
        return f"(cut after {len(completion.tokens)} tokens; {why})"

    def _second_interrupt(self) -> bool:
        before, self._interrupted_at = self._interrupted_at, time.monotonic()
        return self._interrupted_at - before < _EXIT_WITHIN_S

    def _help(self, _: str) -> bool:
        self._terminal.note(_HELP)
        return True

    def _reset(self, _: str) -> bool:
        self._turns.clear()
        self._terminal.note("the conversation starts anew")
        return True

    def _set_system(self, text: str) -> bool:
        if not text:
            self._terminal.note(f"system prompt: {self._system}" if self._system else "no system prompt is set")
            return True
        self._system = None if text in (FENCE[:2], "''") else text
        self._turns.clear()
        self._terminal.note(
            "system prompt " + ("set" if self._system else "removed") + "; the conversation starts anew"
        )
        return True

    def _save(self, file: str) -> bool:
        if not file:
            self._terminal.note("say where to: /save FILE")
            return True
        if not self._turns:
            self._terminal.note("there is nothing to save yet")
            return True
        path = Path(file).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            self._terminal.note(f"could not write {path}: {error.strerror or error}")
            return True
        self._terminal.note(f"saved {len(self.messages)} messages to {path}")
        return True
