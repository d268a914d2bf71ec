"""An engine's worker: a process that is asked one case at a time, and that may die."""

import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from mambackpt.conformance.environments import EngineSkippedError, Environment
from mambackpt.conformance.pieces import Answer, Case, Piece
from mambackpt.errors import CheckpointError

FOLDER = Path(__file__).parent / "workers"
CANNOT = 3  # exit status of a worker whose machine cannot run the engine
_LAST_WORDS = 15  # lines of a dead worker's error stream that are shown


class WorkerError(CheckpointError, RuntimeError):
    """A worker that died, that was silent too long or that did not answer with a JSON object."""


class Worker:
    """A worker's process, for a ``with`` statement; `ask` it one case at a time.

    ``seconds`` is how long a case may take. The process runs in a folder of its own, which is
    removed with everything that the engine wrote there.
    """

    def __init__(self, piece: Piece, environment: Environment, seconds: float = 300.0) -> None:
        self._name = piece.worker
        self._seconds = seconds
        self._asked = 0
        self._silent = False
        self._folder = tempfile.TemporaryDirectory(prefix="mambackpt-worker-")
        home = self._folder.name
        self._errors: IO[bytes] = (Path(home) / "stderr").open("w+b")
        self._process = subprocess.Popen(
            [str(environment.python), str(FOLDER / piece.worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=home,
            env={
                **os.environ,
                **environment.variables,
                **dict(piece.environment),
                # what an engine leaves in a user's caches goes with the folder
                **dict.fromkeys(("TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), home),
            },
            text=True,
            errors="replace",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._folder.cleanup()

    def send(self, case: Case) -> None:
        """Hand a case over; the worker answers while the caller does something else."""
        assert self._process.stdin is not None
        self._asked += 1
        try:
            print(json.dumps(case, separators=(",", ":")), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._dead() from None

    def receive(self) -> Answer:
        """Return the answer to the case that was sent last."""
        assert self._process.stdout is not None
        timer = threading.Timer(self._seconds, self._end_silence)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise self._dead()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerError(
                f"{self._name} answered case {self._asked} with {line.strip()!r:.80}; expected one "
                "JSON object a line. Try keeping the engine's own words off standard output."
            )
        return answer

    def ask(self, case: Case) -> Answer:
        """Return the engine's answer to one case."""
        self.send(case)
        return self.receive()

    def _end_silence(self) -> None:
        self._silent = True
        self._process.kill()

    def _dead(self) -> CheckpointError:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if status == CANNOT:
            return EngineSkippedError(lines[-1] if lines else f"{self._name} cannot run here")
        how = f"ended with status {status}"
        if self._silent:
            how = f"was silent for {self._seconds:g} s"
        said = "\n  ".join(lines[-_LAST_WORDS:]) or "nothing"
        return WorkerError(
            f"{self._name} {how} at case {self._asked}; expected an answer to each. "
            f"Try that case alone. It said:\n  {said}"
        )
