"""The course as static pages, and its notebooks run again."""

from mambackpt.site.notebooks import NOTEBOOK_NAMES, execute, find_notebooks, stripped
from mambackpt.site.pages import build_site

__all__ = ["NOTEBOOK_NAMES", "build_site", "execute", "find_notebooks", "stripped"]
