"""Apertium as a translation engine: installed pairs, chained where no direct one exists, as subprocesses.

Apertium is a separate program (GPL) that is called, never linked. Every sentence is a NUL-terminated record of its own,
so it is translated as if it were alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import deque

from swift.core.errors import DependencyError, SwiftError

INSTALL = "apt install apertium apertium-eng-spa apertium-fr-es"
# what Debian's pairs call a language: two letters or three
_CODES = {
    "ara": "ar", "cat": "ca", "deu": "de", "eng": "en", "epo": "eo", "eus": "eu", "fra": "fr", "glg": "gl", "ita": "it",
    "nld": "nl", "oci": "oc", "por": "pt", "ron": "ro", "rus": "ru", "spa": "es", "swe": "sv", "dan": "da", "nob": "no",
    "ukr": "uk", "pol": "pl", "hin": "hi", "urd": "ur", "isl": "is", "afr": "af", "bel": "be", "bul": "bg", "mkd": "mk",
}  # fmt: skip
_SPECIAL = re.compile(r"([\\\[\]{}^$/@<>*~#+])")
_ESCAPED = re.compile(r"\\(.)|\[([^\]]*)\]", re.DOTALL)
_TIMEOUT_S = 600


def _code(language: str) -> str:
    """Two letters where there are two."""
    return _CODES.get(language.partition("_")[0].lower(), language.partition("_")[0].lower())


class Apertium:
    """Translates between two languages, there and back.

    Args:
        source, target: two- or three-letter codes.

    Raises:
        DependencyError: the program isn't installed, or no chain of installed pairs leads there and back.
    """

    def __init__(self, source: str, target: str) -> None:
        program = shutil.which("apertium")
        if program is None:
            raise DependencyError(
                "the program `apertium` is needed for back-translation with this backend, and isn't installed",
                where="text.back_translation.backend",
                fix=f"{INSTALL} (and the pairs for your languages)",
            )
        self.program = program
        self.modes = self._installed()
        self.chain = [*self._path(_code(source), _code(target)), *self._path(_code(target), _code(source))]

    def _installed(self) -> dict[tuple[str, str], str]:
        """(from, to) -> name of the mode; plain pairs only, no variants."""
        listing = subprocess.run([self.program, "-l"], capture_output=True, text=True, timeout=_TIMEOUT_S)
        modes: dict[tuple[str, str], str] = {}
        for name in listing.stdout.split():
            if re.fullmatch(r"[a-z]{2,3}-[a-z]{2,3}", name):
                source, target = name.split("-")
                modes.setdefault((_code(source), _code(target)), name)
        return modes

    def _path(self, source: str, target: str) -> list[str]:
        """The shortest chain of modes; of equals the first by name."""
        paths: dict[str, list[str]] = {source: []}
        queue = deque([source])
        while queue:
            language = queue.popleft()
            if language == target:
                return paths[language]
            for (start, end), mode in sorted(self.modes.items()):
                if start == language and end not in paths:
                    paths[end] = [*paths[language], mode]
                    queue.append(end)
        known = ", ".join(sorted(self.modes.values())) or "none"
        raise DependencyError(
            f"no installed pairs of apertium lead from {source} to {target}; installed: {known}",
            where="text.back_translation",
            fix=f"install the pair's package, for example {INSTALL}",
        )

    def there_and_back(self, sentences: list[str]) -> list[str | None]:
        """Through every pair of the chain, in turn.

        Raises:
            SwiftError: apertium failed, or gave back another number of sentences.
        """
        for mode in self.chain:
            sentences = self._translate(sentences, mode)
        return list(sentences)

    def _translate(self, sentences: list[str], mode: str) -> list[str]:
        # an empty blank after the end makes a sentence without a full stop complete
        stream = "".join(_SPECIAL.sub(r"\\\1", sentence.replace("\0", " ")) + "[]\0" for sentence in sentences)
        command = [self.program, "-u", "-z", "-f", "none", mode]
        try:
            done = subprocess.run(command, input=stream.encode(), capture_output=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise SwiftError(f"apertium didn't finish {mode} within {_TIMEOUT_S} s", where=" ".join(command)) from error
        records = done.stdout.decode(errors="replace").split("\0")
        if done.returncode or len(records) < len(sentences):
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise SwiftError(
                f"apertium failed on {mode} (exit code {done.returncode}): {said[-1] if said else 'it said nothing'}",
                where=" ".join(command),
                fix="run this command by hand; reinstall the pair if it fails there too",
            )
        return [
            " ".join(_ESCAPED.sub(lambda m: m[1] or m[2] or "", record).split()) for record in records[: len(sentences)]
        ]
