"""What a person types: `python -m trainer plan|tokenise|run|evaluate|export|inspect`.

Each module is one command, or what several share. A command has `add`, which describes it to the parser and imports
nothing heavy, and `main`, which does it and returns the exit code.
"""
