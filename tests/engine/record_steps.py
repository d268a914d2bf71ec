"""Record what a released scheduler does with a few hundred small histories, for the tests.

    PYTHONPATH=<vllm, unpacked> python tests/engine/record_steps.py <python with what vllm needs>

The cases are those of the conformance room with fixed seeds, of every kind the smallest ones.
"""

import json
import os
import subprocess
import sys

import recorded_steps

from mambackpt.conformance import vllm_scheduler

SEEDS = range(500_000, 500_040)  # of each kind
KEPT = 6  # of each kind


def main() -> None:
    """Ask the worker, and write the fixture."""
    worker = vllm_scheduler.__file__.replace("vllm_scheduler.py", "workers/vllm_scheduler.py")
    engine = subprocess.Popen(
        [sys.argv[1], worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    histories = []
    for kind in vllm_scheduler.KINDS:
        cases = [recorded_steps.renumbered(vllm_scheduler.make_case(seed, kind)) for seed in SEEDS]
        cases.sort(key=lambda case: sum(len(r["prompt"] + r["output"]) for r in case["requests"]))
        for case in cases[:KEPT]:
            print(json.dumps(case), file=engine.stdin, flush=True)
            answer = json.loads(engine.stdout.readline())
            if "steps" in answer:
                histories.append((case, answer["steps"]))
    recorded_steps.write(os.environ.get("RELEASE", "0.33.0"), histories)
    print(len(histories), "histories", sum(len(s) for _, s in histories), "steps")


if __name__ == "__main__":
    main()
