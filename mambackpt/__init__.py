"""Where must a hybrid language model save its recurrent state, and is the saved state right?

Every public name loads on first use, so ``import mambackpt`` loads no heavy library. The names and
their homes stand in one table, ``__init__.pyi`` beside this file, which type checkers read too.
"""

from importlib import import_module

with open(f"{__file__}i") as stub:  # noqa: PTH123 (pathlib alone would double the import's time)
    _HOME = {line.split()[3]: line.split()[1] for line in stub if line.startswith("from ")}
del stub

__version__ = "0.1.0"
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        from mambackpt.needs import explain_missing

        words = explain_missing(error)
        if words is None:
            raise
        raise ModuleNotFoundError(words, name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
