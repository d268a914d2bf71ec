"""The house rules: where a file lives, what may import what, and what one import costs."""

import ast
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mambackpt

HEAVY = ("torch", "triton", "matplotlib", "ipywidgets", "IPython", "distributed", "transformers")

# module or room: what of this kit it imports; arrows point to what is imported. The table is what
# the code does: an arrow that nobody draws any more is struck out.
IMPORTS: dict[str, set[str]] = {
    "__init__": {"needs"},
    "needs": set(),
    "errors": set(),
    "kernels": set(),
    "geometry": {"errors"},
    "course": {"bench", "engine", "errors", "metadata", "models", "resume"},
    "models": {"cli", "errors"},
    "planner": {"errors", "geometry"},
    "site": {"cli", "errors"},
    "review": {
        *("cli", "draw", "engine", "errors", "figures", "geometry", "models", "replay", "why")
    },
    "__main__": {"errors", "needs"},
    "cli": {"errors"},
    "why": {"cli", "engine", "errors", "geometry", "models", "planner", "replay"},
    "engine": {"cli", "errors", "geometry", "planner"},
    "metadata": {"errors", "planner"},
    "draw": {"engine", "errors", "geometry", "planner"},
    "exporter": {"errors", "kernels", "metadata"},
    "replay": {"cli", "engine", "errors", "models", "planner"},
    "bench": {*("cli", "errors", "exporter", "kernels", "metadata", "models", "planner", "replay")},
    "conformance": {
        *("cli", "engine", "errors", "exporter", "geometry", "metadata", "planner", "replay")
    },
    "explore": {
        *("bench", "cli", "draw", "engine", "errors", "figures", "geometry", "models", "planner"),
        "replay",
    },
    "resume": {"cli", "engine", "errors", "exporter", "geometry", "metadata", "planner"},
    "figures": {
        *("bench", "cli", "draw", "engine", "errors", "geometry", "models", "planner", "replay"),
        *("resume", "why"),
    },
}

# The core, flat: what a serving engine would import. It stands alone.
CORE = ("errors", "geometry", "planner", "metadata", "exporter", "kernels")


