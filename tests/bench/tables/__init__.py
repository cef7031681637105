"""Tables that READMEs show: each module prints one, with `python -m`."""
