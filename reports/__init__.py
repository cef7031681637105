"""What the scores mean: tables, figures, pages."""
