"""Run histories through the scheduler of an installed vllm, on a CPU: cases in, steps out.

    python vllm_scheduler.py < cases.jsonl > answers.jsonl

Each line of the input is a case of ``settings`` and ``requests``, each line of the output its
``steps``, with the entries of `mambackpt.engine.trace_history`. Needs an environment with vllm, and
nothing of this project but the file beside it.
"""

import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path


def main() -> None:
    """Answer every case; whatever vllm prints goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore")
    from vllm_steps import Configurations, Run

    with tempfile.TemporaryDirectory() as folder:
        configurations = Configurations(Path(folder))
        for line in sys.stdin:
            try:
                answer = {"steps": list(Run(json.loads(line), configurations).steps())}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:400]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
