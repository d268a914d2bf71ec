"""Scripts for engines' own environments: they import nothing of this kit."""
