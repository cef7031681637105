"""The layout, the style and the script of all pages, and the one function that fills them."""
