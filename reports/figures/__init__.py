"""The figures of a page, one file per subject, and the canvas that they share."""
