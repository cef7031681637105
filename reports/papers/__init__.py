"""What the five papers print, beside what comes out here: one module per paper, each a program."""
