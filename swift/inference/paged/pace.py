"""How much a step may hold so that answers keep coming at the wanted pace.

A step's time is nearly a line over its tokens: what any step costs, and what each token adds. The line is fitted to the
latest steps and read backwards: as many tokens as fit into the wanted time. Who is answering already goes on in any
case; prompts come in smaller pieces and newcomers wait. Without a wanted time nothing changes.
"""

from __future__ import annotations

from swift.inference.paged.scheduler import Limits

_MEMORY = 0.97  # weight of what was known before, at each step: about the last 30 steps count
_FEWEST_TOKENS = 4  # a step of fewer takes as long


class Pace:
    """Adapts an engine's limits after each step.

    Args:
        most: the limits that the user set.
        wanted_s: seconds from one token of an answer to the next.
    """

    def __init__(self, most: Limits, wanted_s: float) -> None:
        self._most = Limits(most.requests, most.tokens)
        self._wanted_s = wanted_s
        # sums over steps, older ones weighing less: 1, tokens, tokens squared, seconds, tokens times seconds
        self._sums = [0.0] * 5

    def limits_after(self, tokens: int, seconds: float) -> Limits:
        """What the next step may hold.

        Args:
            tokens, seconds: of the last step.
        """
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [_MEMORY * old + now for old, now in zip(self._sums, new, strict=True)]
        fixed, each = self._line()
        fitting = (self._wanted_s - fixed) / each if each > 0 else float(self._most.tokens)
        room = int(max(_FEWEST_TOKENS, min(fitting, self._most.tokens)))
        return Limits(min(self._most.requests, room), room)

    def _line(self) -> tuple[float, float]:
        """Seconds of any step, and of each of its tokens."""
        count, tokens, squares, seconds, products = self._sums
        spread = squares - tokens * tokens / count
        if spread <= 1e-9 * squares:  # all steps alike so far: take all of the time as the tokens'
            return 0.0, seconds / tokens
        each = (products - tokens * seconds / count) / spread
        fixed = (seconds - each * tokens) / count
        if each <= 0:  # noise: more tokens didn't take longer
            return seconds / count, 0.0
        return max(0.0, fixed), each
