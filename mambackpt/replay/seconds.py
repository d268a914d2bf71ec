"""Seconds: recomputed tokens over the prefill rate that the reader gives, and nothing else."""

import math
from dataclasses import dataclass

from mambackpt.errors import CheckpointValueError


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Prompt tokens per second: of a busy server, and of one request alone where that is known.

    >>> rate = PrefillRate.of("12000,3000")
    >>> rate.seconds(6000), rate.words(6000)
    ((0.5, 2.0), '0.50 to 2.00 s')

    The kit measures no engine: a time to first token here is tokens to compute over this rate,
    without queueing and without the first decode step. Raises CheckpointValueError for what is no
    positive number of tokens per second, and for more than two.
    """

    fast: float
    slow: float

    @classmethod
    def of(cls, text: str) -> "PrefillRate":
        """Return the rate of an option: one number, or two with a comma between them."""
        parts = text.replace("_", "").split(",")
        try:
            rates = [float(part) for part in parts]
        except ValueError:
            rates = []
        if not 1 <= len(rates) <= 2 or not all(math.isfinite(r) and r > 0 for r in rates):
            raise CheckpointValueError(
                f"--prefill-rate is {text!r}; expected prompt tokens per second, or two such rates "
                "with a comma between them: of a full batch, and of one request alone. "
                "Try --prefill-rate 12000,3000."
            )
        return cls(max(rates), min(rates))

    def seconds(self, tokens: float) -> tuple[float, float]:
        """Return the least and the most seconds that so many tokens take."""
        return tokens / self.fast, tokens / self.slow

    def words(self, tokens: float) -> str:
        """Return these seconds as text; a range where two rates were given."""
        low, high = (f"{value:,.2f}" for value in self.seconds(tokens))
        if high == "0.00":
            return "under 0.01 s"
        return f"{low} s" if low == high else f"{low} to {high} s"

    def __str__(self) -> str:
        rates = [f"{rate:,.0f}" for rate in dict.fromkeys((self.fast, self.slow))]
        return f"{' and '.join(rates)} prompt tokens a second"
