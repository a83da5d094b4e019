"""The command line, one module a command.

``main`` puts the commands together, ``attach`` finds the server, ``exits`` says what an exit code means.
"""
