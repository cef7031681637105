"""The results of a comparison elsewhere than on its pages: on the terminal, in files, as a site."""