def tracked(root: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode or not listed.stdout:
        pytest.skip("needs a git checkout")
    return listed.stdout.splitlines()


def modules(root: Path) -> dict[Path, str]:
    """Every module of the kit with its row in the table."""
    package = root / "mambackpt"
    rows = {p: p.stem for p in package.glob("*.py")}
    rooms = [p.parent for p in package.glob("*/__init__.py")]
    rows |= {p: room.name for room in rooms for p in room.rglob("*.py")}
    return rows | dict.fromkeys((root / "kernels").glob("*.py"), "kernels")


def test_the_kernels_folder_is_linked_and_is_no_package(root: Path) -> None:
    """The import name `kernels` belongs to another well-known package."""
    assert not (root / "kernels/__init__.py").exists()
    assert (root / "mambackpt/kernels").is_symlink()
    assert (root / "mambackpt/kernels").readlink() == Path("../kernels")
    [entry] = [line for line in tracked(root) if line.endswith("\tmambackpt/kernels")]
    assert entry.startswith("120000 ")


def test_another_package_named_kernels_is_still_found(tmp_path: Path, root: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("name = 'the other one'\n")
    code = "import mambackpt, kernels; print(kernels.name)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "the other one", done.stderr


def imported(path: Path, row: str) -> list[tuple[int, str]]:
    """The modules of this kit that a file imports, each with its line."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.level and row == "kernels":  # neighbours: the folder has no name of its own
                continue
            assert node.level == 0, f"{path.name}:{node.lineno}: write the import in full"
            if node.module == "mambackpt":
                names += [(node.lineno, f"mambackpt.{alias.name}") for alias in node.names]
            else:
                names.append((node.lineno, node.module))
        elif isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
    return [(line, name) for line, name in names if name.partition(".")[0] == "mambackpt"]


def test_the_table_of_imports_holds_the_arrows_that_exist_and_no_other(root: Path) -> None:
    arrows: dict[str, set[str]] = {row: set() for row in modules(root).values()}
    for path, row in modules(root).items():
        assert row in IMPORTS, f"{path.name}: say in IMPORTS what {row} imports"
        for line, name in imported(path, row):
            home = name.split(".")[1]
            if home == row:
                continue
            arrows[row].add(home)
            assert home in IMPORTS[row], (
                f"{path.relative_to(root)}:{line} imports {name}; {row} may import "
                f"{sorted(IMPORTS[row])}. Move the code, or pass the result in."
            )
    assert arrows == IMPORTS, "an arrow that nobody draws any more: strike it out"


def test_rooms_are_entered_by_their_face(root: Path) -> None:
    """What others may use stands in a room's `__init__`; nobody imports past it, tests aside."""
    rooms = {p.parent.name for p in (root / "mambackpt").glob("*/__init__.py")}
    for path, row in modules(root).items():
        for line, name in imported(path, row):
            _, home, *inside = name.split(".")
            assert home == row or home not in rooms or not inside, (
                f"{path.relative_to(root)}:{line} imports {name}: name it in the face of {home}"
            )


def test_no_import_goes_in_a_circle() -> None:
    done: set[str] = set()
    while layer := {row for row, needs in IMPORTS.items() if row not in done and needs <= done}:
        done |= layer
    assert done == set(IMPORTS), f"these import each other: {set(IMPORTS) - done}"


def test_the_core_stands_alone(tmp_path: Path, root: Path) -> None:
    """Its modules by themselves, in an empty folder: plan, build the metadata, export."""
    package = tmp_path / "mambackpt"
    package.mkdir()
    for name in ("__init__.py", "__init__.pyi", *(f"{m}.py" for m in CORE if m != "kernels")):
        shutil.copy(root / "mambackpt" / name, package)
    shutil.copytree(root / "kernels", package / "kernels")
    done = subprocess.run(
        [sys.executable, "-P", root / "tests" / "core_child.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{package}", "([7680], [4])", "torch", "triton"]


def test_the_core_can_be_read_in_a_day(root: Path) -> None:
    files = [root / "mambackpt" / f"{m}.py" for m in CORE if m != "kernels"]
    files += (root / "kernels").glob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= 2300


def test_no_function_is_longer_than_a_page(root: Path) -> None:
    """60 lines of body, docstring left out."""
    for path in modules(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                told = ast.get_docstring(node, clean=False) is not None
                body = node.body[told:] or node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1
                assert lines <= 60, f"{path.name}:{node.lineno} {node.name} has {lines} lines"


def test_every_module_is_on_the_map(root: Path) -> None:
    """CONTRIBUTING's table says what each module is for: nobody searches, nothing is hidden."""
    rows = [
        line
        for line in (root / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith("| ") and "`" in line
    ]
    named: set[str] = set()
    for row in rows:
        room = ""
        for word in re.findall(r"`([\w/.]+)`", row):
            if word.endswith("/"):
                room = word
            named.add(word if "/" in word else room + word)
    known = {
        str(path.relative_to(root)) for path in modules(root) if path.name != "__init__.py"
    } - {"mambackpt/__init__.py"}
    known = {name for name in known if not name.endswith("/command.py")}
    mapped = {name for name in named if name.endswith(".py")} - {"command.py"}
    assert known - mapped == set(), "say in CONTRIBUTING.md what these are for"
    assert {m for m in mapped if m.startswith("mambackpt/")} - known == set(), "not there"


def test_importing_the_kit_loads_no_heavy_library() -> None:
    code = f"import sys, mambackpt; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    "module", ["planner", "models", "engine", "replay", "conformance", "why", "cli", "__main__"]
)
def test_the_plain_modules_load_no_heavy_library(module: str) -> None:
    code = f"import sys, mambackpt.{module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_public_names_are_where_their_table_says() -> None:
    assert set(mambackpt.__all__) <= set(dir(mambackpt))
    for name, home in mambackpt._HOME.items():
        assert getattr(mambackpt, name) is getattr(importlib.import_module(home), name)


def test_no_public_name_is_a_module_s_name(root: Path) -> None:
    """A name that is both gives the function first and the module later."""
    homes = set(modules(root).values())
    assert not homes & set(mambackpt.__all__)


def test_the_order_in_which_names_are_asked_for_does_not_matter() -> None:
    names = ["explain", "CacheGeometry", "CheckpointError"]
    for order in itertools.permutations(names):
        code = f"import mambackpt; print([getattr(mambackpt, n).__module__ for n in {order!r}])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == str([mambackpt._HOME[n] for n in order])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'explian'"):
        _ = mambackpt.explian  # type: ignore[attr-defined]


# ---- the three files that say what to install --------------------------------------------------


def requirement_name(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def declared(root: Path) -> dict[str, list[str]]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def pins(root: Path) -> dict[str, str]:
    lines = (root / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {requirement_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned(root: Path) -> None:
    pinned = pins(root)
    for extra, requirements in declared(root).items():
        for requirement in requirements:
            assert requirement_name(requirement) in pinned, f"{requirement} of [{extra}]"
    assert (pinned["torch"], pinned["triton"]) == ("2.13.0", "3.7.1")  # the pair that torch pins


def test_what_is_installed_satisfies_the_pins_it_was_tested_with(root: Path) -> None:
    from importlib.metadata import version

    pinned = pins(root)
    for name in ("numpy", "matplotlib", "ipywidgets", "triton", "hypothesis"):
        assert version(name) == pinned[name]
    assert version("torch").split("+")[0] == pinned["torch"]


def test_the_conda_file_asks_for_what_the_project_asks_for(root: Path) -> None:
    text = (root / "environment.yml").read_text()
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    wanted = {r for requirements in declared(root).values() for r in requirements}
    named = [line for line in lines if ">=" in line and not line.startswith(("python", "#"))]
    assert set(named) <= wanted
    assert {requirement_name(r) for r in named} == {
        *("ipywidgets", "jupyterlab", "matplotlib", "numpy", "torch", "triton")
    }
    extras = ",".join(e for e in declared(root) if e)
    assert f"--editable .[{extras}]" in lines
    assert "--constraint constraints.txt" in lines
    python = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"python{python}" in lines


def test_the_makefile_installs_the_same_extras(root: Path) -> None:
    extras = ",".join(e for e in declared(root) if e)
    assert f"'.[{extras}]'" in (root / "Makefile").read_text()


# ---- what must not be in the tree --------------------------------------------------------------


def test_no_file_names_a_path_of_one_machine(root: Path) -> None:
    pattern = re.compile(r"(?<![\w.])/(work|farm|root|tmp)/[a-z]")
    for line in tracked(root):
        path = root / line.split("\t")[1]
        if path.is_file() and path.suffix in {".py", ".md", ".toml", ".yml", ".ipynb", ".json"}:
            found = pattern.search(path.read_text())
            assert not found or path.name == "test_layout.py", f"{path}: {found}"


def test_no_build_output_is_tracked(root: Path) -> None:
    for line in tracked(root):
        parts = Path(line.split("\t")[1]).parts
        assert not {".venv", "__pycache__", ".ipynb_checkpoints", "build"} & set(parts)
