"""Do running engines do what this kit says of them?

Random cases are put to an engine's own code, in an environment of its own, and to this kit.
"""
