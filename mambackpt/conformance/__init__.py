"""Running engines, held to the rules of this kit."""
