"""What to say where a library is missing."""

# library: the part of this kit that needs it, as in ``pip install 'mambackpt[notebooks]'``
_PARTS = {
    **dict.fromkeys(("torch", "triton", "numpy"), ""),
    **dict.fromkeys(
        ("matplotlib", "PIL", "ipywidgets", "IPython", "tqdm", "jupyterlab"), "notebooks"
    ),
    "transformers": "models",
    "distributed": "cluster",
    **dict.fromkeys(("nbclient", "nbconvert", "nbformat", "nbstripout", "playwright"), "dev"),
}


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """Return what is missing, for what, and what to try; None for a library that is not known.

    >>> print(explain_missing(ModuleNotFoundError(name="matplotlib.axes")))
    matplotlib is not installed in this Python; expected the kit's own environment. Try `make lab`
    in a checkout, or pip install --constraint constraints.txt '.[notebooks]'.
    """
    library = (error.name or "").partition(".")[0]
    if library not in _PARTS:
        return None
    extra = f"[{_PARTS[library]}]" if _PARTS[library] else ""
    only = " (triton is made for Linux)" if library == "triton" else ""
    return (
        f"{library} is not installed in this Python{only}; expected the kit's own environment. "
        f"Try `make lab`\nin a checkout, or pip install --constraint constraints.txt '.{extra}'."
    )
