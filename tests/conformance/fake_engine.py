"""A worker without an engine: it doubles numbers, and can be told to fail in several ways."""

import json
import os
import sys
import time
from pathlib import Path


def main(says: str) -> None:
    if says == "cannot":
        print("skipped: this machine has no fingers", file=sys.stderr)
        sys.exit(3)
    for line in sys.stdin:
        sizes = [len(request["tokens"]) for request in json.loads(line)["requests"]]
        if says == "litter":
            Path("litter").write_text("left behind")
            (Path(os.environ["XDG_CACHE_HOME"]) / "cache").write_text("left behind")
        if says == "die" and len(sizes) > 2:
            print("the engine fell over", file=sys.stderr, flush=True)
            os._exit(7)
        if says == "sleep":
            time.sleep(60)
        if says == "garbage":
            print("Loading weights: 100%", flush=True)
        wrong = says == "wrong"
        answers = [{"cached": 2 * size + (wrong and size > 9), "created": [size]} for size in sizes]
        answer = {"error": "too large"} if says == "refuse" else {"requests": answers}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(os.environ.get("FAKE_ENGINE", ""))
